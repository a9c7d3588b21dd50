"""Calls a user's model factory, and checks what it returns against the model protocol (api.py)."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
import torch

from relaygr_stream import settings
from relaygr_stream.errors import ConfigError, FactoryError, ModelError, RelayError
from relaygr_stream.models.api import RankingModel, unknown_items
from relaygr_stream.models.kv import KVLayout
from relaygr_stream.models.own_line import at_own_line
from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema

log = structlog.get_logger(__name__)


def model_from_factory(model: settings.Model, device: torch.device, dtype: torch.dtype) -> RankingModel:
    """What the settings' factory returns. Raises ConfigError for a wrong `model.path`, ModelError for a factory that is
    not there, fails, or returns what breaks the model protocol."""
    _add_folders(model.path)
    made = _call(_find_factory(model.factory), model, device, dtype)
    problem = _contract_problem(made)
    if problem:
        raise ModelError(f"`model.factory` = {model.factory!r} returned a {type(made).__name__}, but {problem}")
    assert isinstance(made, RankingModel)
    return made


def _add_folders(path: str) -> None:
    """Append these folders to sys.path. They come last, so that a file there cannot hide an installed library.

    The working directory is not included unless `path` names it. Raises ConfigError for a path that is no folder.
    """
    for folder in filter(None, path.split(os.pathsep)):
        if not Path(folder).is_dir():
            raise ConfigError(f"`model.path` = {path!r}: {folder!r} is no folder (seen from {Path.cwd()})")
        if (found := str(Path(folder).resolve())) not in sys.path:
            sys.path.append(found)


#: (settings.Model, torch.device, torch.dtype) → a model, as a user's module has it.
Factory = Callable[..., Any]


def _find_factory(name: str) -> Factory:
    module_name, separator, attribute = name.partition(":")
    if not (separator and module_name and attribute):
        raise ModelError(f"`model.factory` = {name!r}: write module:factory")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise any exception on import
        if not (isinstance(error, ModuleNotFoundError) and error.name == module_name):
            log.error("the model's module failed", module=module_name, exc_info=error)
        raise ModelError(
            f"`model.factory` = {name!r}: importing {module_name} failed: {type(error).__name__}: {error}"
            f"{at_own_line(error, module_name)}; is it installed, or is its folder in `model.path`?"
        ) from error
    try:
        factory = getattr(module, attribute)
    except AttributeError as error:
        raise ModelError(f"`model.factory` = {name!r}: {module_name} has no `{attribute}`") from error
    if not callable(factory):
        raise ModelError(f"`model.factory` = {name!r}: `{attribute}` is a {type(factory).__name__}, not callable")
    return factory  # type: ignore[no-any-return]  # callable() proves no signature


def _call(factory: Factory, model: settings.Model, device: torch.device, dtype: torch.dtype) -> Any:
    module = model.factory.partition(":")[0]
    try:
        return factory(model, device, dtype)
    except ModelError as error:  # a refusal, or the error of a part of the model
        raise ModelError(f"{error}{at_own_line(error, module)}") from error
    except RelayError:
        raise
    except Exception as error:  # a user's factory may raise any exception
        log.error("the model's factory failed", factory=model.factory, exc_info=error)
        raise FactoryError(
            f"`model.factory` = {model.factory!r} failed with {type(error).__name__}: {error}"
            f"{at_own_line(error, module)}; "
            f"it is called with (settings.Model, torch.device, torch.dtype)"
        ) from error


def _contract_problem(made: object) -> str:
    """The first rule of the model protocol that `made` breaks, in words; "" if it breaks none."""
    for name in ("prefill", "score"):
        if not callable(getattr(made, name, None)):
            return f"it has no method `{name}`"
    for name, kind in (("layout", KVLayout), ("version", str), ("note", str), ("tasks", tuple), ("incremental", bool)):
        if not hasattr(made, name):
            return f"it has no attribute `{name}` ({kind.__name__})"
        if not isinstance(getattr(made, name), kind):
            found = getattr(made, name)
            return f"its `{name}` must be a {kind.__name__}, found {found!r}"
    tasks = made.tasks  # type: ignore[attr-defined]  # checked above
    if not tasks or not all(isinstance(task, str) and task for task in tasks) or len(set(tasks)) != len(tasks):
        return f"its `tasks` must be one or more different names, found {tasks!r}"
    if not made.version:  # type: ignore[attr-defined]
        return "its `version` is empty; the worker keeps the prefix KV of different versions apart by it"
    return _optional_problem(made, made.version)  # type: ignore[attr-defined]


def _optional_problem(made: object, version: str) -> str:
    """The same for the attributes that a model need not have."""
    takes_suffix, features = getattr(made, "takes_suffix", False), getattr(made, "features", NO_FEATURES)
    if not isinstance(takes_suffix, bool):
        return f"its `takes_suffix` must be a bool, found {takes_suffix!r}"
    if not isinstance(features, FeatureSchema):
        return f"its `features` must be a FeatureSchema, found {features!r}"
    try:
        unknown_items(made)
    except ModelError as error:
        return str(error)
    if features.digest not in version:
        return f"its `version` {version!r} does not contain its features' digest {features.digest}; see version_of"
    return ""
