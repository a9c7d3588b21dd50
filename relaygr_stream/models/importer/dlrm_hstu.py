"""Makes a folder for `model.checkpoint` of a state dict of meta-recsys/generative-recommenders' DlrmHSTU.

The shapes of the weights say most of the model's shape. What they do not say is `Choices`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from relaygr_stream.errors import ModelError
from relaygr_stream.models.dlrm.config import DlrmConfig, Positions, Times, changed
from relaygr_stream.models.dlrm.model import DlrmHSTU
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
from relaygr_stream.models.loading import check_tasks, shown, wanted_weights

#: A weight that every such model has: what stands before it in a checkpoint stands before all.
ANCHOR: Final = "_hstu_transducer._positional_encoder._position_embeddings_weight"
TABLES: Final = "_embedding_collection.embeddings."
PREPROCESSOR: Final = "_hstu_transducer._input_preprocessor."
LAYERS: Final = "_hstu_transducer._stu_module._stu_layers."
#: Names here → in the reference. A name that ends with a dot stands for all that begin with it.
NAMES: Final = {
    "embedding.user_weight": f"{PREPROCESSOR}_batched_contextual_linear_weights",
    "embedding.user_bias": f"{PREPROCESSOR}_batched_contextual_linear_bias",
    "embedding.content.": f"{PREPROCESSOR}_content_embedding_mlp.",
    "embedding.additional.": f"{PREPROCESSOR}_additional_embedding_mlp.",
    "embedding.action.": f"{PREPROCESSOR}_action_embedding_mlp.",
    "embedding.action_rows": f"{PREPROCESSOR}_action_encoder._action_embedding_table",
    "embedding.target_action": f"{PREPROCESSOR}_action_encoder._target_action_embedding_table",
    "embedding.position": ANCHOR,
    "embedding.time": "_hstu_transducer._positional_encoder._timestamp_embeddings_weight",
    "head.time.": "_hstu_transducer._output_postprocessor._time_feature_combiner.",
    "head.norm.": "_hstu_transducer._output_postprocessor._layer_norm.",
    "head.item.": "_item_embedding_mlp.",
    "head.task.": "_multitask_module._prediction_module.",
}
#: What begins the names of all of the model but its tables.
PARTS: Final = ("_hstu_transducer.", "_item_embedding_mlp.", "_multitask_module.")
#: Tensors that are no weights; the config has their values.
ACTION_WEIGHTS: Final = f"{PREPROCESSOR}_action_encoder._combined_action_weights"
UNITS: Final = "_hstu_transducer._output_postprocessor._period_units"
PERIODS: Final = "_hstu_transducer._output_postprocessor._units_per_period"
#: Weights with a first dimension of 1 in the reference.
LEADING_ONE: Final = ("embedding.user_weight", "embedding.user_bias", "embedding.target_action")
#: The largest action on the wire, a byte.
LARGEST_ACTION: Final = 255


@dataclass(frozen=True)
class Choices:
    """What the weights' shapes do not say. Fields are as in `DlrmConfig`; time_last_row -1: the table's last row.

    item_table, category_table, user_table: names of the tables in the checkpoint.
    """

    heads: int = 4
    scale_tokens: int = 0
    times: Times = "query"
    positions: Positions = "end"
    time_last_row: int = -1
    min_tokens: int = 20
    max_attn_len: int = 0
    contextual_seq_len: int = 0
    tasks: tuple[str, ...] = ("rating",)
    item_table: str = "item_id"
    category_table: str = "item_category_id"
    user_table: str = "user_id"


@dataclass(frozen=True)
class Imported:
    """The model, and the names of tensors in the checkpoint that it does not have."""

    model: DlrmHSTU
    left_out: tuple[str, ...]


def import_checkpoint(source: Path, out: Path, choices: Choices) -> Imported:
    """Read the checkpoint `source` and write the folder `out`. Raises ModelError for one that does not fit."""
    check_new(out)
    check_tasks(choices.tasks)
    made = model_of(source, read_tensors(source), choices)
    if max(actions := made.model.config.action_weights) > LARGEST_ACTION:
        raise ModelError(f"{source}: action weights {list(actions)}: an action on the wire is 0…{LARGEST_ACTION}")
    write(made.model, out)
    return made


def model_of(source: Path, tensors: Mapping[str, torch.Tensor], choices: Choices) -> Imported:
    """The model of a state dict with the reference's names. Raises ModelError, naming the weight; source: for it."""
    found = _without_prefix(source, tensors)
    tables = {"item": choices.item_table, "category": choices.category_table, "user": choices.user_table}
    names = NAMES | {f"embedding.{own}": f"{TABLES}{table}.weight" for own, table in tables.items()}
    _check_tables(source, found, tables.values())
    config = _config(source, found, names, choices)
    wanted = wanted_weights(config)
    wanted |= {own: wanted[own][None] for own in LEADING_ONE}
    theirs = {own: _reference_name(own, names) for own in wanted}
    served, left_out = _parts(source, found, set(theirs.values()))
    weights = by_own_names(source, served, theirs, wanted)
    weights |= {own: weights[own][0] for own in LEADING_ONE}
    return Imported(DlrmHSTU(_simplified(config, weights)).load_weights(weights, ""), left_out)


