"""DlrmHSTU behind the model protocol: its tokens and head (embedding.py) around the layers of the built-in HSTU.

Where a part of the checkpoint ties prefix KV to one request (`DlrmConfig.breaks`), the model is not incremental, and
the request states its query time and number of candidates in the features of the user. They are part of what the cache
compares, so prefix KV serve that request alone; the region's state keeps them for the ranking.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np
import torch

from relaygr_stream.errors import ModelError
from relaygr_stream.models.api import ScoreInput, Tokens
from relaygr_stream.models.built_in import StackedModel
from relaygr_stream.models.dlrm.config import CANDIDATE_CATEGORY, CANDIDATE_TIME, DlrmConfig
from relaygr_stream.models.dlrm.embedding import DlrmEmbedding, DlrmHead, StatedQuery
from relaygr_stream.models.hstu import HSTUStack
from relaygr_stream.models.kernels.choice import fused_stack
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.mapped import MappedTable
from relaygr_stream.models.stu import RankingRows
from relaygr_stream.settings import Kernels
from relaygr_stream.wire.features import FeatureSchema


class DlrmHSTU(StackedModel):
    """DlrmHSTU as a `RankingModel`."""

    config: DlrmConfig
    embedding: DlrmEmbedding

    def __init__(self, config: DlrmConfig, table: MappedTable | None = None) -> None:
        super().__init__(config, DlrmEmbedding(config, table), FeatureSchema(config.features))
        self.stack = HSTUStack(config.stack)
        self.head = DlrmHead(config)
        self.incremental = config.incremental

    def place(self, device: torch.device, dtype: torch.dtype, kernels: Kernels = "auto") -> Self:
        """As of all families. A scale of each request (scale_tokens = 0) is computed by torch operators alone."""
        if not self.config.scale_tokens:
            if kernels not in ("auto", "torch"):
                raise ModelError(
                    f'worker.kernels = "{kernels}", but N is each request\'s own, which only torch operators compute; '
                    f'import the model with --scale-tokens, or set it to "auto"'
                )
            kernels = "torch"
        self._place_embedding(device, dtype)
        self.stack.place(device, dtype, kernels)
        self.stack.fused = fused_stack(self.config.stack, device, dtype, kernels)
        self.head.to(device=device)
        return self

    @torch.no_grad()
    def _steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        if kv.length and not self.incremental:
            raise ModelError(
                f"prefix KV of this model serve one request ({self.config.breaks()[0]}), so a prefix is computed in "
                f"one call, but the region holds {kv.length} tokens already"
            )
        first, stated = kv.length, self.embedding.stated_in(tokens)
        history = first + len(tokens) - 1 if first or tokens.context else len(tokens)
        x = self.embedding(self.embedding.token_rows(tokens, first, history, stated))
        yield from self.stack.append_in_steps(kv, x, scale_tokens=self._scale_tokens(len(tokens), stated.candidates))
        if self.layout.state:
            kv.state.copy_(torch.tensor(stated, dtype=torch.int64).view(torch.uint8))

    @torch.no_grad()
    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        """Logits of each ranking, float32 (m_i, tasks). Raises ModelError for a suffix if `incremental` is False."""
        if not batch:
            return []
        if not self.incremental and any(len(one.suffix) for one in batch):
            raise ModelError("prefix KV of this model serve one request, whose whole history is the prefix: no suffix")
        parts, rankings = [], []
        for one, stated in zip(batch, self._stated_of(batch), strict=True):
            history = one.kv.length + len(one.suffix) - 1
            parts.append(self.embedding.token_rows(one.suffix, one.kv.length, history, stated))
            categories, times = (one.features[each.name][:, 0] for each in (CANDIDATE_CATEGORY, CANDIDATE_TIME))
            parts.append(self.embedding.candidate_rows(one.candidates, categories, times, stated.query_time))
            scale = self._scale_tokens(one.kv.length, stated.candidates)
            rankings.append(RankingRows(one.kv, len(one.suffix), len(one.candidates), scale_tokens=scale))
        out = self.stack.score(rankings, self.embedding(np.concatenate(parts, axis=1)))
        of_candidates = torch.cat(torch.split(out, [part.shape[1] for part in parts])[1::2])
        times = np.concatenate([one.features[CANDIDATE_TIME.name][:, 0] for one in batch])
        user = self.head.user_side(of_candidates, times)
        item: torch.Tensor = self.head.item(self.embedding.items_of(np.concatenate(parts[1::2], axis=1)))
        return list(torch.split(self.head.logits(user, item), [one.candidates for one in rankings]))

    def _scale_tokens(self, tokens: int, candidates: int) -> int:
        """N of a request with these tokens, the user's among them; 0: the constant of the stack."""
        return 0 if self.config.scale_tokens else max(1, tokens + candidates)

    def _stated_of(self, batch: Sequence[ScoreInput]) -> list[StatedQuery]:
        """What each ranking's prefix states; without a prefix, what its candidates say. One copy from the device."""
        if not self.layout.state:
            return [StatedQuery()] * len(batch)
        states = torch.stack([one.kv.state if one.kv.length else torch.zeros_like(one.kv.state) for one in batch]).cpu()
        found = [StatedQuery(*state.tolist()) for state in states.to(torch.uint8).view(torch.int64)]
        return [
            stated if one.kv.length else StatedQuery(int(one.features[CANDIDATE_TIME.name][-1, 0]), len(one.candidates))
            for one, stated in zip(batch, found, strict=True)
        ]
