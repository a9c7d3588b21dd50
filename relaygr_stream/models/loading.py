"""Loads the model that the settings name: from a user's factory, a checkpoint, or seeded random weights."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import structlog
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from relaygr_stream import settings
from relaygr_stream.errors import ConfigError, ModelError
from relaygr_stream.models.api import RankingModel
from relaygr_stream.models.dlrm.config import DlrmConfig
from relaygr_stream.models.dlrm.model import DlrmHSTU
from relaygr_stream.models.factory import model_from_factory
from relaygr_stream.models.hstu_model import HSTUConfig, HSTUModel
from relaygr_stream.models.item_ids import ItemIds
from relaygr_stream.models.mapped import MappedTable
from relaygr_stream.models.sasrec.config import SasRecConfig
from relaygr_stream.models.sasrec.model import SasRec
from relaygr_stream.settings.files import packaged_dir
from relaygr_stream.settings.inputs import LFS_POINTER, is_pointer, open_regular, pointer_error, read_text
from relaygr_stream.wire.versions import NOT_DECODED

log = structlog.get_logger(__name__)

#: Models that a checkpoint names by its architecture.
BuiltIn = HSTUModel | DlrmHSTU | SasRec
#: Their configurations.
Config = HSTUConfig | DlrmConfig | SasRecConfig

# Seeded random weights, for demos, tests and measurements: they rank as chance does.


def random_model(config: HSTUConfig, seed: int) -> HSTUModel:
    """A float32 model on the CPU with the same weights for the same seed; its note is "random weights, seed N"."""
    model = HSTUModel(config)
    return model.load_weights(draw_weights(model.state_dict(), seed), note=f"random weights, seed {seed}")


def draw_weights(wanted: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Random float32 weights with the names and shapes of `wanted`; matrices are (inputs, outputs).

    A name decides the values: "…norm_weight" ones, "…bias" zeros, "embedding.…" an embedding table.
    """
    return {name: _draw(name, tuple(value.shape), seed) for name, value in wanted.items()}


def _draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    if name.endswith("norm_weight"):
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    # torch's generator depends on the processor's vector width, a stream shared by all tensors on their order.
    stream = np.random.default_rng([seed % 2**64, zlib.crc32(name.encode())])
    # A token is the sum of four table rows, which gives it unit variance. A matrix keeps its inputs' variance.
    deviation = 0.5 if name.startswith("embedding.") else 1 / math.sqrt(shape[0])
    values = stream.standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(np.multiply(values, np.float32(deviation), out=values))


# Checkpoints of the built-in models: a folder with config.json and model.safetensors, checked key by key.

CONFIG_FILE: Final = "config.json"
WEIGHTS_FILE: Final = "model.safetensors"
#: Architecture → what makes its configuration of the fields in config.json.
CONFIGS: Final[dict[str, Callable[[dict[str, Any]], Config]]] = {
    HSTUConfig.architecture: partial(msgspec.convert, type=HSTUConfig),
    DlrmConfig.architecture: DlrmConfig.of_fields,
    SasRecConfig.architecture: partial(msgspec.convert, type=SasRecConfig),
}
FORMAT: Final = 1
ELSEWHERE: Final = "`relaygr model import` makes one of a DlrmHSTU or SASRec that was trained elsewhere"
#: Characters of a file's value that an error quotes.
MOST_SHOWN: Final = 80


def save_checkpoint(model: BuiltIn, folder: str | Path) -> None:
    """Write the model to `folder`, which is created if absent.

    Weights are written in their present type, so save the model before `place` converts it to half precision. Raises
    ModelError for one whose item table stays in its files, OSError.
    """
    if model.embedding.table is not None:
        raise ModelError("a model with a mapped item table is not written: copy its folder")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    weights = {name: value.cpu().contiguous() for name, value in model.state_dict().items()}
    header = {"architecture": model.config.architecture, "format": FORMAT}
    text = msgspec.json.format(msgspec.json.encode(header | model.config.fields()), indent=2)
    save_weights(weights, path / (WEIGHTS_FILE + ".tmp"))
    (path / (CONFIG_FILE + ".tmp")).write_bytes(text + b"\n")
    for name in (WEIGHTS_FILE, CONFIG_FILE):  # an interrupted save leaves no incomplete file under these names
        (path / (name + ".tmp")).replace(path / name)


def save_weights(weights: dict[str, torch.Tensor], file: Path) -> None:
    """Write a file of safetensors, whose own error of a full disk is an OSError here, as other files' are."""
    try:
        save_file(weights, file)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def load_checkpoint(folder: str | Path) -> HSTUModel:
    """The built-in HSTU in `folder`, as `load_any_checkpoint`. Raises ModelError for another architecture too."""
    found = load_any_checkpoint(folder)
    if not isinstance(found, HSTUModel):
        raise ModelError(f"{folder}: a {found.config.architecture}; expected a {HSTUConfig.architecture}")
    return found


