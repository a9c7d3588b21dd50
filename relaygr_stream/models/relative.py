"""A bias of attention on how far apart two tokens are, in positions and in time, for all heads of a layer alike.

    bias(i, j) = relative_position[min(i - j, P - 1)] + relative_time[min(⌊ln max(t(i) - t(j), 1) / 0.301⌋, T - 1)]

P and T are the lengths of a layer's two tables, times are in milliseconds. As the class
RelativeBucketedTimeAndPositionBasedBias of meta-recsys/generative-recommenders, with two differences. There the time is
t(i+1) - t(j), so a prefix's last row would change with the next behaviour. And a candidate, which is not there, has the
position behind the history and the time of the newest behaviour: nothing of a request says when it is asked.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from relaygr_stream.models.attention import Block
    from relaygr_stream.models.stu import StackConfig, STULayer

#: The logarithm of a bucket's width, as in the reference: a bucket ends 1.35 times as late as it starts.
BUCKET_LOG: Final = 0.301
#: With 128 buckets the last starts at e^(127 · 0.301) ms, over a thousand years. More would never be used.
MOST_BUCKETS: Final = 128


def time_buckets(apart: torch.Tensor, count: int) -> torch.Tensor:
    """The bucket of each time in milliseconds, int64; the same on every device, since it compares integers."""
    return torch.bucketize(apart, _starts(count).to(apart.device), right=True)


@cache
def _starts(count: int) -> torch.Tensor:
    """The first millisecond of the buckets 1 … count - 1. Buckets without any integer start as the next one does."""
    return torch.tensor([math.ceil(math.exp(BUCKET_LOG * bucket)) for bucket in range(1, count)], dtype=torch.int64)


class Places:
    """Where the rows and the columns of one attention stand: positions, and times if a layer compares them.

    positions: those of the first row and the first column; rows past `behaviours` are candidates, which all stand where
    the first one does. times: of the rows and of the columns (rows,) and (columns,), int64.
    """

    def __init__(
        self,
        positions: tuple[int, int],
        behaviours: int,
        device: torch.device,
        times: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self._positions = positions
        self._behaviours = behaviours
        self._device = device
        self._times = times

    def bias(self, layer: STULayer) -> LayerBias | None:
        """The bias of one layer; None if the layer has none."""
        if layer.relative_position is None and layer.relative_time is None:
            return None
        return LayerBias(self, layer)

    def of_positions(self, block: Block, table: torch.Tensor) -> torch.Tensor:
        """`table` at the distances of the block's pairs (rows, columns). All candidates share one row, the last.

        Distances are alike along a diagonal, so every row is a window of one strip: a copy, not a gather for each pair.
        """
        (row, column), (start, stop), width = self._positions, self._distinct(block), block.col_stop - block.col_start
        nearest = row + min(start, self._behaviours) - (column + block.col_start) - width + 1
        distances = torch.arange(nearest + stop - start + width - 2, nearest - 1, -1, device=self._device)
        strip = table[distances.clamp_(0, len(table) - 1)]
        return strip.unfold(0, width, 1).flip(0)

    def of_times(self, block: Block, table: torch.Tensor) -> torch.Tensor:
        """`table` at the buckets of times of the block's pairs, as `of_positions`."""
        assert self._times is not None, "a layer compares times, and none are given"
        (start, stop), (ours, theirs) = self._distinct(block), self._times
        return table[time_buckets(ours[start:stop, None] - theirs[block.col_start : block.col_stop], len(table))]

    def _distinct(self, block: Block) -> tuple[int, int]:
        """The block's rows of behaviours, and one for its candidates."""
        return block.row_start, min(block.row_stop, max(block.row_start, self._behaviours) + 1)


class LayerBias:
    """The bias of one layer over the rows and columns of one attention."""

    def __init__(self, places: Places, layer: STULayer) -> None:
        self._places = places
        self._layer = layer

    def values(self, block: Block) -> torch.Tensor:
        """(rows, columns) of the block, or (1, columns) for candidates. Values of invisible pairs mean nothing."""
        parts = []
        if self._layer.relative_position is not None:
            parts.append(self._places.of_positions(block, self._layer.relative_position))
        if self._layer.relative_time is not None:
            parts.append(self._places.of_times(block, self._layer.relative_time))
        found = _sum(parts)
        missing = block.row_stop - block.row_start - len(found)
        if not missing or len(found) == 1:
            return found
        return torch.cat([found, found[-1:].expand(missing, -1)])


def own_bias(layer: STULayer) -> torch.Tensor | None:
    """The bias between a token and itself; None if the layer has none."""
    own = [table[0] for table in (layer.relative_position, layer.relative_time) if table is not None]
    return _sum(own) if own else None


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def is_relative(config: StackConfig) -> bool:
    """Whether a stack of this shape has such a bias."""
    return bool(config.relative_positions or config.relative_times)
