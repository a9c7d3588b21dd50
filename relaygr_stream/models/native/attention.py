"""SiLU attention on CPUs with AMX, in bfloat16: the blocks of models/attention.py, without a matrix of scores.

torch computes SiLU at a third of the speed that the same vector instructions allow, and writes and reads all scores
twice more. Measured on 4 heads × 64, 2,048 columns, one thread: 2.6 × as fast as torch for 64 rows, 4.5 × for a causal
square. attention.c says how. Sums are float32 over all columns; scores are rounded to bfloat16 once, behind SiLU.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

import torch

from relaygr_stream.models.native.build import library

if TYPE_CHECKING:
    from relaygr_stream.models.attention import Block

#: What the tiles are made of, and the room that attention.c has: dqk and dv are multiples of the one, up to the other.
TILE_WIDTH: Final = 32
MAX_WIDTH: Final = 128
#: The functions run in the calling thread alone. They are at least 2.6 × as fast as torch in one thread; with more
#: threads than this, torch is not slower.
MAX_THREADS: Final = 2


class _Attention(ctypes.Structure):
    """`Attention` of attention.c: addresses, strides in elements, shape, what is visible."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out")),
        *((f"{name}_{axis}", ctypes.c_int64) for name in ("q", "k", "v", "out") for axis in ("head", "row")),
        *((name, ctypes.c_int64) for name in ("heads", "rows", "columns", "dqk", "dv")),
        *((name, ctypes.c_int64) for name in ("causal_from", "causal", "recent_to", "recent")),
        ("scale", ctypes.c_float),
        ("weight", ctypes.c_float),
        ("accumulate", ctypes.c_int32),
    )


def fits(device: torch.device, dtype: torch.dtype, dqk: int, dv: int) -> bool:
    """Whether `attend` takes tensors of these kinds on this machine; the first time it compiles, half a second."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and max(dqk, dv) <= MAX_WIDTH
        and not dqk % TILE_WIDTH
        and not dv % TILE_WIDTH
        and torch.get_num_threads() <= MAX_THREADS
        and library() is not None
    )


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    block: Block,
    *,
    scale: float,
    weight: float,
    accumulate: bool,
) -> None:
    """One block, as `models.attention.attend` has it: out (+)= weight · SiLU(scale · q·kᵀ)·v over the visible pairs.

    Where `fits`; each tensor's last dimension is contiguous. A block may have any number of rows.
    """
    columns = block.col_stop - block.col_start
    causal_from, causal, recent_to, recent = columns, 0, 0, 0
    if block.causal is not None:
        causal_from, causal = block.causal_from, block.causal_from + block.causal + 1
    if block.recent is not None:
        recent_to, recent = block.recent_to, block.recent
    arguments = _arguments(
        queries[:, block.row_start : block.row_stop],
        keys[:, block.col_start : block.col_stop],
        values[:, block.col_start : block.col_stop],
        out[:, block.row_start : block.row_stop],
        (causal_from, causal, recent_to, recent),
        (scale, weight, accumulate),
    )
    _library().relaygr_attend(arguments)


def attend_to_self(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    weight: torch.Tensor | float,
) -> None:
    """As `models.attention.attend_to_self`, with tensors (rows, heads, width), where `fits`."""
    q, k, v, o = (part.transpose(0, 1) for part in (queries, keys, values, out))
    one_for_all = weight if isinstance(weight, float) else 0.0
    arguments = _arguments(q, k, v, o, (0, 0, 0, 0), (scale, one_for_all, False))
    _library().relaygr_attend_to_self(arguments, None if isinstance(weight, float) else _pointer(weight))


def gate(
    uvqk: torch.Tensor, room: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor, eps: float
) -> None:
    """Fill [u, o, u ⊙ LayerNorm(o)] (n, 3·width), which holds o, from u before its SiLU, the first columns of uvqk.

    Where `fits`; width is a multiple of 16.
    """
    _library().relaygr_gate(
        _pointer(uvqk), ctypes.c_int64(uvqk.stride(0)), _pointer(room), ctypes.c_int64(room.stride(0)),
        ctypes.c_int64(len(room)), ctypes.c_int64(room.shape[1] // 3),
        _pointer(norm_weight), _pointer(norm_bias), ctypes.c_float(eps),
    )  # fmt: skip


def _library() -> ctypes.CDLL:
    compiled = library()
    assert compiled is not None  # `fits` said so
    return compiled


def _arguments(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    visible: tuple[int, int, int, int],
    rest: tuple[float, float, bool],
) -> Any:
    """What the functions take: a pointer to `Attention`."""
    parts = (queries, keys, values, out)
    heads, rows, dqk = queries.shape
    return ctypes.byref(
        _Attention(
            *(part.data_ptr() for part in parts),
            *(stride for part in parts for stride in part.stride()[:2]),
            heads, rows, keys.shape[1], dqk, values.shape[2],
            *visible,
            *rest,
        )
    )  # fmt: skip


def _pointer(part: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(part.data_ptr())
