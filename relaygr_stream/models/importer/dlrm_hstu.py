"""Makes a folder for `model.checkpoint` of a state dict of meta-recsys/generative-recommenders' DlrmHSTU.

The shapes of the weights say most of the model's shape. What they do not say is `Choices`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from relaygr_stream.errors import ModelError
from relaygr_stream.models.dlrm.config import DlrmConfig, Positions, Times, changed
from relaygr_stream.models.dlrm.model import DlrmHSTU
from relaygr_stream.models.importer.names import check_new, prefix_of, without_wrappers, write
from relaygr_stream.models.importer.sources import read_tensors
from relaygr_stream.models.loading import in_float32, shown, wanted_weights

#: A weight that every such model has: what stands before it in a checkpoint stands before all.
ANCHOR: Final = "_hstu_transducer._positional_encoder._position_embeddings_weight"
TABLES: Final = "_embedding_collection.embeddings."
PREPROCESSOR: Final = "_hstu_transducer._input_preprocessor."
LAYERS: Final = "_hstu_transducer._stu_module._stu_layers."
#: Names in the reference → names here. A name that ends with a dot stands for all that begin with it.
NAMES: Final = {
    f"{PREPROCESSOR}_batched_contextual_linear_weights": "embedding.user_weight",
    f"{PREPROCESSOR}_batched_contextual_linear_bias": "embedding.user_bias",
    f"{PREPROCESSOR}_content_embedding_mlp.": "embedding.content.",
    f"{PREPROCESSOR}_additional_embedding_mlp.": "embedding.additional.",
    f"{PREPROCESSOR}_action_embedding_mlp.": "embedding.action.",
    f"{PREPROCESSOR}_action_encoder._action_embedding_table": "embedding.action_rows",
    f"{PREPROCESSOR}_action_encoder._target_action_embedding_table": "embedding.target_action",
    ANCHOR: "embedding.position",
    "_hstu_transducer._positional_encoder._timestamp_embeddings_weight": "embedding.time",
    "_hstu_transducer._output_postprocessor._time_feature_combiner.": "head.time.",
    "_hstu_transducer._output_postprocessor._layer_norm.": "head.norm.",
    "_item_embedding_mlp.": "head.item.",
    "_multitask_module._prediction_module.": "head.task.",
}
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
    if len(set(choices.tasks)) != len(choices.tasks):
        raise ModelError(f"--tasks {','.join(choices.tasks)}: a name stands there twice")
    made = model_of(source, read_tensors(source), choices)
    if max(actions := made.model.config.action_weights) > LARGEST_ACTION:
        raise ModelError(f"{source}: action weights {list(actions)}: an action on the wire is 0…{LARGEST_ACTION}")
    write(made.model, out)
    return made


def model_of(source: Path, tensors: Mapping[str, torch.Tensor], choices: Choices) -> Imported:
    """The model of a state dict with the reference's names. Raises ModelError, naming the weight; source: for it."""
    found = _without_prefix(source, tensors)
    weights, left_out = _renamed(source, found, choices)
    config = _simplified(_config(source, found, weights, choices), weights)
    fitting = in_float32(source, weights, wanted_weights(config), "the shape of others")
    return Imported(DlrmHSTU(config).load_weights(fitting, ""), left_out)


