"""SiLU attention in Triton, and what writes K and V into regions. Attention reads regions in place; scores stay in
registers.

One program computes one tile (tiles.py) of one head: o = weight · SiLU(scale · q·kᵀ)·v over the columns of its tile,
accumulated in float32. Where a group is cut along its columns, programs write partial sums, and a second kernel adds
them in a fixed order: unlike atomics, that gives the same bits in each run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import torch
import triton
from triton import language as tl

from relaygr_stream.models.kernels.tiles import ALIGNMENT, TileField

#: The least extent of a tl.dot operand along each side.
MIN_SIDE: Final = 16
#: Half precision on tensor cores: 64 × 64 scores are 32 float32 registers in each of 128 threads, beside the 32 to 64
#: of the sums for heads 64 to 128 wide.
HALF_BLOCK: Final = 64
#: float32 keeps its full mantissa, so it runs without tensor cores and holds both operands in registers: a quarter of
#: the scores at once.
FLOAT_BLOCK: Final = 32
#: Four warps hold a block of 64 rows in 16-row slices, the size that tensor cores take. Three stages load two blocks of
#: columns while computing another: on an H100, in bfloat16, 7 % (heads 64 wide) and 17 to 20 % (128 wide) faster than
#: two. Eight warps, blocks of 128 rows and four stages are slower at one of these widths.
WARPS: Final = 4
STAGES: Final = 3
FEW_STAGES: Final = 2
#: Shared memory of one program for three stages: compute capability 8.0 and 9.0 have 163 and 227 KiB, 8.6 and 8.9 99.
#: Heads 256 wide need 168 KiB for three.
ROOMY: Final = 160 << 10
WIDEST: Final = 128


@dataclass(frozen=True)
class Shape:
    """The compile-time constants: all from the model, so that a kernel is compiled once, before the worker serves.

    A row of uvqk holds u, v, q, k side by side, each heads × width; a row of `gates` holds u, o, u ⊙ Norm(o).
    """

    heads: int
    dqk: int
    dv: int
    scale: float
    weight: float
    window: int
    dtype: torch.dtype

    @property
    def block(self) -> int:
        """Rows of a tile, and columns of one step."""
        return FLOAT_BLOCK if self.dtype == torch.float32 else HALF_BLOCK

    @property
    def aligned(self) -> bool:
        """Whether every head's row of K and V is aligned for vector loads."""
        return self.dqk * self.dtype.itemsize % ALIGNMENT == 0 and self.dv * self.dtype.itemsize % ALIGNMENT == 0


def silu_attention(
    shape: Shape, tiles: torch.Tensor, layer: int, uvqk: torch.Tensor, gates: torch.Tensor, *, split: bool
) -> None:
    """Write o, the middle third of `gates` (n, 3·H·dv), from q, k, v of `uvqk` (n, 2·H·(dv + dqk)) and the regions.

    tiles: a table of tiles.py on the device. layer: index of the regions' layer. split: whether any row is cut along
    its columns. Rows in no tile are not written. Asynchronous.
    """
    grid = (len(tiles), shape.heads)
    if not len(tiles):
        return
    # Without a split the kernel does not access the partial sums.
    sums = uvqk.new_empty((len(tiles) if split else 0, shape.block, shape.heads * shape.dv), dtype=torch.float32)
    with torch.cuda.device_of(uvqk):  # Triton launches on the current device, not on the arguments' device
        launch = _launch_on(uvqk.device, shape)
        attention_kernel[grid](tiles, uvqk, gates, sums if split else gates, layer, **constants(shape, split), **launch)
        if split:
            sum_kernel[grid](tiles, sums, gates, **sum_constants(shape), **launch)


def store_kv(shape: Shape, tiles: torch.Tensor, layer: int, uvqk: torch.Tensor) -> None:
    """Copy K and V of all rows in tiles from uvqk (n, 2·H·(dv + dqk)) into one layer of their regions, behind the
    tokens that these hold. Asynchronous.
    """
    if not len(tiles):
        return
    with torch.cuda.device_of(uvqk):
        store_kernel[(len(tiles), shape.heads)](
            tiles, uvqk, layer, **store_constants(shape), **_launch_on(uvqk.device, shape)
        )


def launch_options(shape: Shape, shared: int) -> dict[str, int]:
    """How kernels are launched where one program may have so many bytes of shared memory."""
    many = shared >= ROOMY and max(shape.dqk, shape.dv) <= WIDEST
    return {"num_warps": WARPS, "num_stages": STAGES if many else FEW_STAGES}


