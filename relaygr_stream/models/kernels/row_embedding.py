"""Embedding a batch of rankings without a loop over them, so that the launches are the same for any batch.

What a candidate adds stands as one more row of the action table, beside a gap that adds nothing: the same sums in the
same order as `TokenEmbedding`, so the same bits. Knows nothing of layers or graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.models.embeddings import ACTIONS, GAP_BUCKETS, RankingTokens, TokenEmbedding


class RowEmbedding:
    """`TokenEmbedding.rankings` in two steps. Holds copies of the two small tables: made after weights are placed."""

    def __init__(self, embedding: TokenEmbedding) -> None:
        self._embedding = embedding
        self._action = torch.cat([embedding.action, embedding.candidate[None]])
        self._gap = torch.cat([embedding.gap, torch.zeros_like(embedding.gap[:1])])

    def rows(self, batch: Sequence[RankingTokens]) -> npt.NDArray[np.int64]:
        """Rows of the tables (4, n): item, position, action, gap."""
        rows, bounds = self._embedding.ranking_rows(batch)
        for _, middle, stop in bounds:
            rows[2, middle:stop] = ACTIONS
            rows[3, middle:stop] = GAP_BUCKETS
        return rows

    def embed(self, rows: torch.Tensor) -> torch.Tensor:
        """Vectors (n, D) of rows on the device."""
        x = self._embedding.item.index_select(0, rows[0]).add_(self._embedding.position.index_select(0, rows[1]))
        return x.add_(self._action.index_select(0, rows[2])).add_(self._gap.index_select(0, rows[3]))
