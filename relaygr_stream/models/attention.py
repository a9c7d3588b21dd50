"""SiLU attention over per-head contiguous K/V: which pairs are visible, and the arithmetic in blocks of rows.

A row is a query at a position of the history. A candidate has the position just behind the history. One block of rows
is computed at a time, over the columns that it can see. There is never a mask of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import torch
from torch.nn import functional

#: Rows of a block on the CPU. Products reach their peak speed at about 256 rows; more rows waste more work above the
#: diagonal. Measured with relaygr_lab/benchmarks/engine.py over 64…512.
CPU_BLOCK_ROWS: Final = 256
#: Scores of a block on the CPU: 2 Mi elements are 4 MiB in bfloat16. K and V still fit into the last-level cache.
CPU_BLOCK_ELEMENTS: Final = 2 << 20
#: On an accelerator a block is large enough to fill the device (1,024 rows × 2,048 columns × 8 heads and more) and
#: small enough to bound the scratch memory (64 Mi scores: 128 MiB in half precision).
ACCELERATOR_BLOCK_ROWS: Final = 1024
ACCELERATOR_BLOCK_ELEMENTS: Final = 64 << 20
#: Up to this number of rows, the CPU computes half-precision scores transposed. Measured for whole rankings on 2,048
#: and 8,192 tokens: 10–30 % faster up to 96 rows, equal at 128, slower from 256 on.
FEW_ROWS: Final = 96
#: A block height above every sequence length: models/native stores no scores and needs no blocks.
UNBLOCKED_ROWS: Final = 1 << 30
#: Products with fewer rows are inefficient on every device, so memory bounds never go below it.
MIN_BLOCK_ROWS: Final = 32
#: The same for the columns of a piece.
MIN_PIECE_COLUMNS: Final = 256


class Bias(Protocol):
    """What is added to the scores of a layer."""

    def values(self, block: Block) -> torch.Tensor:
        """For the block's rows and columns, (rows or 1, columns)."""
        ...


