"""From settings to a model on a device: a user's own factory, a checkpoint, or seeded random weights."""

from __future__ import annotations

import importlib
import math
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import structlog
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from relaygr_stream import settings
from relaygr_stream.errors import ConfigError, ModelError, RelayError
from relaygr_stream.models.api import KVLayout, RankingModel
from relaygr_stream.models.hstu_model import HSTUConfig, HSTUModel
from relaygr_stream.models.kernels.choice import Kernels

# Seeded random weights for the built-in models: the same numbers for the same seed in every process. They stand in
# for a checkpoint in demos, tests and measurements. Rankings made with them are as good as chance.


def random_model(config: HSTUConfig, seed: int) -> HSTUModel:
    """A float32 model on the CPU, noted as "random weights, seed N"."""
    model = HSTUModel(config)
    return model.load_weights(draw_weights(model.state_dict(), seed), note=f"random weights, seed {seed}")


def draw_weights(wanted: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """float32 weights of the names and shapes of `wanted` (whose values do not matter), matrices as (inputs, outputs).

    Names say what a tensor is: "…norm_weight" becomes ones, "…bias" zeros, "embedding.…" a table.
    """
    return {name: _draw(name, tuple(value.shape), seed) for name, value in wanted.items()}


def _draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    if name.endswith("norm_weight"):
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    # NumPy's generator, one stream per tensor: torch's depends on the processor's vector width, and a shared stream
    # on the order of the tensors.
    stream = np.random.default_rng([seed % 2**64, zlib.crc32(name.encode())])
    # Rows of tables: four of them make up a token, which so has unit variance. Matrices keep their inputs' variance.
    deviation = 0.5 if name.startswith("embedding.") else 1 / math.sqrt(shape[0])
    values = stream.standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(np.multiply(values, np.float32(deviation), out=values))


# Checkpoints of the built-in model: a folder with config.json and model.safetensors, checked key by key. Whatever is
# wrong is a ModelError that names the file, the key and the shape expected and found.


CONFIG_FILE: Final = "config.json"
WEIGHTS_FILE: Final = "model.safetensors"
ARCHITECTURE: Final = "hstu"
FORMAT: Final = 1


def save_checkpoint(model: HSTUModel, folder: str | Path) -> None:
    """Write `folder` (made if absent). Save before placing in half precision: weights are written as they are held."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    weights = {name: value.cpu().contiguous() for name, value in model.state_dict().items()}
    header = {"architecture": ARCHITECTURE, "format": FORMAT}
    text = msgspec.json.format(msgspec.json.encode(header | msgspec.to_builtins(model.config)), indent=2)
    save_file(weights, path / (WEIGHTS_FILE + ".tmp"))
    (path / (CONFIG_FILE + ".tmp")).write_bytes(text + b"\n")
    for name in (WEIGHTS_FILE, CONFIG_FILE):  # complete files only, whenever the writing stops
        (path / (name + ".tmp")).replace(path / name)


def load_checkpoint(folder: str | Path) -> HSTUModel:
    """The model in `folder`, float32 on the CPU; its version is a digest of configuration and weights."""
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(f"{path}: no such folder; a checkpoint is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    model = HSTUModel(_read_config(path / CONFIG_FILE))
    weights = _read_weights(path / WEIGHTS_FILE)
    _check(path / WEIGHTS_FILE, weights, model.state_dict())
    return model.load_weights({name: value.float() for name, value in weights.items()}, note="")


def _read_config(file: Path) -> HSTUConfig:
    try:
        fields: dict[str, Any] = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: not a JSON object: {error}") from error
    for key, expected in (("architecture", ARCHITECTURE), ("format", FORMAT)):
        found = fields.pop(key, None)
        if found != expected:
            raise ModelError(f"{file}: `{key}` must be {expected!r}, found {found!r}")
    try:
        config = msgspec.convert(fields, HSTUConfig)
    except msgspec.ValidationError as error:
        raise ModelError(f"{file}: {error}") from error
    if len(set(config.tasks)) != len(config.tasks):
        raise ModelError(f"{file}: `tasks` names a score column twice: {', '.join(config.tasks)}")
    return config


def _read_weights(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except FileNotFoundError as error:
        raise ModelError(f"{file}: no such file") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"{file}: not a readable safetensors file: {error}") from error


def _check(file: Path, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        if name not in found:
            raise ModelError(f"{file}: `{name}` is missing; expected it with shape {tuple(tensor.shape)}")
        value = found[name]
        if value.shape != tensor.shape:
            raise ModelError(
                f"{file}: `{name}` has shape {tuple(value.shape)}, but {CONFIG_FILE} asks for {tuple(tensor.shape)}"
            )
        if not value.is_floating_point():
            raise ModelError(f"{file}: `{name}` has type {value.dtype}, expected a floating type")
        if not bool(torch.isfinite(value).all()):
            raise ModelError(f"{file}: `{name}` contains values that are not finite")
    unknown = sorted(found.keys() - expected.keys())
    if unknown:
        raise ModelError(f"{file}: `{unknown[0]}` is no weight of this model ({len(unknown)} such keys)")


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