@functools.cache
def _launch_on(device: torch.device, shape: Shape) -> dict[str, int]:
    if device.type != "cuda":  # Triton's interpreter
        return launch_options(shape, 0)
    return launch_options(shape, getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


def constants(shape: Shape, split: bool) -> dict[str, int | float | bool]:
    """The compile-time arguments of `attention_kernel`."""
    return {
        "FIELDS": len(TileField), "HEADS": shape.heads, "DQK": shape.dqk, "DV": shape.dv,
        "DQK_SIDE": _side(shape.dqk), "DV_SIDE": _side(shape.dv), "SCALE": shape.scale, "WEIGHT": shape.weight,
        "WINDOW": shape.window, "ALIGNED": shape.aligned, "BLOCK": shape.block, "SPLIT": split,
    }  # fmt: skip


def sum_constants(shape: Shape) -> dict[str, int | float | bool]:
    """The compile-time arguments of `sum_kernel`."""
    names = ("FIELDS", "HEADS", "DV", "DV_SIDE", "WEIGHT", "BLOCK")
    return {name: constants(shape, split=True)[name] for name in names}


def store_constants(shape: Shape) -> dict[str, int | float | bool]:
    """The compile-time arguments of `store_kernel`."""
    names = ("FIELDS", "HEADS", "DQK", "DV", "DQK_SIDE", "DV_SIDE", "BLOCK")
    return {name: constants(shape, split=True)[name] for name in names}


def _side(width: int) -> int:
    return max(MIN_SIDE, 1 << (width - 1).bit_length())


@triton.jit(do_not_specialize=["layer"])
def attention_kernel(
    tiles, uvqk, gates, sums, layer,
    FIELDS: tl.constexpr, HEADS: tl.constexpr, DQK: tl.constexpr, DV: tl.constexpr,
    DQK_SIDE: tl.constexpr, DV_SIDE: tl.constexpr,
    SCALE: tl.constexpr, WEIGHT: tl.constexpr, WINDOW: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, heads). Positions and columns have the same numbers: a row sees columns up to its own position."""
    UVQK: tl.constexpr = 2 * HEADS * (DV + DQK)
    entry = tiles + tl.program_id(0) * FIELDS
    head = tl.program_id(1)
    address, capacity = tl.load(entry), tl.load(entry + 1)
    length, first, suffix = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    row, row_stop = tl.load(entry + 5), tl.load(entry + 6)
    column, column_stop, parts = tl.load(entry + 7), tl.load(entry + 8), tl.load(entry + 9)

    region = address.to(tl.pointer_type(uvqk.dtype.element_ty))
    region += layer * HEADS * capacity * (DQK + DV)
    region_k = region + head * capacity * DQK
    region_v = region + HEADS * capacity * DQK + head * capacity * DV
    uvqk_v = uvqk + HEADS * DV + head * DV
    uvqk_q = uvqk + 2 * HEADS * DV + head * DQK
    uvqk_k = uvqk_q + HEADS * DQK

    rows = row + tl.arange(0, BLOCK)
    wide = tl.arange(0, DQK_SIDE)
    wide_v = tl.arange(0, DV_SIDE)
    row_there = rows[:, None] < row_stop
    q_there = row_there & (wide[None, :] < DQK)
    v_there = row_there & (wide_v[None, :] < DV)
    q = tl.load(uvqk_q + rows[:, None] * UVQK + wide[None, :], mask=q_there, other=0.0)
    # All candidates have the position behind the history.
    positions = length + tl.minimum(rows - first, suffix)
    total = tl.full((BLOCK, DV_SIDE), 0.0, tl.float32)

    for start in range(column, tl.minimum(column_stop, length), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        there = columns < tl.minimum(column_stop, length)
        k_at = region_k + columns[None, :] * DQK + wide[:, None]
        v_at = region_v + columns[:, None] * DV + wide_v[None, :]
        if ALIGNED:
            k_at = tl.multiple_of(k_at, [16, 1])
            v_at = tl.multiple_of(v_at, [1, 16])
        k = tl.load(k_at, mask=there[None, :] & (wide[:, None] < DQK), other=0.0)
        v = tl.load(v_at, mask=there[:, None] & (wide_v[None, :] < DV), other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * SCALE
        scores = scores / (1.0 + tl.exp(-scores))
        if WINDOW:
            scores = tl.where(columns[None, :] >= positions[:, None] - WINDOW, scores, 0.0)
        total = tl.dot(scores.to(v.dtype), v, total, input_precision="ieee")

    for start in range(tl.maximum(column, length), column_stop, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        there = columns < column_stop
        own = first + columns - length
        k_at = uvqk_k + own[None, :] * UVQK + wide[:, None]
        v_at = uvqk_v + own[:, None] * UVQK + wide_v[None, :]
        k = tl.load(k_at, mask=there[None, :] & (wide[:, None] < DQK), other=0.0)
        v = tl.load(v_at, mask=there[:, None] & (wide_v[None, :] < DV), other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * SCALE
        scores = scores / (1.0 + tl.exp(-scores))
        visible = columns[None, :] <= positions[:, None]
        if WINDOW:
            visible &= columns[None, :] >= positions[:, None] - WINDOW
        scores = tl.where(visible, scores, 0.0)
        total = tl.dot(scores.to(v.dtype), v, total, input_precision="ieee")

    # A candidate also sees itself; the first part adds it, so that it counts once.
    if (parts > 0) & (row_stop > first + suffix):
        own_k = tl.load(uvqk_k + rows[:, None] * UVQK + wide[None, :], mask=q_there, other=0.0)
        own_v = tl.load(uvqk_v + rows[:, None] * UVQK + wide_v[None, :], mask=v_there, other=0.0)
        score = tl.sum(q.to(tl.float32) * own_k.to(tl.float32), axis=1) * SCALE
        score = score / (1.0 + tl.exp(-score))
        score = tl.where(rows >= first + suffix, score, 0.0)
        total += score[:, None] * own_v.to(tl.float32)

    if SPLIT:
        slot = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)) * (HEADS * DV) + head * DV
        tl.store(sums + slot[:, None] + wide_v[None, :], total, mask=v_there)
    else:
        o = gates + HEADS * DV + head * DV + rows[:, None] * (3 * HEADS * DV) + wide_v[None, :]
        tl.store(o, (total * WEIGHT).to(gates.dtype.element_ty), mask=v_there)


@triton.jit
def sum_kernel(
    tiles, sums, gates,
    FIELDS: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, DV_SIDE: tl.constexpr, WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, heads). The program of a row's first part adds all its parts; the other programs add none."""
    tile, head = tl.program_id(0), tl.program_id(1)
    entry = tiles + tile * FIELDS
    row, row_stop, parts = tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 9)
    rows = row + tl.arange(0, BLOCK)
    wide_v = tl.arange(0, DV_SIDE)
    there = (rows[:, None] < row_stop) & (wide_v[None, :] < DV) & (parts > 0)
    slot = (tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)) * (HEADS * DV) + head * DV
    total = tl.full((BLOCK, DV_SIDE), 0.0, tl.float32)
    for part in range(parts):
        at = sums + part * (BLOCK * HEADS * DV) + slot[:, None] + wide_v[None, :]
        total += tl.load(at, mask=there, other=0.0)
    o = gates + HEADS * DV + head * DV + rows[:, None] * (3 * HEADS * DV) + wide_v[None, :]
    tl.store(o, (total * WEIGHT).to(gates.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["layer"])
def store_kernel(
    tiles, uvqk, layer,
    FIELDS: tl.constexpr, HEADS: tl.constexpr, DQK: tl.constexpr, DV: tl.constexpr,
    DQK_SIDE: tl.constexpr, DV_SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, heads). The program of a row's first part copies it; the other programs copy none."""
    UVQK: tl.constexpr = 2 * HEADS * (DV + DQK)
    entry = tiles + tl.program_id(0) * FIELDS
    head = tl.program_id(1)
    address, capacity = tl.load(entry), tl.load(entry + 1)
    length, first = tl.load(entry + 2), tl.load(entry + 3)
    row, row_stop, parts = tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 9)

    region = address.to(tl.pointer_type(uvqk.dtype.element_ty))
    region += layer * HEADS * capacity * (DQK + DV)
    region_k = region + head * capacity * DQK
    region_v = region + HEADS * capacity * DQK + head * capacity * DV
    uvqk_v = uvqk + HEADS * DV + head * DV
    uvqk_k = uvqk + 2 * HEADS * DV + HEADS * DQK + head * DQK

    rows = row + tl.arange(0, BLOCK)
    positions = length + rows - first
    wide = tl.arange(0, DQK_SIDE)
    wide_v = tl.arange(0, DV_SIDE)
    there = (rows[:, None] < row_stop) & (parts > 0)
    k_there = there & (wide[None, :] < DQK)
    v_there = there & (wide_v[None, :] < DV)
    k = tl.load(uvqk_k + rows[:, None] * UVQK + wide[None, :], mask=k_there, other=0.0)
    v = tl.load(uvqk_v + rows[:, None] * UVQK + wide_v[None, :], mask=v_there, other=0.0)
    tl.store(region_k + positions[:, None] * DQK + wide[None, :], k, mask=k_there)
    tl.store(region_v + positions[:, None] * DV + wide_v[None, :], v, mask=v_there)