def _without_prefix(source: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by the reference's own names, without wrappers and what stands before all names of the model."""
    plain = without_wrappers(source, tensors)
    prefix = prefix_of(source, plain, ANCHOR, "DlrmHSTU")
    found = {name.removeprefix(prefix): value for name, value in plain.items()}
    for name in [name for name in found if TABLES in name]:  # tables may be saved apart, under another prefix
        found[name[name.index(TABLES) :]] = found.pop(name)
    return found


def _renamed(
    source: Path, found: Mapping[str, torch.Tensor], choices: Choices
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """The weights by the names here, and the names of what is left out."""
    tables = {"item": choices.item_table, "category": choices.category_table, "user": choices.user_table}
    names = {f"{TABLES}{table}.weight": f"embedding.{own}" for own, table in tables.items()} | NAMES
    weights: dict[str, torch.Tensor] = {}
    left_out = []
    for name, value in found.items():
        own = _own_name(name, names)
        if own:
            weights[own] = _squeezed(source, name, own, value)
        elif name.startswith(("_hstu_transducer.", "_item_embedding_mlp.", "_multitask_module.")):
            if name not in (ACTION_WEIGHTS, UNITS, PERIODS):
                raise ModelError(
                    f"{source}: `{shown(name)}` is a part that is not served; the preprocessor with contextual tokens "
                    f"and action weights and the postprocessor with times of day and week are, as in DLRMv3"
                )
        else:
            left_out.append(name)
    for table in tables.values():
        if f"{TABLES}{table}.weight" not in found:
            there = ", ".join(name[len(TABLES) :].removesuffix(".weight") for name in found if name.startswith(TABLES))
            raise ModelError(
                f"{source}: no table `{table}`; it has {shown(there) or 'none'}: see --item-table, --category-table "
                f"and --user-table"
            )
    return weights, tuple(left_out)


def _own_name(name: str, names: Mapping[str, str]) -> str:
    if name.startswith(LAYERS):
        number, _, parameter = name.removeprefix(LAYERS).partition(".")
        own = parameter.removeprefix("_").replace("uvqk_beta", "uvqk_bias")
        return f"stack.layers.{number}.{own}"
    if name in names:
        return names[name]
    return next(
        (own + name.removeprefix(one) for one, own in names.items() if one[-1] == "." and name.startswith(one)), ""
    )


def _squeezed(source: Path, name: str, own: str, value: torch.Tensor) -> torch.Tensor:
    if own not in LEADING_ONE:
        return value
    if not value.dim() or value.shape[0] != 1:
        raise ModelError(
            f"{source}: `{name}` has shape {tuple(value.shape)}: a model with one contextual token, the user's, is "
            f"served, and its first dimension is 1"
        )
    return value[0]


def _config(
    source: Path, found: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], choices: Choices
) -> DlrmConfig:
    def size(name: str, dimension: int) -> int:
        if name not in weights or dimension >= weights[name].dim():
            raise ModelError(f"{source}: the weight that is `{name}` here is missing, or has too few dimensions")
        return weights[name].shape[dimension]

    heads = choices.heads
    uvqk, gates = size("stack.layers.0.uvqk_weight", 1), size("stack.layers.0.output_weight", 0)
    if heads < 1 or gates % (3 * heads) or uvqk % (2 * heads) or uvqk // (2 * heads) <= gates // (3 * heads):
        raise ModelError(
            f"{source}: --heads {heads} does not divide the layers' widths (u, v, q, k: {uvqk}; output: {gates})"
        )
    dv = gates // (3 * heads)
    bits = size("embedding.action_rows", 0)
    actions = (
        tuple(found[ACTION_WEIGHTS].flatten().tolist()) if ACTION_WEIGHTS in found else tuple(2**b for b in range(bits))
    )
    if len(actions) != bits:
        raise ModelError(f"{source}: {len(actions)} action weights, {list(actions)}, for {bits} rows of actions")
    if (count := size("head.task.2.weight", 0)) != len(choices.tasks):
        raise ModelError(f"{source}: the head has {count} tasks: name as many with --tasks, not {len(choices.tasks)}")
    time_rows = size("embedding.time", 0)
    fields: dict[str, Any] = {
        "layers": len({name.split(".")[2] for name in weights if name.startswith("stack.layers.")}),
        "dim": size("embedding.position", 1),
        "heads": heads,
        "dqk": uvqk // (2 * heads) - dv,
        "dv": dv,
        "scale_tokens": choices.scale_tokens,
        "contextual_seq_len": choices.contextual_seq_len,
        "max_attn_len": choices.max_attn_len,
        "group_norm": size("stack.layers.0.output_norm_weight", 0) == heads != heads * dv,
        "table_dim": size("embedding.item", 1),
        "items": size("embedding.item", 0),
        "categories": size("embedding.category", 0),
        "users": size("embedding.user", 0),
        "action_weights": actions,
        "action_dim": size("embedding.action_rows", 1),
        "hidden": size("embedding.content.0.weight", 0),
        "item_hidden": size("head.item.0.weight", 0),
        "head_hidden": size("head.task.0.weight", 0),
        "position_rows": size("embedding.position", 0),
        "time_rows": time_rows,
        "time_last_row": time_rows - 1 if choices.time_last_row < 0 else choices.time_last_row,
        "times": choices.times,
        "positions": choices.positions,
        "min_tokens": choices.min_tokens,
        "tasks": choices.tasks,
    }
    if UNITS in found and PERIODS in found:
        units, per = (found[name].flatten().to(torch.int64).tolist() for name in (UNITS, PERIODS))
        fields["periods"] = tuple(zip(units, per, strict=False))
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
