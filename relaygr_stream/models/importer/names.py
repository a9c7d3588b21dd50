"""What every import shares: names without what wrappers put around them, and the folder that is written."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from relaygr_stream.errors import ModelError
from relaygr_stream.models.loading import BuiltIn, in_float32, save_checkpoint, shown

#: Parts of names that wrappers put in, anywhere: compile, data and model parallelism, checkpointing of activations.
WRAPPERS: Final = {
    "module", "_orig_mod", "_dmp_wrapped_module", "_dpp_wrapped_module", "_fsdp_wrapped_module", "_forward_module",
    "_checkpoint_wrapped_module",
}  # fmt: skip


#: Longest number of a layer: more layers than 9,999 have no configuration.
MOST_DIGITS: Final = 4


def without_wrappers(source: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by their names without parts of wrappers.

    Raises ModelError for two of one name, and for one that is sparse or without numbers.
    """
    plain: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if value.layout is not torch.strided or value.is_meta:
            kind = "on the device meta" if value.is_meta else value.layout
            raise ModelError(f"{source}: `{shown(name)}` is {kind}, expected a dense tensor with numbers")
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
        problem = (
            f"found under {', '.join(map(shown, anchors))}: keep one of them"
            if anchors
            else f"is missing: another model's checkpoint, or a part of one; it has {some_of(tensors)}"
        )
        raise ModelError(f"{source}: `{anchor}`, which every {model} has, {problem}")
    return anchors[0].removesuffix(anchor)


def some_of(names: Iterable[str]) -> str:
    """How many names there are, and the first, for an error."""
    first, *others = [*names, ""]
    return f"{len(others)} tensors, the first is `{shown(first)}`"


def size_of(
    source: Path, found: Mapping[str, torch.Tensor], name: str, dimension: int, dimensions: int = 2, least: int = 1
) -> int:
    """A weight's size in one of its dimensions. Raises ModelError where it has not as many, or too few."""
    if name not in found:
        raise ModelError(f"{source}: `{name}` is missing; save the whole state dict")
    shape = tuple(found[name].shape)
    if len(shape) != dimensions:
        raise ModelError(f"{source}: `{name}` has shape {shape}, expected {dimensions} dimensions")
    if shape[dimension] < least:
        raise ModelError(f"{source}: `{name}` has shape {shape}, expected at least {least} in dimension {dimension}")
    return shape[dimension]


def layers_in(found: Iterable[str], begin: str) -> int:
    """How many layers there are, by the largest number behind `begin`: one that is missing is missed by its name."""
    numbers = (name.removeprefix(begin).partition(".")[0] for name in found if name.startswith(begin))
    return 1 + max((int(each) for each in numbers if each.isdecimal() and len(each) <= MOST_DIGITS), default=0)


def by_own_names(
    source: Path, found: Mapping[str, torch.Tensor], names: Mapping[str, str], wanted: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The weights in float32 by their names here. names: here → in the checkpoint; wanted: their shapes, by those here.

    Raises ModelError for what is missing, does not fit, or is no weight of the model, by the checkpoint's name.
    """
    asked = {names[own]: value for own, value in wanted.items()}
    weights = in_float32(source, found, asked, "the shape of others")
    return {own: weights[names[own]] for own in wanted}


def check_new(out: Path) -> None:
    """Raise ModelError if `out` is there and not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out}: is there already and not an empty folder; name another one")


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Make the folder `out` for what is written within; what fails leaves none, or the next try would be refused.

    Raises ModelError for an OSError.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        shutil.rmtree(out, ignore_errors=True)
        if isinstance(error, OSError):
            raise ModelError(f"{out}: cannot be written: {error.strerror or error}") from error
        raise


def write(model: BuiltIn, out: Path) -> None:
    """Write the folder `out`. Raises ModelError."""
    with writing(out):
        save_checkpoint(model, out)
