"""What every import shares: names without what wrappers put around them, and the folder that is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from relaygr_stream.errors import ModelError
from relaygr_stream.models.loading import BuiltIn, save_checkpoint, shown

#: Parts of names that wrappers put in, anywhere: compile, data and model parallelism, checkpointing of activations.
WRAPPERS: Final = {
    "module", "_orig_mod", "_dmp_wrapped_module", "_dpp_wrapped_module", "_fsdp_wrapped_module", "_forward_module",
    "_checkpoint_wrapped_module",
}  # fmt: skip


def without_wrappers(source: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by their names without parts of wrappers. Raises ModelError for two of one name."""
    plain: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        kept = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        if kept in plain:
            raise ModelError(f"{source}: `{shown(kept)}` is there twice, once inside of a wrapper: keep one of them")
        plain[kept] = value
    return plain


def prefix_of(source: Path, tensors: Mapping[str, torch.Tensor], anchor: str, model: str) -> str:
    """What stands before all names of the model. anchor: a weight that every such model has.

    Raises ModelError for a checkpoint without it, or with several.
    """
    anchors = [name for name in tensors if f".{name}".endswith(f".{anchor}")]
    if len(anchors) != 1:
        problem = f"found under {', '.join(map(shown, anchors))}: keep one of them" if anchors else "is missing"
        raise ModelError(f"{source}: `{anchor}`, which every {model} has, {problem}")
    return anchors[0].removesuffix(anchor)


def check_new(out: Path) -> None:
    """Raise ModelError if `out` is there and not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out}: is there already and not an empty folder; name another one")


def write(model: BuiltIn, out: Path) -> None:
    """Write the folder `out`. Raises ModelError."""
    try:
        save_checkpoint(model, out)
    except OSError as error:
        raise ModelError(f"{out}: cannot be written: {error.strerror or error}") from error
