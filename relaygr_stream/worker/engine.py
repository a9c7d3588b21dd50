"""The device: runs a model's two operations, measures them, learns their cost. Used by the device thread alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.protocol import RankingModel, ScoreInput
from relaygr_stream.models.tokens import Tokens
from relaygr_stream.worker.costs import Costs

#: Prefix lengths of the warm-up: enough to fit both polynomials; the longest allowed prefix caps them.
WARMUP_TOKENS: Final = (64, 256, 512, 1024)
WARMUP_ROWS: Final = (16, 64, 128)


class Engine:
    """A model on its device, with measured costs."""

    def __init__(self, model: RankingModel, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.costs = Costs()

    def costs_of_prefix(self, tokens: int) -> float:
        """Predicted milliseconds of inferring a whole prefix."""
        return self.costs.prefix_ms(tokens)

    def extend(self, region: KVRegion, tokens: Tokens) -> float:
        """Append tokens to the region; returns the milliseconds it took, synchronised."""
        position, start = region.length, time.perf_counter()
        with torch.inference_mode():
            self.model.extend(region, tokens)
            self._synchronize()
        ms = (time.perf_counter() - start) * 1e3
        self.costs.extended(position, len(tokens), ms)
        return ms

    def score(self, batch: Sequence[ScoreInput]) -> tuple[list[npt.NDArray[np.float32]], float]:
        """Scores (candidates, tasks) of each ranking, on the host, and the milliseconds it took."""
        start = time.perf_counter()
        with torch.inference_mode():
            scores = [row.to("cpu", torch.float32).numpy() for row in self.model.score(batch)]
        ms = (time.perf_counter() - start) * 1e3
        if len(batch) == 1:
            one = batch[0]
            self.costs.scored(one.kv.length, len(one.suffix) + len(one.candidates), ms)
        return scores, ms

    def warm_up(self, region: KVRegion) -> None:
        """First-use costs (allocations, compilation) and a first fit of the costs, with `region` as scratch."""
        for n in dict.fromkeys(min(n, region.capacity) for n in WARMUP_TOKENS):
            tokens = Tokens(np.zeros((3, n), np.int64))
            for _ in range(2):
                region.length = 0
                self.extend(region, tokens)
            for rows in WARMUP_ROWS:
                self.score([ScoreInput(region, Tokens(np.zeros((3, 0), np.int64)), np.zeros(rows, np.int64))])
        region.length = 0
        # What ran so far paid for first uses: fit again from a second, warm round.
        self.costs = Costs()
        for n in dict.fromkeys(min(n, region.capacity) for n in WARMUP_TOKENS):
            half = Tokens(np.zeros((3, max(1, n // 2)), np.int64))
            region.length = 0
            self.extend(region, half)
            if region.length + len(half) <= region.capacity and self.model.incremental:
                self.extend(region, half)
            for rows in WARMUP_ROWS:
                self.score([ScoreInput(region, Tokens(np.zeros((3, 0), np.int64)), np.zeros(rows, np.int64))])
        region.length = 0

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
