"""What lies before and behind the layers: the embedding of behaviours and candidates, and the multi-task head.

A behaviour's vector is item + action + position + gap; a candidate's is item + position + a candidate vector. All parts
of a behaviour's vector are known when it happens and never change: the position counts from the start of the sequence,
and the gap is the time since the behaviour before. Otherwise a new behaviour would change the whole prefix.

An item id in [0, vocab) has a row of its own. Every other id is unknown, and has one of `oov_rows` rows behind those:

    z = id as an unsigned 64-bit number
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb     all modulo 2^64: the finalizer of SplitMix64
    row = vocab + (z ^ (z >> 31)) % oov_rows

Without such rows (oov_rows = 0) an unknown id shares the row id mod vocab with a known item.

With features (features.py), those of a behaviour are added to its vector, those of a candidate and of candidate × user
to the candidate's. The user's are one token before the first behaviour: their sum and a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from relaygr_stream.models.api import ROWS, Tokens
from relaygr_stream.models.features import FeatureEmbedding, oov_hash
from relaygr_stream.models.mapped import ItemEmbedding, MappedTable
from relaygr_stream.models.stu import NORM_EPS
from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema, Values

#: Action types: one byte on the wire.
ACTIONS: Final = 256
#: Bucket 0: no gap. Bucket b: 2^(b-1) ≤ gap < 2^b milliseconds. The last bucket starts at 2^41 ms, 70 years.
GAP_BUCKETS: Final = 43

#: One ranking to embed: suffix behaviours, the position of the first behaviour, candidate item ids.
RankingTokens = tuple[Tokens, int, npt.NDArray[np.int64]]


def gap_buckets(gaps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Logarithmic buckets of gaps in milliseconds, elementwise; bucket 0 for a gap that is not positive."""
    # frexp's exponent is exactly 1 + floor(log2(gap)); a logarithm would round at powers of two.
    exponents = np.frexp(np.maximum(gaps, 0).astype(np.float64))[1]
    return np.minimum(exponents, GAP_BUCKETS - 1).astype(np.int64)


