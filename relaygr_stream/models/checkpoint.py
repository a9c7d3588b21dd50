"""Checkpoints of the built-in model: a folder with config.json and model.safetensors, checked key by key.

Whatever is wrong is a ModelError that names the file, the key and the shape expected and found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from relaygr_stream.errors import ModelError
from relaygr_stream.models.hstu_model import HSTUConfig, HSTUModel

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
