"""A DlrmHSTU from its formulas, in float64 and without blocks or caches, and files of its arrays for tests.

It shares no code with relaygr_stream/models: rows are computed one by one, attention with a full mask.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
PRE = "_hstu_transducer._input_preprocessor."
LAYERS = "_hstu_transducer._stu_module._stu_layers."
POST = "_hstu_transducer._output_postprocessor."


@dataclass(frozen=True)
class Shape:
    """A model's shape, small and with no two equal widths."""

    layers: int = 2
    heads: int = 3
    linear: int = 5
    qk: int = 4
    table: int = 7
    dim: int = 12
    hidden: int = 9
    item_hidden: int = 11
    head_hidden: int = 13
    actions: tuple[int, ...] = (1, 2, 4, 32)
    action_dim: int = 3
    positions: int = 40
    times: int = 70
    items: int = 60
    categories: int = 6
    users: int = 8
    tasks: int = 1
    group_norm: bool = False
    min_uih: int = 20
    fixed: int = 128
    extra: dict[str, Any] = field(default_factory=dict)


def state_dict(shape: Shape, seed: int = 0) -> dict[str, Array]:
    """Random weights under the reference's names, float32; norms and biases are random too."""
    random = np.random.default_rng(seed)
    width = shape.heads * shape.linear
    bits = len(shape.actions) * shape.action_dim
    shapes: dict[str, tuple[int, ...]] = {
        "_embedding_collection.embeddings.item_id.weight": (shape.items, shape.table),
        "_embedding_collection.embeddings.item_category_id.weight": (shape.categories, shape.table),
        "_embedding_collection.embeddings.user_id.weight": (shape.users, shape.table),
        f"{PRE}_batched_contextual_linear_weights": (1, shape.table, shape.dim),
        f"{PRE}_batched_contextual_linear_bias": (1, shape.dim),
        f"{PRE}_action_encoder._action_embedding_table": (len(shape.actions), shape.action_dim),
        f"{PRE}_action_encoder._target_action_embedding_table": (1, bits),
        "_hstu_transducer._positional_encoder._position_embeddings_weight": (shape.positions, shape.dim),
        "_hstu_transducer._positional_encoder._timestamp_embeddings_weight": (shape.times, shape.dim),
        f"{POST}_time_feature_combiner.weight": (shape.dim, shape.dim + 4),
        f"{POST}_time_feature_combiner.bias": (shape.dim,),
        f"{POST}_layer_norm.weight": (shape.dim,),
        f"{POST}_layer_norm.bias": (shape.dim,),
    }
    for name, inputs, hidden, outputs, last in (
        (f"{PRE}_content_embedding_mlp", shape.table, shape.hidden, shape.dim, True),
        (f"{PRE}_additional_embedding_mlp", shape.table, shape.hidden, shape.dim, True),
        (f"{PRE}_action_embedding_mlp", bits, shape.hidden, shape.dim, True),
        ("_item_embedding_mlp", 2 * shape.table, shape.item_hidden, shape.dim, True),
        ("_multitask_module._prediction_module", shape.dim, shape.head_hidden, shape.tasks, False),
    ):
        shapes |= {f"{name}.0.weight": (hidden, inputs), f"{name}.2.weight": (outputs, hidden)}
        shapes |= {f"{name}.{part}": (hidden,) for part in ("0.bias", "1.weight", "1.bias")}
        shapes[f"{name}.2.bias"] = (outputs,)
        if last:
            shapes |= {f"{name}.3.weight": (outputs,), f"{name}.3.bias": (outputs,)}
    for layer in range(shape.layers):
        columns, norm = 2 * shape.heads * (shape.linear + shape.qk), shape.heads if shape.group_norm else width
        shapes |= {
            f"{LAYERS}{layer}._uvqk_weight": (shape.dim, columns),
            f"{LAYERS}{layer}._uvqk_beta": (columns,),
            f"{LAYERS}{layer}._input_norm_weight": (shape.dim,),
            f"{LAYERS}{layer}._input_norm_bias": (shape.dim,),
            f"{LAYERS}{layer}._output_weight": (3 * width, shape.dim),
            f"{LAYERS}{layer}._output_norm_weight": (norm,),
            f"{LAYERS}{layer}._output_norm_bias": (norm,),
        }
    weights = {
        name: random.standard_normal(its).astype(np.float32) / np.float32(math.sqrt(its[-1]))
        for name, its in shapes.items()
    }
    for name, value in weights.items():  # norms scale by about 1
        if name.endswith(("norm_weight", "norm.weight", "mlp.1.weight", "mlp.3.weight", "module.1.weight")):
            weights[name] = np.float32(1) + np.float32(0.25) * value
    weights[f"{PRE}_action_encoder._combined_action_weights"] = np.array(shape.actions)
    weights[f"{POST}_period_units"] = np.array([[3600.0, 86400.0]], np.float32)
    weights[f"{POST}_units_per_period"] = np.array([[24.0, 7.0]], np.float32)
    return weights


def norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    found: Array = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias
    return found


def sigmoid(x: Array) -> Array:
    found: Array = 1 / (1 + np.exp(-x))
    return found


class Naive:
    """The forward pass of one request at a time."""

    def __init__(self, shape: Shape, weights: dict[str, Array]) -> None:
        self.shape = shape
        self.w = {name: value.astype(np.float64) for name, value in weights.items()}

    def mlp(self, name: str, x: Array) -> Array:
        w = self.w
        h = x @ w[f"{name}.0.weight"].T + w[f"{name}.0.bias"]
        h = h * sigmoid(norm(h, w[f"{name}.1.weight"], w[f"{name}.1.bias"], 1e-5))
        h = h @ w[f"{name}.2.weight"].T + w[f"{name}.2.bias"]
        return norm(h, w[f"{name}.3.weight"], w[f"{name}.3.bias"], 1e-5) if f"{name}.3.weight" in w else h

    def table(self, name: str) -> Array:
        return self.w[f"_embedding_collection.embeddings.{name}.weight"]

    def outputs(self, request: dict[str, Array], scale: int, last_row: int) -> dict[str, Array]:
        """All arrays of the reference, rows [user, history, candidates]."""
        shape, w = self.shape, self.w
        n, m = len(request["uih_item_id"]), len(request["cand_item_id"])
        query = int(request["cand_query_time"][-1])
        tokens = []
        user = self.table("user_id")[int(request["user_id"])] if n + m >= shape.min_uih else np.zeros(shape.table)
        tokens.append(
            user @ w[f"{PRE}_batched_contextual_linear_weights"][0] + w[f"{PRE}_batched_contextual_linear_bias"][0]
        )
        for part in ("uih", "cand"):
            for j in range(n if part == "uih" else m):
                item, category = int(request[f"{part}_item_id"][j]), int(request[f"{part}_category_id"][j])
                action = w[f"{PRE}_action_encoder._target_action_embedding_table"][0]
                if part == "uih":
                    mask = int(request["uih_action_weight"][j])
                    rows = w[f"{PRE}_action_encoder._action_embedding_table"]
                    action = np.concatenate(
                        [row if mask & bit else 0 * row for row, bit in zip(rows, shape.actions, strict=True)]
                    )
                tokens.append(
                    self.mlp(f"{PRE}_content_embedding_mlp", self.table("item_id")[item])
                    + self.mlp(f"{PRE}_additional_embedding_mlp", self.table("item_category_id")[category])
                    + self.mlp(f"{PRE}_action_embedding_mlp", action)
                )
        found = {"preprocessed": np.stack(tokens)}
        positions = [0, *(min(n - j + 1, shape.positions - 1) for j in range(n)), *[1] * m]
        moments = [0, *request["uih_timestamp"].tolist(), *request["cand_query_time"].tolist()]
        ages = [int(math.sqrt(max(query - moment, 0) // 60)) for moment in moments]  # floor √ of whole minutes
        x = math.sqrt(shape.dim) * found["preprocessed"]
        x = x + w["_hstu_transducer._positional_encoder._position_embeddings_weight"][positions]
        x = (
            x
            + w["_hstu_transducer._positional_encoder._timestamp_embeddings_weight"][
                [min(age, last_row) for age in ages]
            ]
        )
        found["encoded"] = x
        sees = np.tril(np.ones((1 + n + m, 1 + n + m), bool))
        sees[1 + n :, 1 + n :] = np.eye(m, dtype=bool)
        for layer in range(shape.layers):
            x, found[f"k{layer}"], found[f"v{layer}"] = self.layer(layer, x, sees, scale)
            found[f"layer{layer}"] = x
        times = request["cand_query_time"].astype(np.float32).astype(np.float64)
        turns = [np.mod(times // unit, per) / per * 6.28 for unit, per in ((3600, 24), (86400, 7))]
        features = np.stack([f(turn) for turn in turns for f in (np.cos, np.sin)], 1)
        joined = np.concatenate([x[1 + n :], features], 1)
        found["user"] = norm(
            joined @ w[f"{POST}_time_feature_combiner.weight"].T + w[f"{POST}_time_feature_combiner.bias"],
            w[f"{POST}_layer_norm.weight"], w[f"{POST}_layer_norm.bias"], 1e-6,
        )  # fmt: skip
        both = (
            self.table("item_id")[request["cand_item_id"]],
            self.table("item_category_id")[request["cand_category_id"]],
        )
        found["item"] = self.mlp("_item_embedding_mlp", np.concatenate(both, 1))
        logits = self.mlp("_multitask_module._prediction_module", found["user"] * found["item"])
        found["logits"] = logits[:, 0] if shape.tasks == 1 else logits.T
        found["predictions"] = sigmoid(found["logits"])
        return found

    def layer(self, index: int, x: Array, sees: Array, scale: int) -> tuple[Array, Array, Array]:
        shape = self.shape
        w = {name: self.w[f"{LAYERS}{index}._{name}"] for name in (
            "uvqk_weight", "uvqk_beta", "input_norm_weight", "input_norm_bias", "output_weight", "output_norm_weight",
            "output_norm_bias",
        )}  # fmt: skip
        heads, width, rows = shape.heads, shape.heads * shape.linear, len(x)
        projected = norm(x, w["input_norm_weight"], w["input_norm_bias"], 1e-6) @ w["uvqk_weight"] + w["uvqk_beta"]
        u, v, q, k = np.split(projected, [width, 2 * width, 2 * width + heads * shape.qk], 1)
        u = u * sigmoid(u)
        v, q, k = (part.reshape(rows, heads, -1) for part in (v, q, k))
        attended = np.zeros((rows, heads, shape.linear))
        for head in range(heads):
            scores = q[:, head] @ k[:, head].T / math.sqrt(shape.qk)
            attended[:, head] = (scores * sigmoid(scores) / scale * sees) @ v[:, head]
        flat = attended.reshape(rows, width)
        if shape.group_norm:
            normed = norm(attended, 1.0, 0.0, 1e-6) * w["output_norm_weight"][:, None] + w["output_norm_bias"][:, None]  # type: ignore[arg-type]
            normed = normed.reshape(rows, width)
        else:
            normed = norm(flat, w["output_norm_weight"], w["output_norm_bias"], 1e-6)
        return x + np.concatenate([u, flat, u * normed], 1) @ w["output_weight"], k, v


def random_request(
    shape: Shape, random: np.random.Generator, history: int, candidates: int, *, steady: bool = False
) -> dict[str, Array]:
    """A request with ids of the tables; steady: all times are 1, as in DLRMv3's data."""
    now = 1_700_000_000
    times = np.sort(now - random.integers(0, 400_000, history))
    asked = now + np.sort(random.integers(0, 90_000, candidates))
    return {
        "user_id": np.array(random.integers(shape.users)),
        "uih_item_id": random.integers(0, shape.items, history),
        "uih_category_id": random.integers(0, shape.categories, history),
        "uih_action_weight": random.integers(0, 1024, history),
        "uih_timestamp": np.ones(history, np.int64) if steady else times,
        "cand_item_id": random.integers(0, shape.items, candidates),
        "cand_category_id": random.integers(0, shape.categories, candidates),
        "cand_query_time": np.ones(candidates, np.int64) if steady else asked,
    }


def arrays_of(shape: Shape, seed: int = 0) -> dict[str, Array]:
    """A reference file: a few requests in every mode."""
    weights, random = state_dict(shape, seed), np.random.default_rng(seed + 1)
    requests = {
        "short": random_request(shape, random, 5, 4),
        "gate": random_request(shape, random, 11, 9),
        "long": random_request(shape, random, 60, 7),
        "one": random_request(shape, random, 1, 1),
        "steady0": random_request(shape, random, 30, 6, steady=True),
    }
    last = {
        "fixed": shape.dim - 1,
        "fixed_triton": shape.times - 1,
        "alone": shape.dim - 1,
        "incremental": shape.dim - 1,
    }
    config = {
        "heads": shape.heads, "min_uih": shape.min_uih, "fixed_N": shape.fixed, "time_last_row": last,
        "tasks": [[f"task{index}", 1, ""] for index in range(shape.tasks)], "table_dim": shape.table,
    }  # fmt: skip
    arrays: dict[str, Array] = {"meta/config": np.array(json.dumps(config))}
    arrays |= {f"w/{name}": value for name, value in weights.items()}
    level = dict(weights)
    name = "_hstu_transducer._positional_encoder._position_embeddings_weight"
    level[name] = np.concatenate([weights[name][:2], np.repeat(weights[name][2:3], shape.positions - 2, 0)])
    for request, its in requests.items():
        arrays |= {f"in/{request}/{field}": value for field, value in its.items()}
        own = 1 + len(its["uih_item_id"]) + len(its["cand_item_id"])
        for mode, row in last.items():
            if mode == "incremental" and not request.startswith("steady"):
                continue
            model = Naive(shape, level if mode == "incremental" else weights)
            found = model.outputs(its, own if mode == "alone" else shape.fixed, row)
            arrays |= {f"out/{mode}/{request}/{key}": value.astype(np.float32) for key, value in found.items()}
        arrays[f"out/alone/{request}/N"] = np.array(own)
    return arrays