def load_any_checkpoint(folder: str | Path, hot_bytes: int = 0) -> BuiltIn:
    """The model in `folder`, float32 on the CPU; its version is a digest of configuration and weights.

    hot_bytes: on a device, for rows of an item table that stays in its files (mapped.py). Raises ModelError that names
    the file, the key, and what was expected and found.
    """
    path = Path(folder)
    config = read_config(path)
    try:
        table = MappedTable.found(path, *config.item_table, hot_bytes)
        weights = in_float32(path / WEIGHTS_FILE, read_weights(path / WEIGHTS_FILE), wanted_weights(config, table))
        model = _model_of(config, table)
        if isinstance(model, HSTUModel) and model.config.listed_items:
            model.item_ids = ItemIds.read(path, model.config.vocab)
        return model.load_weights(weights, note="")
    except (
        RuntimeError,
        TypeError,
        OverflowError,
        MemoryError,
    ) as error:  # torch's, for too large a table
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{path / CONFIG_FILE}: a model of this shape cannot be allocated: {reason}") from error


def wanted_weights(config: Config, table: MappedTable | None = None) -> dict[str, torch.Tensor]:
    """Names and shapes of the weights, without memory: a checkpoint is asked before any is taken."""
    with torch.device("meta"):
        return _model_of(config, table).state_dict()


def _model_of(config: Config, table: MappedTable | None = None) -> BuiltIn:
    match config:
        case HSTUConfig():
            return HSTUModel(config, table)
        case DlrmConfig():
            return DlrmHSTU(config, table)
        case SasRecConfig():
            return SasRec(config, table)


def checkpoint_folder(name: str) -> Path:
    """The folder that `model.checkpoint` names: a packaged one by its bare name ("demo"), any other by its path."""
    packaged = packaged_dir("checkpoints") / name
    return packaged if os.sep not in name and (packaged / CONFIG_FILE).is_file() else Path(name)


def read_config(folder: Path) -> Config:
    """The shape of the model in `folder`. Raises ModelError as `load_checkpoint`."""
    if not folder.is_dir():
        raise ModelError(
            f"{folder}: no such folder; a checkpoint is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}. {ELSEWHERE}"
        )
    file = folder / CONFIG_FILE
    try:
        fields: dict[str, Any] = msgspec.json.decode(read_text(file), type=dict[str, Any])
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror or error}") from error
    except NOT_DECODED as error:
        raise ModelError(f"{file}: not a JSON object: {error}") from error
    architecture = fields.pop("architecture", None)
    if not isinstance(architecture, str) or architecture not in CONFIGS:
        known = " or ".join(map(repr, CONFIGS))
        raise ModelError(f"{file}: `architecture` must be {known}, found {shown(repr(architecture))}. {ELSEWHERE}")
    found = fields.pop("format", None)
    if found != FORMAT or isinstance(found, bool):  # True == 1
        raise ModelError(f"{file}: `format` must be {FORMAT!r}, found {shown(repr(found))}")
    try:
        config = CONFIGS[architecture](fields)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ModelError(f"{file}: {error}") from error
    if len(set(config.tasks)) != len(config.tasks):
        raise ModelError(f"{file}: `tasks` names a score column twice: {', '.join(config.tasks)}")
    return config


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """The weights of a safetensors file by their own names, in memory as they are asked for. Raises ModelError."""
    try:
        with open_regular(file) as raw:
            if is_pointer(raw.read(len(LFS_POINTER))):
                raise pointer_error(file)
        return _without_prefixes(load_file(file))
    except FileNotFoundError as error:
        raise ModelError(f"{file}: no such file") from error
    except (OSError, SafetensorError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ModelError(f"{file}: not a readable safetensors file: {why}") from error


#: What torch's wrappers, DistributedDataParallel and compile, put before the names of all weights.
WRAPPERS: Final = ("module.", "_orig_mod.")


def _without_prefixes(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights by their own names: a wrapper's prefix goes if all names have it, and so for wrapped wrappers."""
    while prefix := next((one for one in WRAPPERS if weights and all(name.startswith(one) for name in weights)), ""):
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights


def shown(text: str) -> str:
    """A file's text as an error quotes it: its beginning."""
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 1] + "…"


def in_float32(
    file: Path, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], asked_by: str = CONFIG_FILE
) -> dict[str, torch.Tensor]:
    """The weights `found` in float32. asked_by: what says the shapes.

    Raises ModelError for a weight that does not fit, or is not finite there.
    """
    weights = {}
    for name, tensor in expected.items():
        if name not in found:
            wrapped = next((one for one in found if one.endswith(f".{name}")), "")
            hint = f"; `{shown(wrapped)}` is there: leave `{shown(wrapped.removesuffix(name))}` out" if wrapped else ""
            raise ModelError(f"{file}: `{name}` is missing; expected it with shape {tuple(tensor.shape)}{hint}")
        value = found[name]
        if value.shape != tensor.shape:
            raise ModelError(
                f"{file}: `{name}` has shape {tuple(value.shape)}, but {asked_by} asks for {tuple(tensor.shape)}"
            )
        if not value.is_floating_point():
            raise ModelError(f"{file}: `{name}` has type {value.dtype}, expected a floating type")
        weights[name] = value.float()
        if not bool(torch.isfinite(weights[name]).all()):
            raise ModelError(f"{file}: `{name}` contains values that are not finite in float32")
    unknown = sorted(found.keys() - expected.keys())
    if unknown:
        raise ModelError(f"{file}: `{shown(unknown[0])}` is no weight of this model ({len(unknown)} such keys)")
    return weights


