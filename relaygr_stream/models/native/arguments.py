"""The C functions' structures as ctypes, with the names and the order of the C declarations."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from relaygr_stream.models.attention import Block
    from relaygr_stream.models.kv import KVRegion
    from relaygr_stream.models.stu import StackConfig


class Stretch(ctypes.Structure):
    """Columns that lie side by side: addresses in layer 0, and strides in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k", "v")),
        *((name, ctypes.c_int64) for name in ("k_head", "k_row", "v_head", "v_row", "k_layer", "v_layer", "columns")),
    )


class Attention(ctypes.Structure):
    """Rows, the columns they attend to, and which pairs are visible. Strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "out")),
        *((name, ctypes.c_int64) for name in ("q_head", "q_row", "out_head", "out_row")),
        ("stretches", Stretch * 2),
        *((name, ctypes.c_int64) for name in ("heads", "rows", "columns", "dqk", "dv", "position")),
        *((name, ctypes.c_int64) for name in ("causal_from", "causal", "recent_to", "recent", "first")),
        *((name, ctypes.c_float) for name in ("scale", "weight")),
    )


class LayerShape(ctypes.Structure):
    """The shape that all layers have in common."""

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


class LayerRows(ctypes.Structure):
    """The rows that pass through the layers, their buffers, and their attentions."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "normed", "gates", "q", "k", "v")),
        *((name, ctypes.c_int64) for name in ("k_head", "k_row", "v_head", "v_row", "k_layer", "v_layer", "rows")),
        ("attentions", ctypes.POINTER(Attention)),
        ("count", ctypes.c_int64),
        ("self_weights", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )


class Tables(ctypes.Structure):
    """Addresses of the embedding's tables, the row counts of those that an index may exceed, and the rows' width."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("item", "action", "position", "gap", "candidate")),
        *((name, ctypes.c_int64) for name in ("vocab", "oov_rows", "positions", "dim")),
    )


class HeadWeights(ctypes.Structure):
    """Addresses of the head's weights; `weight` is (tasks, dim)."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm_weight", "norm_bias", "weight", "bias")),
        *((name, ctypes.c_int64) for name in ("dim", "tasks")),
        ("eps", ctypes.c_float),
    )


class Sequence(ctypes.Structure):
    """Tokens: addresses of int64 arrays, the numbers of behaviours and candidates, the first one's position."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("items", "actions", "gaps", "candidate_items")),
        *((name, ctypes.c_int64) for name in ("behaviours", "candidates", "first")),
    )


class KVColumns(NamedTuple):
    """K and V that rows attend to, in layer 0: addresses, and strides by head, row and layer, in elements."""

    k: int
    v: int
    k_head: int
    k_row: int
    v_head: int
    v_row: int
    layer: int  # the stride of K and of V; 0: all layers use the same memory
    size: int  # bytes of an element

    @classmethod
    def from_region(cls, kv: KVRegion) -> KVColumns:
        """The columns of a region, computed from its layout: views of its layers would take six torch operators."""
        layout, address = kv.layout, kv.storage.data_ptr()
        k_head, v_head = kv.capacity * layout.dqk, kv.capacity * layout.dv
        k_all, size = layout.heads * k_head, layout.dtype.itemsize
        layer = k_all + layout.heads * v_head
        return cls(address, address + k_all * size, k_head, layout.dqk, v_head, layout.dv, layer, size)

    def behind(self, rows: int) -> KVColumns:
        """The columns from row `rows` on."""
        return self._replace(k=self.k + rows * self.k_row * self.size, v=self.v + rows * self.v_row * self.size)

    def stretch(self, count: int) -> Stretch:
        """The first `count` of them."""
        strides = self.k_head, self.k_row, self.v_head, self.v_row, self.layer, self.layer
        return Stretch(self.k, self.v, *strides, count)


def attention(
    columns: KVColumns, length: int, own: KVColumns, block: Block, config: StackConfig, *, first: int, scale: float,
    weight: float,
) -> Attention:  # fmt: skip
    """The attention of one block with the heads and widths of `config`.

    Of the columns that the block counts, the first `length` are `columns`, the others are `own`.
    first: index of the block's row 0 among all rows. layers.c sets q and out.
    """
    count = block.col_stop - block.col_start
    before = max(0, min(block.col_stop, length) - block.col_start)
    stretches = (
        columns.behind(block.col_start).stretch(before),
        own.behind(max(0, block.col_start - length)).stretch(count - before),
    )
    causal_from, causal, recent_to, recent = count, 0, 0, 0
    if block.causal is not None:
        causal_from, causal = block.causal_from, block.causal_from + block.causal + 1
    if block.recent is not None:
        recent_to, recent = block.recent_to, block.recent
    return Attention(
        stretches=stretches, heads=config.heads, rows=block.row_stop - block.row_start, columns=count,
        dqk=config.dqk, dv=config.dv, position=block.col_start,
        causal_from=causal_from, causal=causal, recent_to=recent_to, recent=recent,
        first=first + block.row_start, scale=scale, weight=weight,
    )  # fmt: skip
