"""From settings to a model on a device: a user's own factory, a checkpoint, or seeded random weights."""

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
from relaygr_stream.errors import ConfigError, ModelError, RelayError
from relaygr_stream.models.checkpoint import load_checkpoint
from relaygr_stream.models.hstu_model import HSTUConfig, HSTUModel
from relaygr_stream.models.kernels.choice import Kernels
from relaygr_stream.models.kv import KVLayout
from relaygr_stream.models.protocol import RankingModel
from relaygr_stream.models.random_weights import random_model

log = structlog.get_logger(__name__)


def load_model(
    model: settings.Model,
    relay: settings.Relay,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Kernels = "auto",
) -> RankingModel:
    """The model that the settings ask for, on `device`, its prefix KV in `dtype`.

    `model.factory` wins over `model.checkpoint`, which wins over random weights; a checkpoint brings its own shape.
    kernels: what the built-in model attends with; a user's own has its own.
    Raises ConfigError for settings that clash or are malformed, ModelError for a factory or checkpoint that fails.
    """
    if model.factory:
        return _from_factory(model, device, dtype)
    built_in = load_checkpoint(model.checkpoint) if model.checkpoint else random_model(_config(model), model.seed)
    _refuse_suffix_with_contextual(built_in, model, relay)
    return built_in.place(device, dtype, kernels)


def parse_tasks(text: str) -> tuple[str, ...]:
    """Names of the score columns from `model.tasks`."""
    tasks = tuple(name.strip() for name in text.split(","))
    if not all(tasks):
        raise ConfigError(f"`model.tasks` = {text!r}: write one or more names, separated by commas")
    if len(set(tasks)) != len(tasks):
        raise ConfigError(f"`model.tasks` = {text!r}: a name stands there twice")
    return tasks


def _config(model: settings.Model) -> HSTUConfig:
    return HSTUConfig(
        layers=model.layers,
        dim=model.dim,
        heads=model.heads,
        dqk=model.dqk,
        dv=model.dv,
        vocab=model.vocab,
        max_positions=model.max_positions,
        scale_tokens=model.scale_tokens,
        tasks=parse_tasks(model.tasks),
        contextual_seq_len=model.contextual_seq_len,
        max_attn_len=model.max_attn_len,
        group_norm=model.group_norm,
    )


def _refuse_suffix_with_contextual(built_in: HSTUModel, model: settings.Model, relay: settings.Relay) -> None:
    """Tokens that see the whole history would change with every suffix: measured 19 % off (DESIGN §8)."""
    contextual = built_in.config.contextual_seq_len
    if contextual and relay.max_suffix_tokens:
        where = f"in {model.checkpoint}" if model.checkpoint else "`model.contextual_seq_len`"
        raise ConfigError(
            f"contextual_seq_len = {contextual} ({where}) clashes with `relay.max_suffix_tokens` = "
            f"{relay.max_suffix_tokens}: contextual tokens see the whole history, so it must all be in the prefix; "
            f"set relay.max_suffix_tokens = 0"
        )


def _from_factory(model: settings.Model, device: torch.device, dtype: torch.dtype) -> RankingModel:
    _add_folders(model.path)
    made = _call(_find_factory(model.factory), model, device, dtype)
    problem = _contract_problem(made)
    if problem:
        raise ModelError(f"`model.factory` = {model.factory!r} returned a {type(made).__name__}, but {problem}")
    assert isinstance(made, RankingModel)
    return made


def _add_folders(path: str) -> None:
    """Let modules be found in these folders, after all installed ones: a file there takes no library's name.

    The working directory is none of them unless it is named. Raises ConfigError for what is no folder.
    """
    for folder in filter(None, path.split(os.pathsep)):
        if not Path(folder).is_dir():
            raise ConfigError(f"`model.path` = {path!r}: {folder!r} is no folder (seen from {Path.cwd()})")
        if (found := str(Path(folder).resolve())) not in sys.path:
            sys.path.append(found)


def _find_factory(name: str) -> Callable[..., Any]:
    module_name, separator, attribute = name.partition(":")
    if not (separator and module_name and attribute):
        raise ModelError(f"`model.factory` = {name!r}: write module:factory")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises while it is imported
        if not (isinstance(error, ModuleNotFoundError) and error.name == module_name):
            log.error("the model's module failed", module=module_name, exc_info=error)
        raise ModelError(
            f"`model.factory` = {name!r}: importing {module_name} failed: {type(error).__name__}: {error}; "
            f"is it installed, or its folder in `model.path`?"
        ) from error
    try:
        factory = getattr(module, attribute)
    except AttributeError as error:
        raise ModelError(f"`model.factory` = {name!r}: {module_name} has no `{attribute}`") from error
    if not callable(factory):
        raise ModelError(f"`model.factory` = {name!r}: `{attribute}` is a {type(factory).__name__}, not callable")
    return factory  # type: ignore[no-any-return]  # callable() proves no signature


def _call(factory: Callable[..., Any], model: settings.Model, device: torch.device, dtype: torch.dtype) -> Any:
    try:
        return factory(model, device, dtype)
    except RelayError:
        raise
    except Exception as error:  # whatever a user's factory raises
        log.error("the model's factory failed", factory=model.factory, exc_info=error)
        raise ModelError(
            f"`model.factory` = {model.factory!r} failed with {type(error).__name__}: {error}; "
            f"it is called with (settings.Model, torch.device, torch.dtype)"
        ) from error


def _contract_problem(made: object) -> str:
    """What of the model protocol `made` does not keep, in words; "" if nothing."""
    for name in ("extend", "score"):
        if not callable(getattr(made, name, None)):
            return f"it has no method `{name}`"
    for name, kind in (("layout", KVLayout), ("version", str), ("note", str), ("tasks", tuple), ("incremental", bool)):
        if not hasattr(made, name):
            return f"it has no attribute `{name}` ({kind.__name__})"
        if not isinstance(getattr(made, name), kind):
            found = getattr(made, name)
            return f"its `{name}` must be a {kind.__name__}, found {found!r}"
    tasks = made.tasks  # type: ignore[attr-defined]  # checked just now
    if not tasks or not all(isinstance(task, str) and task for task in tasks) or len(set(tasks)) != len(tasks):
        return f"its `tasks` must be one or more different names, found {tasks!r}"
    if not made.version:  # type: ignore[attr-defined]
        return "its `version` is empty; prefix KV is kept apart by it"
    return ""