# The model that the settings name.


def load_model(
    model: settings.Model,
    relay: settings.Relay,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kernels: settings.Kernels = "auto",
    hot_bytes: int = 0,
) -> RankingModel:
    """The model that the settings name, on `device`, with prefix KV in `dtype`.

    `model.factory` takes precedence over `model.checkpoint`, which takes precedence over random weights. A checkpoint
    defines its own shape. kernels: the layers of the built-in model; hot_bytes: as of load_any_checkpoint. A user's
    model ignores both.
    Raises ConfigError for settings that clash or are malformed, ModelError for a factory or checkpoint that fails or
    has weights that `dtype` cannot hold.
    """
    if model.factory:
        return model_from_factory(model, device, dtype)
    built_in = (
        load_any_checkpoint(checkpoint_folder(model.checkpoint), hot_bytes) if model.checkpoint else _random(model)
    )
    _refuse_suffix_with_contextual(built_in, model, relay)
    built_in.place(device, dtype, kernels)
    if dtype != torch.float32:
        _refuse_overflow(built_in, model, dtype)
    return built_in


def check_tasks(tasks: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the score columns. Raises ConfigError for none, an empty or a repeated one."""
    if not tasks or not all(tasks):
        raise ConfigError(f"`tasks` = {list(tasks)}: write one or more names")
    if len(set(tasks)) != len(tasks):
        raise ConfigError(f"`tasks` = {list(tasks)}: a name stands there twice; name each score column once")
    return tasks


def config_of(model: settings.Model) -> Config:
    """The shape of the model that the settings name: of their checkpoint, else of random weights.

    A factory's own shape is not known: it may take this one. Raises ModelError for a checkpoint without a readable
    config.json, ConfigError for a shape that cannot be.
    """
    if model.checkpoint:
        return read_config(checkpoint_folder(model.checkpoint))
    try:
        return _random_config(model)
    except ValueError as error:
        raise ConfigError(f"a model with random weights: {error}") from error


def save_random(model: settings.Model, folder: Path) -> settings.Model:
    """Write a model with random weights of this shape to `folder`; returns the settings of processes that serve it.

    Raises ConfigError for a shape that cannot be, or too large a model.
    """
    save_checkpoint(_random(model), folder)
    return settings.Model(factory=model.factory, path=model.path, checkpoint=str(folder))


def _random(model: settings.Model) -> HSTUModel:
    config = config_of(msgspec.structs.replace(model, checkpoint=""))
    assert isinstance(config, HSTUConfig)
    try:
        return random_model(config, model.seed)
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:  # torch's words for too much memory
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ModelError(f"a model of this size cannot be made: {why}") from error


def _random_config(model: settings.Model) -> HSTUConfig:
    return HSTUConfig(
        layers=model.layers,
        dim=model.dim,
        heads=model.heads,
        dqk=model.dqk,
        dv=model.dv,
        vocab=model.vocab,
        oov_rows=model.oov_rows,
        max_positions=model.max_positions,
        scale_tokens=model.scale_tokens,
        tasks=check_tasks(model.tasks),
        contextual_seq_len=model.contextual_seq_len,
        max_attn_len=model.max_attn_len,
        relative_positions=model.relative_positions,
        relative_times=model.relative_times,
        group_norm=model.group_norm,
    )


def _refuse_suffix_with_contextual(built_in: BuiltIn, model: settings.Model, relay: settings.Relay) -> None:
    """Raise ConfigError if contextual tokens meet suffixes: the contextual tokens would change with every suffix."""
    contextual = built_in.config.contextual_seq_len
    if contextual and relay.max_suffix_tokens:
        where = f"in {model.checkpoint}" if model.checkpoint else "of random weights"
        raise ConfigError(
            f"contextual_seq_len = {contextual} ({where}) clashes with `relay.max_suffix_tokens` = "
            f"{relay.max_suffix_tokens}: contextual tokens see the whole history, so it must all be in the prefix; "
            f"set relay.max_suffix_tokens = 0"
        )


def _refuse_overflow(built_in: BuiltIn, model: settings.Model, dtype: torch.dtype) -> None:
    """Raise ModelError if a weight became infinite in `dtype`: float16 ends at 65,504."""
    for name, value in built_in.state_dict().items():
        # The smallest and the largest: a mask as large as the table would take the device's memory.
        if not bool(torch.stack(torch.aminmax(value)).isfinite().all()):
            raise ModelError(
                f"`model.checkpoint` = {model.checkpoint!r}: `{name}` has values beyond {torch.finfo(dtype).max:.4g}, "
                f"the largest in {dtype}: use another `worker.dtype`"
            )