class TokenEmbedding(ItemEmbedding):
    """The embedding tables. Positions from max_positions on share the last row. With a mapped item table there is no
    `item`."""

    def __init__(
        self,
        dim: int,
        vocab: int,
        max_positions: int,
        oov_rows: int = 0,
        schema: FeatureSchema = NO_FEATURES,
        table: MappedTable | None = None,
    ) -> None:
        super().__init__(table)
        self.features = FeatureEmbedding(schema, dim) if schema else None
        self.vocab = vocab
        self.oov_rows = oov_rows
        self.max_positions = max_positions
        if table is None:
            self.item = nn.Parameter(torch.empty(vocab + oov_rows, dim), requires_grad=False)
        self.action = nn.Parameter(torch.empty(ACTIONS, dim), requires_grad=False)
        self.position = nn.Parameter(torch.empty(max_positions, dim), requires_grad=False)
        self.gap = nn.Parameter(torch.empty(GAP_BUCKETS, dim), requires_grad=False)
        self.candidate = nn.Parameter(torch.empty(dim), requires_grad=False)

    @torch.no_grad()
    def behaviours(self, tokens: Tokens, first: int) -> torch.Tensor:
        """Vectors (n, D) of behaviours at positions first, first + 1, …, with one copy to the device."""
        rows = np.empty((4, len(tokens)), np.int64)
        self._fill(rows, tokens, first)
        index = self._to_device(rows)
        x = self._items_and_positions(index, rows)
        self._add_behaviours(x, index, tokens)
        return x

    @torch.no_grad()
    def rankings(self, batch: Sequence[RankingTokens], features: Sequence[Values] = ()) -> torch.Tensor:
        """Vectors (Σ suffix + candidates, D): each ranking's suffix, then its candidates.

        All candidates of a ranking have the position behind its suffix. features: of each ranking's candidates.
        """
        rows, bounds = self.ranking_rows(batch)
        index = self._to_device(rows)
        x = self._items_and_positions(index, rows)
        for number, (start, middle, stop) in enumerate(bounds):
            if middle > start:
                self._add_behaviours(x[start:middle], index[:, start:middle], batch[number][0])
            x[middle:stop] += self.candidate
            if self.features is not None:
                x[middle:stop] += self.features("candidate", features[number], stop - middle)
        return x

    def ranking_rows(self, batch: Sequence[RankingTokens]) -> tuple[npt.NDArray[np.int64], list[tuple[int, int, int]]]:
        """Indices (4, n) into the tables (item, position, action, gap), and each ranking's (start, middle, stop).

        A ranking's suffix is start:middle, its candidates are middle:stop. Candidates have action 0 and gap 0.
        """
        rows = np.zeros((4, sum(len(suffix) + len(candidates) for suffix, _, candidates in batch)), np.int64)
        bounds: list[tuple[int, int, int]] = []
        start = 0
        for suffix, first, candidates in batch:
            middle, stop = start + len(suffix), start + len(suffix) + len(candidates)
            self._fill(rows[:, start:middle], suffix, first)
            self._fill_items(rows[0, middle:stop], candidates)
            rows[1, middle:stop] = min(first + len(suffix), self.max_positions - 1)
            bounds.append((start, middle, stop))
            start = stop
        return rows, bounds

    def _fill(self, rows: npt.NDArray[np.int64], tokens: Tokens, first: int) -> None:
        items, actions, gaps = tokens.array[:ROWS]
        self._fill_items(rows[0], items)
        np.minimum(np.arange(first, first + len(tokens)), self.max_positions - 1, out=rows[1])
        np.remainder(actions, ACTIONS, out=rows[2])  # an index past the table would crash an accelerator
        rows[3] = gap_buckets(gaps)

    def _fill_items(self, rows: npt.NDArray[np.int64], items: npt.NDArray[np.int64]) -> None:
        rows[:] = items
        unknown = np.flatnonzero(rows.view(np.uint64) >= self.vocab)  # a negative id is a large unsigned one
        if len(unknown):
            self.unknown_items += len(unknown)
            ids = rows[unknown]
            rows[unknown] = ids % self.vocab if not self.oov_rows else self.vocab + oov_hash(ids) % self.oov_rows

    def _to_device(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(rows).to(self.position.device, non_blocking=True)

    # The order of these sums is part of the model: in half precision another order gives another vector, and a
    # behaviour must have the same vector in a prefix and in a suffix.
    def _items_and_positions(self, index: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        items = self.item.index_select(0, index[0]) if self.table is None else self.table.rows(rows[0])
        return items.add_(self.position.index_select(0, index[1]))

    def _add_behaviours(self, x: torch.Tensor, index: torch.Tensor, tokens: Tokens) -> None:
        x.add_(self.action.index_select(0, index[2])).add_(self.gap.index_select(0, index[3]))
        if self.features is None:
            return
        schema, context, count = self.features.schema, tokens.context, len(tokens)
        behaviours = tokens.slice(context, count)
        x[context:] += self.features("behaviour", behaviours.features("behaviour", schema), count - context)
        if context:
            user = tokens.slice(0, 1).features("user", schema)
            x[:1] = self.position.index_select(0, index[1, :1]) + self.features("user", user, 1)


class TaskHead(nn.Module):
    """The multi-task head: LayerNorm and one linear layer, one logit per task. float32 for a stack of any type."""

    def __init__(self, dim: int, tasks: int) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.norm_bias = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.weight = nn.Parameter(torch.empty(dim, tasks), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(tasks), requires_grad=False)

    @torch.no_grad()
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The stack's outputs x (m, D) of any floating type → logits (m, tasks) in float32."""
        normed = functional.layer_norm(x.float(), x.shape[-1:], self.norm_weight, self.norm_bias, NORM_EPS)
        return torch.addmm(self.bias, normed, self.weight)


# Row counts are rounded up to multiples of FEW_STEP up to FEW_ROWS, of MANY_STEP above: at most 31 or 127 unused rows,
# and 44 different counts up to 4,096.
FEW_ROWS: Final = 512
FEW_STEP: Final = 32
MANY_STEP: Final = 128


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """x (n, D) with rows of zeros behind it, up to one of few row counts; x itself if nothing is compiled per shape.

    oneDNN compiles a product for each new number of rows, which takes about a hundred times as long as the product
    (2–9 ms in bfloat16). Requests have any number of rows, so they are padded.
    """
    if not compiles_per_shape(x):
        return x
    step = FEW_STEP if len(x) <= FEW_ROWS else MANY_STEP
    return functional.pad(x, (0, 0, 0, -len(x) % step))


def compiles_per_shape(x: torch.Tensor) -> bool:
    """Whether products with x are compiled for each number of rows, as oneDNN does in half precision."""
    return x.device.type == "cpu" and x.dtype != torch.float32