class Block(NamedTuple):
    """Rows that are computed together, and the columns they can see. Columns count from col_start.

    causal: a `tril` diagonal over the columns from `causal_from` on; None: every row sees all of these columns.
    recent: a `triu` diagonal over the columns before `recent_to`; None: every row sees all of these columns.
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
        """Split the block into pieces of at most `most_columns` columns. Every column is in exactly one piece.

        Columns under a diagonal stay together, so such a piece may be wider.
        """
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
    """Which rows see which columns, as in `_get_valid_attn_mask` of meta-recsys/generative-recommenders.

    contextual: number of first tokens that see the whole history; they count as one position in distances.
    window: how many positions a token sees back (`max_attn_len`); 0: back to the first token.
    """

    contextual: int = 0
    window: int = 0

    def first_visible(self, position: int) -> int:
        """The oldest position that a non-contextual row at `position` sees."""
        return position - self.window if self.window and position >= self._windowed_from else 0

    @property
    def _windowed_from(self) -> int:
        """The first position that no longer sees the first token."""
        return self.window + max(self.contextual, 1)

    def blocks(self, row0: int, rows: int, col0: int, cols: int, history: int, block_rows: int) -> list[Block]:
        """Split the rows at positions row0, row0 + 1, … into blocks over columns at positions col0 … col0 + cols - 1.

        Rows past `history` are candidates. They all have position `history`, see the history as a behaviour there
        would, and do not see each other. A block has at most `block_rows` rows of one kind (contextual, behaviour or
        candidate), so its visible pairs are a rectangle cut along diagonals, and no mask is stored.
        """
        end = row0 + rows
        # Without a window, candidates see what behaviours at their position see. One block may then hold both, and K is
        # read (and on the CPU repacked) once per block.
        kinds = {self.contextual, history, self._windowed_from} if self.window else {self.contextual}
        bounds = sorted({row0, end, *(cut for cut in kinds if row0 < cut < end)})
        return [
            self._block(start, min(start + block_rows, stop), row0, col0, col0 + cols, history)
            for begin, stop in pairwise(bounds)
            for start in range(begin, stop, block_rows)
        ]

    def _block(self, start: int, stop: int, row0: int, col0: int, col_end: int, history: int) -> Block:
        """The block of the rows at start … stop - 1 over the columns at col0 … col_end - 1."""
        rows = (start - row0, stop - row0)
        if start < min(self.contextual, history):
            return Block(*rows, 0, col_end - col0)
        if start >= history:
            return Block(*rows, max(0, min(self.first_visible(history), col_end) - col0), col_end - col0)
        low = max(col0, min(self.first_visible(start), col_end))
        high = max(low, min(stop, col_end))
        block = Block(*rows, low - col0, high - col0)
        hidden_from = max(low, start + 1)  # every row sees the columns up to the first row's position
        if hidden_from < high:
            block = block._replace(causal=start - hidden_from, causal_from=hidden_from - low)
        seen_from = min(self.first_visible(stop - 1), high)  # every row sees the columns from here on
        if seen_from > low:
            block = block._replace(recent=start - self.window - low, recent_to=seen_from - low)
        return block


def block_rows(device: torch.device, dtype: torch.dtype, heads: int, cols: int) -> int:
    """The number of rows of a block that spans at most `cols` columns."""
    if _sums_in_float32(device, dtype):
        return CPU_BLOCK_ROWS  # `attend` splits the columns into pieces instead
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
    bias: Bias | None = None,
    accumulate: bool = False,
) -> None:
    """out (+)= weight · SiLU(scale · q·kᵀ + bias)·v over the visible pairs.

    queries (heads, rows, dqk), keys (heads, columns, dqk), values (heads, columns, dv), out (heads, rows, dv): views
    of any strides, read and written in place. Columns outside all blocks are not read.
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
        if bias is not None:
            scores += bias.values(block)
        functional.silu(scores, inplace=True)
        # tril_ is about 20 times as fast as masked_fill_ with a mask.
        if block.causal is not None:
            scores[:, :, block.causal_from :].tril_(block.causal)
        if block.recent is not None:
            scores[:, :, : block.recent_to].triu_(block.recent)
        # The product's epilogue applies 1/N in float32; applied to the scores, it would underflow in float16.
        torch.baddbmm(target, scores, values[:, columns], beta=1 if adds else 0, alpha=weight, out=target)


def attend_to_self(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    weight: torch.Tensor | float,
    bias: torch.Tensor | None = None,
) -> None:
    """out += weight · SiLU(scale · q·k + bias)·v of each row with itself; queries … out are (rows, heads, width).

    weight: one number, or (rows, 1, 1) float32, with 0 for rows whose own column another call counts.
    """
    # In float32, as a matrix product accumulates its sums over dqk.
    own = (queries.float() * keys.float()).sum(-1, keepdim=True).mul_(scale)
    if bias is not None:
        own += bias
    functional.silu(own, inplace=True).mul_(weight)
    out.addcmul_(own.to(out.dtype), values)


def _in_pieces(blocks: Iterable[Block], queries: torch.Tensor, adds: bool) -> Iterator[tuple[Block, bool]]:
    """Blocks whose scores fit into the cache, and whether each adds to `out`. adds: whether the first pieces add.

    With float32 sums the columns are cut, since smaller blocks of rows would read K and V more often. In half precision
    the columns stay whole, since every piece would round the sum.
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
        # Computed as K·qᵀ: oneDNN then reads the large operand in place.
        turned = torch.empty((heads, columns, rows), dtype=queries.dtype)
        torch.baddbmm(turned, keys, queries.transpose(1, 2), beta=0, alpha=scale, out=turned)
        return turned.transpose(1, 2)
    scores = torch.empty((heads, rows, columns), dtype=queries.dtype, device=queries.device)
    if half_on_cpu:
        # Head by head, because oneDNN's batched product transposes K slowly (1.7 times the time at 64 rows).
        for head in range(heads):
            torch.addmm(scores[head], queries[head], keys[head].t(), beta=0, alpha=scale, out=scores[head])
    else:
        torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0, alpha=scale, out=scores)
    return scores