def _without_prefix(source: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by the reference's own names, without wrappers and what stands before all names of the model."""
    plain = without_wrappers(source, tensors)
    prefix = prefix_of(source, plain, ANCHOR, "DlrmHSTU")
    found = {name.removeprefix(prefix): value for name, value in plain.items()}
    for name in [name for name in found if TABLES in name]:  # tables may be saved apart, under another prefix
        found[name[name.index(TABLES) :]] = found.pop(name)
    return found


def _check_tables(source: Path, found: Mapping[str, torch.Tensor], tables: Iterable[str]) -> None:
    for table in tables:
        if f"{TABLES}{table}.weight" not in found:
            there = ", ".join(name[len(TABLES) :].removesuffix(".weight") for name in found if name.startswith(TABLES))
            raise ModelError(
                f"{source}: no table `{table}`; it has {shown(there) or 'none'}: see --item-table, --category-table "
                f"and --user-table"
            )


def _reference_name(own: str, names: Mapping[str, str]) -> str:
    """stack.layers.0.uvqk_bias → _hstu_transducer._stu_module._stu_layers.0._uvqk_beta"""
    if own.startswith("stack.layers."):
        number, _, parameter = own.removeprefix("stack.layers.").partition(".")
        return f"{LAYERS}{number}._{parameter.replace('uvqk_bias', 'uvqk_beta')}"
    if own in names:
        return names[own]
    start = next(one for one in names if one[-1] == "." and own.startswith(one))
    return names[start] + own.removeprefix(start)


def _parts(
    source: Path, found: Mapping[str, torch.Tensor], names: set[str]
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """The weights of these names, and the names of tensors outside the model. Raises ModelError for others within."""
    served = {name: value for name, value in found.items() if name in names}
    others = [name for name in found if name not in names and name not in (ACTION_WEIGHTS, UNITS, PERIODS)]
    unserved = [name for name in others if name.startswith(PARTS)]
    if unserved:
        raise ModelError(
            f"{source}: `{shown(unserved[0])}` is a part that is not served ({len(unserved)} such); the preprocessor "
            f"with contextual tokens and action weights and the postprocessor with times of day and week are, as in "
            f"DLRMv3"
        )
    return served, tuple(others)


def _integers(source: Path, found: Mapping[str, torch.Tensor], name: str) -> list[int]:
    """A tensor that is no weight, as a list. Raises ModelError unless it has whole numbers."""
    value = found[name]
    real = not (value.is_complex() or value.is_quantized)
    numbers: list[float] = value.double().flatten().tolist() if real else []
    if not numbers or not all(one.is_integer() for one in numbers):
        raise ModelError(f"{source}: `{name}` has type {value.dtype} and {value.numel()} numbers, expected whole ones")
    return [int(one) for one in numbers]


def _config(source: Path, found: Mapping[str, torch.Tensor], names: Mapping[str, str], choices: Choices) -> DlrmConfig:
    def size(own: str, dimension: int, dimensions: int = 2, least: int = 1) -> int:
        return size_of(source, found, _reference_name(own, names), dimension, dimensions, least)

    if (tokens := size("embedding.user_weight", 0, 3)) != 1:
        raise ModelError(
            f"{source}: `{names['embedding.user_weight']}` is of {tokens} contextual tokens; a model with one, the "
            f"user's, is served"
        )
    heads = choices.heads
    uvqk, gates = size("stack.layers.0.uvqk_weight", 1), size("stack.layers.0.output_weight", 0)
    if heads < 1 or gates % (3 * heads) or uvqk % (2 * heads) or uvqk // (2 * heads) <= gates // (3 * heads):
        raise ModelError(
            f"{source}: --heads {heads} does not divide the layers' widths (u, v, q, k: {uvqk}; output: {gates})"
        )
    dv = gates // (3 * heads)
    bits = size("embedding.action_rows", 0)
    actions = _integers(source, found, ACTION_WEIGHTS) if ACTION_WEIGHTS in found else [2**bit for bit in range(bits)]
    if len(actions) != bits:
        raise ModelError(f"{source}: {len(actions)} action weights, {actions}, for {bits} rows of actions")
    if (count := size("head.task.2.weight", 0)) != len(choices.tasks):
        raise ModelError(f"{source}: the head has {count} tasks: name as many with --tasks, not {len(choices.tasks)}")
    time_rows = size("embedding.time", 0)
    fields: dict[str, Any] = {
        "layers": layers_in(found, LAYERS),
        "dim": size("embedding.position", 1),
        "heads": heads,
        "dqk": uvqk // (2 * heads) - dv,
        "dv": dv,
        "scale_tokens": choices.scale_tokens,
        "contextual_seq_len": choices.contextual_seq_len,
        "max_attn_len": choices.max_attn_len,
        "group_norm": size("stack.layers.0.output_norm_weight", 0, 1) == heads != heads * dv,
        "table_dim": size("embedding.item", 1),
        "items": size("embedding.item", 0),
        "categories": size("embedding.category", 0),
        "users": size("embedding.user", 0),
        "action_weights": actions,
        "action_dim": size("embedding.action_rows", 1),
        "hidden": size("embedding.content.0.weight", 0),
        "item_hidden": size("head.item.0.weight", 0),
        "head_hidden": size("head.task.0.weight", 0),
        "position_rows": size("embedding.position", 0, least=3),
        "time_rows": time_rows,
        "time_last_row": time_rows - 1 if choices.time_last_row < 0 else choices.time_last_row,
        "times": choices.times,
        "positions": choices.positions,
        "min_tokens": choices.min_tokens,
        "tasks": choices.tasks,
    }
    if UNITS in found and PERIODS in found:
        units, per = (_integers(source, found, name) for name in (UNITS, PERIODS))
        if len(units) != len(per):
            raise ModelError(f"{source}: `{UNITS}` has {len(units)} numbers, `{PERIODS}` {len(per)}")
        fields["periods"] = tuple(zip(units, per, strict=True))
    try:
        return msgspec.convert(fields, DlrmConfig)
    except (msgspec.ValidationError, ValueError) as error:
        raise ModelError(f"{source}: {error}") from error


def _simplified(config: DlrmConfig, weights: Mapping[str, torch.Tensor]) -> DlrmConfig:
    """The config without a dependence that the weights do not have: tables whose rows in use are all alike."""
    if config.positions != "none" and _alike(weights["embedding.position"][2:]):
        config = changed(config, positions="none")
    if config.times != "constant" and _alike(weights["embedding.time"][: config.time_last_row + 1]):
        config = changed(config, times="constant")
    return config


def _alike(rows: torch.Tensor) -> bool:
    return bool((rows == rows[:1]).all())


def describe(made: Imported) -> str:
    """What was imported, what ties its prefix KV to one request, and how it is served, for a person."""
    model, config = made.model, made.model.config
    count = sum(value.numel() for value in model.state_dict().values())
    lines = [
        f"{count:,} numbers: {config.layers} layers, D {config.dim}, {config.heads} heads, dqk {config.dqk}, "
        f"dv {config.dv}; {config.items:,} items, {config.categories:,} categories, {config.users:,} users",
        f"requests state: {', '.join(f'{one.name} ({one.of})' for one in config.features)}",
    ]
    if made.left_out:
        lines.append(f"left out: {len(made.left_out)} other tensors, the first is {shown(made.left_out[0])}")
    if config.incremental:
        lines.append(
            "served incrementally: prefix KV stay valid for the user's later requests, and grow with new behaviours"
        )
        return "\n".join(lines)
    lines.append(
        "served exactly within a request: prefix KV are valid for the request that was announced, and no other one:"
    )
    return "\n".join([*lines, *(f"  - {reason}" for reason in config.breaks())])
