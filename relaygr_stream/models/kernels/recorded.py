"""A whole scoring call, from table rows to logits, as one recording per bucket of sizes (graphs.py).

Knows nothing of how launches are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from relaygr_stream.models.embeddings import RankingTokens, TokenEmbedding
from relaygr_stream.models.head import TaskHead
from relaygr_stream.models.hstu import HSTUStack, RankingRows
from relaygr_stream.models.kernels.graphs import LIMITS, Recorder, ScoreGraphs
from relaygr_stream.models.kernels.row_embedding import RowEmbedding


class RecordedScores:
    """Embedding, stack and head of a placed model, replayed. The stack is a fused one: its launches fit any batch."""

    def __init__(self, embedding: TokenEmbedding, stack: HSTUStack, head: TaskHead, recorder: Recorder) -> None:
        assert stack.fused is not None
        self._fused = stack.fused
        self._layers = stack.stu_layers()
        self._embedding = RowEmbedding(embedding)
        self._head = head
        weights = embedding.item
        self._graphs = ScoreGraphs(self._logits, recorder, weights.device, LIMITS[weights.dtype])

    def logits(self, tokens: Sequence[RankingTokens], batch: Sequence[RankingRows]) -> torch.Tensor | None:
        """Logits (n, tasks) of all rows of a batch, suffix rows among them; None where no recording serves."""
        if not self._graphs.on:
            return None
        return self._graphs.score(self._embedding.rows(tokens), self._fused.table(batch))

    def _logits(self, rows: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        x = self._embedding.embed(rows)
        return self._head.logits(self._fused.run(self._layers, x, tiles, split=True))
