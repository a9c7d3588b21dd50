"""Behaviours and candidates as vectors: item + action + position + gap, and item + position + "is a candidate".

Everything that enters a behaviour's vector is known when it happens and never changes again: its position counts from
the start of the sequence, its time feature is the gap to the behaviour before it. Otherwise a new behaviour would
change the whole prefix (DESIGN §8). Knows nothing of attention or K/V.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from relaygr_stream.models.api import Tokens
from relaygr_stream.models.stu import NORM_EPS

#: Action types are one byte on the wire.
ACTIONS: Final = 256
#: Bucket 0: no gap; bucket b: 2^(b-1) ≤ gap < 2^b milliseconds. The last is from 2^41 ms, 70 years, on.
GAP_BUCKETS: Final = 43

#: One ranking to embed: suffix behaviours, the position of the first of them, candidate item ids.
RankingTokens = tuple[Tokens, int, npt.NDArray[np.int64]]


def gap_buckets(gaps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Logarithmic buckets of gaps in milliseconds; a gap that is not positive is bucket 0."""
    # frexp's exponent is 1 + floor(log2(gap)), without the rounding of a logarithm at powers of two.
    exponents = np.frexp(np.maximum(gaps, 0).astype(np.float64))[1]
    return np.minimum(exponents, GAP_BUCKETS - 1).astype(np.int64)


class TokenEmbedding(nn.Module):
    """The tables. Item ids are taken modulo vocab; positions from max_positions on share the last row."""

    def __init__(self, dim: int, vocab: int, max_positions: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.max_positions = max_positions
        self.item = nn.Parameter(torch.empty(vocab, dim), requires_grad=False)
        self.action = nn.Parameter(torch.empty(ACTIONS, dim), requires_grad=False)
        self.position = nn.Parameter(torch.empty(max_positions, dim), requires_grad=False)
        self.gap = nn.Parameter(torch.empty(GAP_BUCKETS, dim), requires_grad=False)
        self.candidate = nn.Parameter(torch.empty(dim), requires_grad=False)

    @torch.no_grad()
    def behaviours(self, tokens: Tokens, first: int) -> torch.Tensor:
        """Vectors (n, D) of behaviours at positions first, first + 1, …; one copy to the device."""
        rows = np.empty((4, len(tokens)), np.int64)
        self._fill(rows, tokens, first)
        index = self._to_device(rows)
        x = self._items_and_positions(index)
        self._add_behaviours(x, index)
        return x

    @torch.no_grad()
    def rankings(self, batch: Sequence[RankingTokens]) -> torch.Tensor:
        """Vectors of each ranking's suffix, then its candidates (which all stand at the position behind the suffix)."""
        rows, bounds = self.ranking_rows(batch)
        index = self._to_device(rows)
        x = self._items_and_positions(index)
        for start, middle, stop in bounds:
            if middle > start:
                self._add_behaviours(x[start:middle], index[:, start:middle])
            x[middle:stop] += self.candidate
        return x

    def ranking_rows(self, batch: Sequence[RankingTokens]) -> tuple[npt.NDArray[np.int64], list[tuple[int, int, int]]]:
        """Rows of the tables (item, position, action, gap) × tokens, and each ranking's bounds: suffix | candidates.

        Actions and gaps of candidates are 0.
        """
        rows = np.zeros((4, sum(len(suffix) + len(candidates) for suffix, _, candidates in batch)), np.int64)
        bounds: list[tuple[int, int, int]] = []
        start = 0
        for suffix, first, candidates in batch:
            middle, stop = start + len(suffix), start + len(suffix) + len(candidates)
            self._fill(rows[:, start:middle], suffix, first)
            np.remainder(candidates, self.vocab, out=rows[0, middle:stop])
            rows[1, middle:stop] = min(first + len(suffix), self.max_positions - 1)
            bounds.append((start, middle, stop))
            start = stop
        return rows, bounds

    def _fill(self, rows: npt.NDArray[np.int64], tokens: Tokens, first: int) -> None:
        items, actions, gaps = tokens.array
        np.remainder(items, self.vocab, out=rows[0])
        np.minimum(np.arange(first, first + len(tokens)), self.max_positions - 1, out=rows[1])
        np.remainder(actions, ACTIONS, out=rows[2])  # an index past the table would take an accelerator down
        rows[3] = gap_buckets(gaps)

    def _to_device(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(rows).to(self.item.device, non_blocking=True)

    # The order of these sums is part of the model: in half precision another order gives other vectors, and a
    # behaviour must mean the same in a prefix and in a suffix.
    def _items_and_positions(self, index: torch.Tensor) -> torch.Tensor:
        return self.item.index_select(0, index[0]).add_(self.position.index_select(0, index[1]))

    def _add_behaviours(self, x: torch.Tensor, index: torch.Tensor) -> None:
        x.add_(self.action.index_select(0, index[2])).add_(self.gap.index_select(0, index[3]))


# The multi-task head: the stack's output of a candidate → one logit per task. float32, whatever the stack runs in.


class TaskHead(nn.Module):
    """LayerNorm and one linear layer; its weights stay float32."""

    def __init__(self, dim: int, tasks: int) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.norm_bias = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.weight = nn.Parameter(torch.empty(dim, tasks), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(tasks), requires_grad=False)

    @torch.no_grad()
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x (m, D) of any floating type → (m, tasks) float32."""
        normed = functional.layer_norm(x.float(), x.shape[-1:], self.norm_weight, self.norm_bias, NORM_EPS)
        return torch.addmm(self.bias, normed, self.weight)


# Numbers of rows that come often: what has to be compiled per shape is compiled seldom. Knows nothing of layers.


#: At most 31 rows are computed in vain up to 512, 127 above; 44 sizes up to 4,096.
FEW_ROWS: Final = 512
FEW_STEP: Final = 32
MANY_STEP: Final = 128


def with_usual_rows(x: torch.Tensor) -> torch.Tensor:
    """x, with rows of zeros behind it up to a number of rows that comes often.

    oneDNN compiles a product for each number of rows it meets: measured 2–9 ms in bfloat16, a hundred times what the
    product takes. Requests have any number of rows, so they are rounded up: to 32, from 512 on to 128.
    """
    if not compiles_per_shape(x):
        return x
    step = FEW_STEP if len(x) <= FEW_ROWS else MANY_STEP
    return functional.pad(x, (0, 0, 0, -len(x) % step))


def compiles_per_shape(x: torch.Tensor) -> bool:
    """Whether products with x are compiled for each number of rows: oneDNN's in half precision."""
    return x.device.type == "cpu" and x.dtype != torch.float32
