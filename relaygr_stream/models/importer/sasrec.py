"""Makes a folder for `model.checkpoint` of a state dict of RecBole's SASRec, or of gSASRec-pytorch.

Which of the two it is, and most of the shape, the names and shapes of the weights say; `SasRecChoices` has the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch

from relaygr_stream.errors import ModelError
from relaygr_stream.models.importer.names import (
    by_own_names,
    check_new,
    layers_in,
    prefix_of,
    size_of,
    without_wrappers,
    write,
)
from relaygr_stream.models.importer.sources import read_tensors
from relaygr_stream.models.loading import shown, wanted_weights
from relaygr_stream.models.sasrec.config import Form, SasRecConfig
from relaygr_stream.models.sasrec.model import SasRec

#: Weights that every such model has, in both forms.
POSITIONS: Final = "position_embedding.weight"
ITEMS: Final = "item_embedding.weight"
OUTPUTS: Final = "output_embedding.weight"
#: What begins the names of a form's layers, and its weights: a name here → in the reference. `layers.` stands for it.
LAYERS: Final[dict[Form, str]] = {"recbole": "trm_encoder.layer.", "gsasrec": "transformer_blocks."}
TABLES: Final = {"embedding.item": ITEMS, "embedding.position": POSITIONS, "embedding.output": OUTPUTS}
MODULES: Final[dict[Form, dict[str, str]]] = {
    "recbole": {
        "norm": "LayerNorm", "query": "multi_head_attention.query", "key": "multi_head_attention.key",
        "value": "multi_head_attention.value", "output": "multi_head_attention.dense",
        "norm1": "multi_head_attention.LayerNorm", "up": "feed_forward.dense_1", "down": "feed_forward.dense_2",
        "norm2": "feed_forward.LayerNorm",
    },
    "gsasrec": {
        "norm": "seq_norm", "query": "multihead_attention.query_proj", "key": "multihead_attention.key_proj",
        "value": "multihead_attention.val_proj", "norm1": "first_norm", "up": "dense1", "down": "dense2",
        "norm2": "second_norm",
    },
}  # fmt: skip
#: What both train with by default, where the weights do not say it: activation, and epsilon of LayerNorm.
DEFAULTS: Final[dict[Form, tuple[str, float]]] = {"recbole": ("gelu", 1e-12), "gsasrec": ("relu", 1e-5)}


@dataclass(frozen=True)
class SasRecChoices:
    """What the weights do not say. activation "", norm_eps 0: as the form trains by default."""

    heads: int
    activation: str = ""
    norm_eps: float = 0.0


@dataclass(frozen=True)
class ImportedSasRec:
    """The model, and the names of tensors in the checkpoint that it does not have."""

    model: SasRec
    left_out: tuple[str, ...]


def import_checkpoint(source: Path, out: Path, choices: SasRecChoices) -> ImportedSasRec:
    """Read the checkpoint `source` and write the folder `out`. Raises ModelError for one that does not fit."""
    check_new(out)
    made = model_of(source, read_tensors(source), choices)
    write(made.model, out)
    return made


def model_of(source: Path, tensors: Mapping[str, torch.Tensor], choices: SasRecChoices) -> ImportedSasRec:
    """The model of a state dict with the reference's names. Raises ModelError, naming the weight; source: for it."""
    plain = without_wrappers(source, tensors)
    prefix = prefix_of(source, plain, POSITIONS, "SASRec of RecBole and gSASRec-pytorch")
    found = {name.removeprefix(prefix): value for name, value in plain.items() if name.startswith(prefix)}
    forms = [form for form, begin in LAYERS.items() if any(name.startswith(begin) for name in found)]
    if len(forms) != 1:
        raise ModelError(
            f"{source}: layers `{LAYERS['recbole']}0.…` (RecBole) or `{LAYERS['gsasrec']}0.…` (gSASRec-pytorch) are "
            f"expected beside `{prefix}{POSITIONS}`, and {'both are' if forms else 'neither is'} there"
        )
    (form,) = forms
    if form == "gsasrec":  # its last row stands for no item, as does row 0
        found |= {name: found[name][:-1] for name in (ITEMS, OUTPUTS) if name in found and found[name].dim() == 2}
    config = _config(source, found, form, choices)
    wanted = wanted_weights(config)
    weights = by_own_names(source, found, {own: _reference_name(own, form) for own in wanted}, wanted)
    model = SasRec(config).load_weights(weights, "")
    return ImportedSasRec(model, tuple(name for name in plain if not name.startswith(prefix)))


def _reference_name(own: str, form: Form) -> str:
    """layers.0.norm1.bias → trm_encoder.layer.0.multi_head_attention.LayerNorm.bias"""
    if own in TABLES:
        return TABLES[own]
    *before, module, parameter = own.split(".")
    start = f"{LAYERS[form]}{before[1]}." if before else ""
    return f"{start}{MODULES[form][module]}.{parameter}"


def _config(source: Path, found: Mapping[str, torch.Tensor], form: Form, choices: SasRecChoices) -> SasRecConfig:
    activation, norm_eps = DEFAULTS[form]
    fields = {
        "form": form,
        "layers": layers_in(found, LAYERS[form]),
        "dim": size_of(source, found, ITEMS, 1),
        "heads": choices.heads,
        "hidden": size_of(source, found, _reference_name("layers.0.up.weight", form), 0),
        "items": size_of(source, found, ITEMS, 0, least=2),
        "window": size_of(source, found, POSITIONS, 0),
        "activation": choices.activation or activation,
        "norm_eps": choices.norm_eps or norm_eps,
        "own_output": form == "gsasrec" and OUTPUTS in found,
    }
    try:
        return msgspec.convert(fields, SasRecConfig)
    except (msgspec.ValidationError, ValueError) as error:
        raise ModelError(f"{source}: {error}") from error


def describe(made: ImportedSasRec) -> str:
    """What was imported, and how long prefix KV last, for a person."""
    config = made.model.config
    count = sum(value.numel() for value in made.model.state_dict().values())
    name = "RecBole's SASRec" if config.form == "recbole" else "gSASRec"
    table = ", candidates in a table of their own" if config.own_output else ""
    lines = [
        f"{name}, {count:,} numbers: {config.layers} layers, D {config.dim}, {config.heads} heads, "
        f"{config.activation}, LayerNorm's epsilon {config.norm_eps:g}; item ids 1 to {config.items - 1:,}{table}",
        f"the newest {config.window} behaviours are known",
    ]
    if made.left_out:
        lines.append(f"left out: {len(made.left_out)} other tensors, the first is {shown(made.left_out[0])}")
    if config.grows:
        lines.append(
            f"served incrementally up to {config.window} behaviours: prefix KV grow with new ones. Behind them all "
            f"positions move, and new behaviours have all {config.window} computed anew"
        )
    else:
        lines.append(
            f"positions count from the newest behaviour: new ones have the newest {config.window} computed anew"
        )
    return "\n".join(lines)
