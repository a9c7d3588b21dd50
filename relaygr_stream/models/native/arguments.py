"""The structures that layers.c takes, as ctypes; names and order are those of parts.h and layers.c."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from relaygr_stream.models.attention import Block


class Attention(ctypes.Structure):
    """Rows, the columns they attend to in layer 0, what is visible; strides in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out")),
        *((f"{name}_{axis}", ctypes.c_int64) for name in ("q", "k", "v", "out") for axis in ("head", "row")),
        *((name, ctypes.c_int64) for name in ("heads", "rows", "columns", "dqk", "dv")),
        *((name, ctypes.c_int64) for name in ("causal_from", "causal", "recent_to", "recent")),
        *((name, ctypes.c_int64) for name in ("k_layer", "v_layer", "first")),
        *((name, ctypes.c_float) for name in ("scale", "weight")),
        ("accumulate", ctypes.c_int32),
    )


class Shape(ctypes.Structure):
    """What all layers have in common."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("dim", "heads", "dqk", "dv", "norm_group")),
        ("eps", ctypes.c_float),
    )


class Layer(ctypes.Structure):
    """Addresses of one layer's weights."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in ("norm_weight", "norm_bias", "uvqk", "uvqk_bias", "gate_weight", "gate_bias", "output")
    )


class Rows(ctypes.Structure):
    """Rows on their way through the layers, and whom they attend to."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "normed", "gates", "q", "k", "v")),
        *((name, ctypes.c_int64) for name in ("k_head", "k_row", "v_head", "v_row", "k_layer", "v_layer", "rows")),
        ("attentions", ctypes.POINTER(Attention)),
        ("count", ctypes.c_int64),
        ("self_weights", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )


def attention(
    keys: torch.Tensor,
    values: torch.Tensor,
    block: Block,
    *,
    first: int,
    layer: int,
    scale: float,
    weight: float,
    accumulate: bool,
) -> Attention:
    """One block over keys (heads, columns, dqk) and values (heads, columns, dv) of layer 0, width contiguous.

    first: which of all rows is the block's row 0; layer: elements from a layer's K to the next one's, and from V to V.
    q and out are left to layers.c.
    """
    columns = block.col_stop - block.col_start
    causal_from, causal, recent_to, recent = columns, 0, 0, 0
    if block.causal is not None:
        causal_from, causal = block.causal_from, block.causal_from + block.causal + 1
    if block.recent is not None:
        recent_to, recent = block.recent_to, block.recent
    k, v = (part.data_ptr() + block.col_start * part.stride(1) * part.element_size() for part in (keys, values))
    return Attention(
        k=k, v=v, k_head=keys.stride(0), k_row=keys.stride(1), v_head=values.stride(0), v_row=values.stride(1),
        heads=len(keys), rows=block.row_stop - block.row_start, columns=columns, dqk=keys.shape[2], dv=values.shape[2],
        causal_from=causal_from, causal=causal, recent_to=recent_to, recent=recent,
        k_layer=layer, v_layer=layer, first=first + block.row_start,
        scale=scale, weight=weight, accumulate=accumulate,
    )  # fmt: skip
