"""HSTU as the formulas of its reference say it: float64, one dense mask, no caching. Also writes conformance files."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def valid_attention(history: int, candidates: int, contextual: int, window: int) -> npt.NDArray[np.bool_]:
    """Rows × columns, True where the row attends: positions are ids, clamped at both ends, and compared."""
    total = history + candidates
    last = history - contextual + 1 if contextual else history
    ids = np.arange(total) - (contextual - 1 if contextual else 0)
    ids = np.minimum(np.maximum(ids, 0), last)
    distance = ids[:, None] - ids[None, :]
    valid = np.eye(total, dtype=bool) | (distance > 0)
    if window:
        valid &= distance <= window
    if contextual:
        valid |= (ids[:, None] == 0) & (ids[None, :] < last)
    return valid


def silu(x: Array) -> Array:
    activated: Array = x / (1 + np.exp(-x))
    return activated


def normed(x: Array, weight: Array, bias: Array) -> Array:
    out: Array = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * weight + bias
    return out


def relative_bias(weights: dict[str, Any], history: int, times: npt.NDArray[np.int64]) -> Array | float:
    """The bias of each pair of tokens. times: of the history and of the candidates, which all stand behind it."""
    total: Array | float = 0.0
    if "relative_position" in weights:
        table = weights["relative_position"]
        places = np.minimum(np.arange(len(times)), history)
        total = total + table[np.clip(places[:, None] - places, 0, len(table) - 1)]
    if "relative_time" in weights:
        table = weights["relative_time"]
        apart = np.maximum(times[:, None] - times, 1)
        total = total + table[np.minimum(np.floor(np.log(apart) / 0.301).astype(int), len(table) - 1)]
    return total


def run_layer(
    x: Array, weights: dict[str, Any], meta: dict[str, int], mask: npt.NDArray[np.bool_], bias: Array | float = 0.0
) -> tuple[Array, Array, Array]:
    """Output, K and V (tokens, H × width) of one layer."""
    heads, dv, dqk, n = meta["H"], meta["dv"], meta["dqk"], len(x)
    columns = normed(x, weights["input_norm_weight"], weights["input_norm_bias"]) @ weights["uvqk_weight"]
    columns = columns + weights["uvqk_beta"]
    u, v, q, k = np.split(columns, np.cumsum([heads * dv, heads * dv, heads * dqk]), axis=1)
    by_head = [part.reshape(n, heads, -1).transpose(1, 0, 2) for part in (q, k, v)]
    scores = silu(by_head[0] @ by_head[1].transpose(0, 2, 1) / np.sqrt(dqk) + bias) / meta["N"] * mask
    o = (scores @ by_head[2]).transpose(1, 0, 2)  # (n, heads, dv)
    if meta["group_norm"]:
        weight, shift = (weights[f"output_norm_{name}"][:, None] for name in ("weight", "bias"))
        norm = normed(o, weight, shift).reshape(n, -1)
    else:
        norm = normed(o.reshape(n, -1), weights["output_norm_weight"], weights["output_norm_bias"])
    u, o = silu(u), o.reshape(n, -1)
    return np.concatenate([u, o, u * norm], axis=1) @ weights["output_weight"] + x, k, v


def conformance_arrays(
    random: np.random.Generator,
    variant: str,
    meta: dict[str, int],
    histories: list[int],
    positions: int = 0,
    times: int = 0,
) -> dict[str, npt.NDArray[Any]]:
    """The arrays of one variant with random weights, under the keys of a conformance file.

    positions, times: lengths of the tables of a relative bias.
    """
    d, heads, dv, dqk = meta["D"], meta["H"], meta["dv"], meta["dqk"]
    norm = heads if meta["group_norm"] else heads * dv
    arrays: dict[str, npt.NDArray[Any]] = {f"{variant}/meta": np.array(list(meta.values()))}
    layers: list[dict[str, Any]] = []
    for _ in range(meta["layers"]):
        layers.append(
            {
                "input_norm_weight": random.normal(1, 0.1, d),
                "input_norm_bias": random.normal(0, 0.1, d),
                "uvqk_weight": random.normal(0, d**-0.5, (d, 2 * heads * (dv + dqk))),
                "uvqk_beta": random.normal(0, 0.1, 2 * heads * (dv + dqk)),
                "output_norm_weight": random.normal(1, 0.1, norm),
                "output_norm_bias": random.normal(0, 0.1, norm),
                "output_weight": random.normal(0, (3 * heads * dv) ** -0.5, (3 * heads * dv, d)),
            }
        )
        layers[-1] |= {"relative_position": random.normal(0, 1, positions)} if positions else {}
        layers[-1] |= {"relative_time": random.normal(0, 1, times)} if times else {}
    caches: list[list[tuple[Array, Array]]] = [[] for _ in layers]
    for user, history in enumerate(histories):
        count = meta["candidates"]
        x = random.normal(0, 1, (history + count, d))
        mask = valid_attention(history, count, meta["contextual_seq_len"], meta["max_attn_len"])
        arrays |= {f"{variant}/in/hist{user}": x[:history], f"{variant}/in/cand{user}": x[history:]}
        # Gaps from milliseconds to years, and none at all.
        gaps = (10 ** random.uniform(0, 11, history)).astype(np.int64) * random.integers(0, 2, history)
        at = np.cumsum(gaps)
        arrays |= {f"{variant}/in/times{user}": at} if times else {}
        at = np.concatenate([at, np.repeat(at[-1:] if history else np.array([0]), count)])
        for cache, weights in zip(caches, layers, strict=True):
            x, k, v = run_layer(x, weights, meta, mask, relative_bias(weights, history, at))
            cache.append((k[:history], v[:history]))
        arrays |= {f"{variant}/out_full/hist{user}": x[:history], f"{variant}/out_full/cand{user}": x[history:]}
        arrays[f"{variant}/out_cached/cand{user}"] = x[history:]
    for index, (weights, cache) in enumerate(zip(layers, caches, strict=True)):
        arrays |= {f"{variant}/layer{index}/{name}": value for name, value in weights.items()}
        arrays[f"{variant}/layer{index}/k_cache_jagged"] = np.concatenate([k for k, _ in cache])
        arrays[f"{variant}/layer{index}/v_cache_jagged"] = np.concatenate([v for _, v in cache])
    return {key: value.astype(np.float32) if value.dtype == np.float64 else value for key, value in arrays.items()}


def arrays_for_kernels() -> dict[str, npt.NDArray[Any]]:
    """Variants whose widths suit the kernels in C, which those of the reference's own file do not."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    random = np.random.default_rng(2)
    plain = {"D": 64, "H": 2, "dv": 64, "dqk": 32, "layers": 2}
    for name, contextual, window, group in (
        ("base", 0, 0, 0), ("windowed", 0, 5, 0), ("seen by all", 4, 0, 0), ("by head", 0, 33, 1)
    ):  # fmt: skip
        attention = {"contextual_seq_len": contextual, "max_attn_len": window, "group_norm": group}
        meta = plain | attention | {"N": 64, "candidates": 40}
        arrays |= conformance_arrays(random, name, meta, [70, 9])
    return arrays
