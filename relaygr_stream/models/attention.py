"""SiLU attention over per-head contiguous K/V, in place and in row blocks: who sees whom, and the arithmetic.

A row is a query at a position of the history; a candidate stands at the position just behind the history. Scores exist
for one block of rows at a time, only for the columns which that block can see, and never as a mask of the whole
sequence. Knows nothing of layers, weights or where K/V came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch.nn import functional

#: Rows of a block on the CPU: the products reach their peak from about 256 rows on, while the half block above the
#: diagonal is computed in vain. Measured with benchmarks/engine.py over 64…512.
CPU_BLOCK_ROWS: Final = 256
#: Scores of a block on the CPU: 2 Mi elements are 4 MiB in bfloat16, which leaves room in the last-level cache for
#: K and V.
CPU_BLOCK_ELEMENTS: Final = 2 << 20
#: On an accelerator blocks are large enough to fill it (1,024 rows × 2,048 columns × 8 heads and more) and small enough
#: to bound the scratch memory (64 Mi scores: 128 MiB in half precision).
ACCELERATOR_BLOCK_ROWS: Final = 1024
ACCELERATOR_BLOCK_ELEMENTS: Final = 64 << 20
#: Up to so many rows, the CPU computes half-precision scores transposed. Measured for whole rankings on 2,048 and 8,192
#: tokens: faster by 10–30 % up to 96 rows, even at 128, slower from 256 on.
FEW_ROWS: Final = 96
#: What keeps no scores blocks by itself (models/native); this many rows are no sequence.
ANY_ROWS: Final = 1 << 30
#: Fewer rows than this make products inefficient on any device, so memory bounds never go below it.
MIN_BLOCK_ROWS: Final = 32
#: Nor fewer columns than this.
MIN_PIECE_COLUMNS: Final = 256


class Block(NamedTuple):
    """Rows that are computed together, and the columns they can see.

    From column `causal_from` on, row r sees the columns up to r + `causal` of them (a `tril` diagonal); before column
    `recent_to`, it sees those from r + `recent` on (a `triu` diagonal). None: every row sees all of them. Columns count
    from col_start.
    """

    row_start: int
    row_stop: int
    col_start: int
    col_stop: int
    causal: int | None = None
    causal_from: int = 0
    recent: int | None = None
    recent_to: int = 0

    def pieces(self, most_columns: int) -> Iterator[Block]:
        """The same block over so many columns at a time, where all rows see all of them; cut along a diagonal, columns
        stay together. Every column is in one piece."""
        width = self.col_stop - self.col_start
        whole_from = 0 if self.recent is None else self.recent_to
        whole_to = width if self.causal is None else self.causal_from
        start = 0
        while width - start > most_columns:
            stop = min(start + most_columns, whole_to)
            if stop <= start or stop < whole_from:
                break
            yield self._columns(start, stop)
            start = stop
        yield self._columns(start, width)

    def _columns(self, start: int, stop: int) -> Block:
        width = self.col_stop - self.col_start
        return self._replace(
            col_start=self.col_start + start,
            col_stop=self.col_start + stop,
            causal=self.causal if stop == width else None,
            causal_from=max(0, self.causal_from - start),
            recent=self.recent if start == 0 else None,
        )


@dataclass(frozen=True)
class Visibility:
    """Who attends to whom, as `_get_valid_attn_mask` of meta-recsys/generative-recommenders has it.

    contextual: the first tokens that see the whole history; among distances they count as one position.
    window: the farthest a token sees back (`max_attn_len`); 0: to the first token.
    """

    contextual: int = 0
    window: int = 0

    def first_visible(self, position: int) -> int:
        """The oldest position that a non-contextual row at `position` sees."""
        return position - self.window if self.window and position >= self._windowed_from else 0

    @property
    def _windowed_from(self) -> int:
        """The first position that does not see the first token any more."""
        return self.window + max(self.contextual, 1)

    def blocks(self, row0: int, rows: int, col0: int, cols: int, history: int, block_rows: int) -> list[Block]:
        """Split rows at positions row0, row0 + 1, … over columns at positions col0 … col0 + cols - 1.

        Rows past `history` are candidates: they all stand at position `history`, see the history as a behaviour there
        would, and not each other. A block has at most `block_rows` rows, all of one kind, so that what they see is a
        rectangle cut along diagonals: no mask is ever stored.
        """
        end = row0 + rows
        # Without a window, a candidate sees what any row behind the history would: no cut between them, since K is
        # read (and on the CPU repacked) once per block.
        kinds = {self.contextual, history, self._windowed_from} if self.window else {self.contextual}
        bounds = sorted({row0, end, *(cut for cut in kinds if row0 < cut < end)})
        return [
            self._block(start, min(start + block_rows, stop), row0, col0, col0 + cols, history)
            for begin, stop in pairwise(bounds)
            for start in range(begin, stop, block_rows)
        ]

    def _block(self, start: int, stop: int, row0: int, col0: int, col_end: int, history: int) -> Block:
        """The block of rows at start … stop - 1, over columns at col0 … col_end - 1."""
        rows = (start - row0, stop - row0)
        if start < min(self.contextual, history):
            return Block(*rows, 0, col_end - col0)
        if start >= history:
            return Block(*rows, max(0, min(self.first_visible(history), col_end) - col0), col_end - col0)
        low = max(col0, min(self.first_visible(start), col_end))
        high = max(low, min(stop, col_end))
        block = Block(*rows, low - col0, high - col0)
        hidden_from = max(low, start + 1)  # up to its own position, the first row sees every column, and so do all
        if hidden_from < high:
            block = block._replace(causal=start - hidden_from, causal_from=hidden_from - low)
        seen_from = min(self.first_visible(stop - 1), high)  # from here on, even the last row sees every column
        if seen_from > low:
            block = block._replace(recent=start - self.window - low, recent_to=seen_from - low)
        return block


def block_rows(device: torch.device, dtype: torch.dtype, heads: int, cols: int) -> int:
    """How many rows to compute together, over at most `cols` columns."""
    if _sums_in_float32(device, dtype):
        return CPU_BLOCK_ROWS  # its columns come in pieces
    if device.type == "cpu":
        most, elements = CPU_BLOCK_ROWS, CPU_BLOCK_ELEMENTS
    else:
        most, elements = ACCELERATOR_BLOCK_ROWS, ACCELERATOR_BLOCK_ELEMENTS
    return max(MIN_BLOCK_ROWS, min(most, elements // max(1, heads * cols)))


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    blocks: list[Block],
    *,
    scale: float,
    weight: float,
    accumulate: bool = False,
) -> None:
    """out (+)= weight · SiLU(scale · q·kᵀ)·v, over the visible pairs.

    queries (heads, rows, dqk), keys (heads, columns, dqk), values (heads, columns, dv), out (heads, rows, dv); views
    of any strides, read and written in place. Columns that no block names may hold anything: they are not read.
    accumulate: add to `out` instead of overwriting it.
    """
    for block, adds in _in_pieces(blocks, queries, accumulate):
        target = out[:, block.row_start : block.row_stop]
        columns = slice(block.col_start, block.col_stop)
        if block.col_start == block.col_stop:
            if not adds:
                target.zero_()
            continue
        scores = _products(queries[:, block.row_start : block.row_stop], keys[:, columns], scale)
        functional.silu(scores, inplace=True)
        # Measured on 4 × 256 × 255 scores in bfloat16: 8 µs, where masked_fill_ with a mask takes 180.
        if block.causal is not None:
            scores[:, :, block.causal_from :].tril_(block.causal)
        if block.recent is not None:
            scores[:, :, : block.recent_to].triu_(block.recent)
        # 1/N goes into the product's epilogue, in float32: on the scores themselves it would underflow in float16.
        torch.baddbmm(target, scores, values[:, columns], beta=1 if adds else 0, alpha=weight, out=target)


def attend_to_self(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    weight: torch.Tensor | float,
) -> None:
    """out += weight · SiLU(scale · q·k)·v of each row with itself: queries … out are (rows, heads, width).

    weight: one number, or (rows, 1, 1) float32 (0 for rows whose own column was counted elsewhere).
    """
    # In float32, as the sum over dqk inside a matrix product would be.
    own = (queries.float() * keys.float()).sum(-1, keepdim=True).mul_(scale)
    functional.silu(own, inplace=True).mul_(weight)
    out.addcmul_(own.to(out.dtype), values)


def _in_pieces(blocks: Iterable[Block], queries: torch.Tensor, adds: bool) -> Iterator[tuple[Block, bool]]:
    """Blocks whose scores fit into the cache, and whether each adds to what is there; `adds`: the first ones do.

    Where sums are kept in float32, the columns are cut: fewer rows would read K and V once more for each block. In half
    precision every piece would round the sum.
    """
    if not _sums_in_float32(queries.device, queries.dtype):
        yield from ((block, adds) for block in blocks)
        return
    for block in blocks:
        rows = block.row_stop - block.row_start
        columns = CPU_BLOCK_ELEMENTS // (len(queries) * max(1, rows))
        for index, piece in enumerate(block.pieces(max(MIN_PIECE_COLUMNS, columns))):
            yield piece, adds or index > 0


def _sums_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype == torch.float32


def _products(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    heads, rows, _ = queries.shape
    columns = keys.shape[1]
    half_on_cpu = queries.device.type == "cpu" and queries.dtype != torch.float32
    if half_on_cpu and rows <= FEW_ROWS:
        # Computed as K·qᵀ, so that the large operand is the one which oneDNN reads in place.
        turned = torch.empty((heads, columns, rows), dtype=queries.dtype)
        torch.baddbmm(turned, keys, queries.transpose(1, 2), beta=0, alpha=scale, out=turned)
        return turned.transpose(1, 2)
    scores = torch.empty((heads, rows, columns), dtype=queries.dtype, device=queries.device)
    if half_on_cpu:
        # oneDNN's batched product transposes K slowly: measured 0.70 ms against 0.41 ms head by head for 64 rows ×
        # 2,048 columns × 4 heads in bfloat16.
        for head in range(heads):
            torch.addmm(scores[head], queries[head], keys[head].t(), beta=0, alpha=scale, out=scores[head])
    else:
        torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0, alpha=scale, out=scores)
    return scores
