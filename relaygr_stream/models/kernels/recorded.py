"""Scoring and short prefills through recorded graphs (graphs.py), so that the device does not wait for launches.

A layer has about ten launches, each shorter than the host takes to issue it unless thousands of rows are computed. A
recorded graph issues all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.models.api import Tokens
from relaygr_stream.models.embeddings import ACTIONS, GAP_BUCKETS, RankingTokens, TaskHead, TokenEmbedding
from relaygr_stream.models.hstu import HSTUStack
from relaygr_stream.models.kernels.graphs import Graphs, Recorder, Results
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.stu import RankingRows

#: Most tokens of a recorded prefill: the longest chunk (engine/cost_model.py).
MAX_PREFILL: Final = 4096
#: Most operations of a recorded prefill, products and attention: 2 to 4 ms on an H100. float32 has no tensor cores.
PREFILL_FLOPS: Final = {torch.float32: 1e11, torch.bfloat16: 1e12, torch.float16: 1e12}
#: Longest replay of a recorded prefill, which is one step: a tenth of the usual SLO. A slower device than an H100
#: exceeds it below PREFILL_FLOPS.
MAX_PREFILL_MS: Final = 5.0
#: Largest deviation of a replay from the direct computation, relative to the largest logit, or element of K and V:
#: libraries may choose another algorithm while recording. In half precision it allows a few roundings of the last
#: layer's output.
LIMITS: Final = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class RowEmbedding:
    """`TokenEmbedding.rankings` in two steps: indices on the host, sums on the device.

    It copies the two small tables, so it must be created after the weights are placed.
    """

    def __init__(self, embedding: TokenEmbedding) -> None:
        self._embedding = embedding
        self._action = torch.cat([embedding.action, embedding.candidate[None]])
        self._gap = torch.cat([embedding.gap, torch.zeros_like(embedding.gap[:1])])

    def rows(self, batch: Sequence[RankingTokens]) -> npt.NDArray[np.int64]:
        """Indices (4, n) into the tables: item, position, action, gap."""
        rows, bounds = self._embedding.ranking_rows(batch)
        for _, middle, stop in bounds:
            rows[2, middle:stop] = ACTIONS
            rows[3, middle:stop] = GAP_BUCKETS
        return rows

    def embed(self, rows: torch.Tensor) -> torch.Tensor:
        """Vectors (n, D) for indices (4, n) on the device."""
        x = self._embedding.item.index_select(0, rows[0]).add_(self._embedding.position.index_select(0, rows[1]))
        return x.add_(self._action.index_select(0, rows[2])).add_(self._gap.index_select(0, rows[3]))


class RecordedModel:
    """Whole calls of a placed model through recordings: scoring, from indices to logits, and short prefills.

    The stack must have fused layers, because their launches fit any batch.
    """

    def __init__(self, embedding: TokenEmbedding, stack: HSTUStack, head: TaskHead, recorder: Recorder) -> None:
        assert stack.fused is not None
        self._fused = stack.fused
        self._layers = stack.stu_layers()
        self._tables = embedding
        self._embedding = RowEmbedding(embedding)
        self._head = head
        device, dtype = embedding.item.device, embedding.item.dtype
        both: list[Graphs] = []
        self._scores = Graphs("scoring", self._logits, recorder, device, LIMITS[dtype], both)
        self._prefills = Graphs(
            "prefill", self._append, recorder, device, LIMITS[dtype], both, most_rows=MAX_PREFILL,
            longest_ms=MAX_PREFILL_MS,
        )  # fmt: skip
        config = stack.config
        self._token_flops = 2 * sum(weight.numel() for weight in stack.parameters())
        self._pair_flops = 2 * config.layers * config.heads * (config.dqk + config.dv)
        self._most_flops = PREFILL_FLOPS[dtype]

    def logits(self, tokens: Sequence[RankingTokens], batch: Sequence[RankingRows]) -> torch.Tensor | None:
        """Logits (n, tasks) of all rows of a batch, suffix rows included; None if there is no recording for it."""
        count = sum(one.suffix + one.candidates for one in batch)
        output = self._run(self._scores, tokens, batch, lambda output: [output[:count]])
        # Graphs share memory: the next replay overwrites this output.
        return None if output is None else output[:count].clone()

    def prefill(self, kv: KVRegion, tokens: Tokens) -> bool:
        """Append the K/V of `tokens`, which fit, and advance kv.length; False, and nothing done, without a recording.

        Long prefills have none: they go layer by layer, so that a ranking may come between.
        """
        start, count = kv.length, len(tokens)
        flops = count * (self._token_flops + self._pair_flops * (start + count / 2))
        if not count or flops > self._most_flops:
            return False

        def written(_: torch.Tensor) -> list[torch.Tensor]:
            return [part[:, start : start + count] for index in range(len(self._layers)) for part in kv.layer(index)]

        sequence, batch = (tokens, start, np.zeros(0, np.int64)), [RankingRows(kv, count, 0)]
        if self._run(self._prefills, [sequence], batch, written) is None:
            return False
        kv.length += count
        return True

    def _run(
        self, graphs: Graphs, tokens: Sequence[RankingTokens], batch: Sequence[RankingRows], results: Results
    ) -> torch.Tensor | None:
        if not graphs.on:
            return None
        unknown, output = self._tables.unknown_items, None
        try:
            output = graphs.run(self._embedding.rows(tokens), self._fused.table(batch), results)
            return output
        finally:
            if output is None:  # the caller embeds the same rows, and counts them
                self._tables.unknown_items = unknown

    def _logits(self, rows: torch.Tensor, tiles: torch.Tensor, split: bool) -> torch.Tensor:
        x = self._embedding.embed(rows)
        return self._head.logits(self._fused.run(self._layers, x, tiles, split=split))

    def _append(self, rows: torch.Tensor, tiles: torch.Tensor, split: bool) -> torch.Tensor:
        self._fused.append(self._layers, self._embedding.embed(rows), tiles, split=split)
        return rows[:1, :1].float()  # the results stand in the region; a recording keeps its output's memory
