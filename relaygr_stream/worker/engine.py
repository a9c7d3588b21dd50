"""The device: runs a model's two operations, measures them, learns their cost. Used by the device thread alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.errors import CapacityError, ModelError
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.protocol import RankingModel, ScoreInput
from relaygr_stream.models.tokens import Tokens
from relaygr_stream.worker.costs import MAX_CHUNK, MIN_CHUNK, Costs

T = TypeVar("T")

#: Prefix lengths of the warm-up: enough to fit both polynomials; the longest allowed prefix caps them.
WARMUP_TOKENS: Final = (64, 256, 512, 1024)
WARMUP_ROWS: Final = (16, 64, 128)
#: After the device ran out of memory chunks stay half as long; so many chunks later they may double again. At some
#: milliseconds each that is about a second: memory that others took is free again, or one more retry is paid.
CALM_CHUNKS: Final = 256

_NONE = Tokens(np.zeros((3, 0), np.int64))


class Engine:
    """A model on its device, with measured costs. clock: seconds, what operations are measured by.

    failures counts operations that failed for good, failed_in_a_row those since the last success.
    """

    def __init__(
        self, model: RankingModel, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.model = model
        self.device = device
        self._clock = clock
        self.costs = Costs()
        self.failures = 0
        self.failed_in_a_row = 0
        self.last_error = ""
        self.out_of_memory = 0
        self._longest = MAX_CHUNK
        self._calm = 0

    def costs_of_prefix(self, tokens: int) -> float:
        """Predicted milliseconds of inferring a whole prefix."""
        return self.costs.prefix_ms(tokens)

    def advance(self, region: KVRegion, tokens: Tokens, budget_ms: float) -> float:
        """Infer the next of `tokens` behind region.length, as many as budget_ms allows; returns the milliseconds.

        All of them where the model takes a sequence only whole. Out of memory: once more, with half as many. Raises
        what the model raises, ModelError if it did not append what it was given; region.length is then as before.
        """
        position = region.length
        count = len(tokens) - position
        if self.model.incremental:
            count = min(count, self.costs.chunk(position, budget_ms), self._longest)

        def again() -> float:
            half = count
            if self.model.incremental:
                self._longest = max(MIN_CHUNK, count // 2)
                half = min(count, self._longest)
            return self._extend(region, tokens.slice(position, position + half))

        return self._run(lambda: self._extend(region, tokens.slice(position, position + count)), again)

    def score(self, batch: Sequence[ScoreInput]) -> tuple[list[npt.NDArray[np.float32]], float]:
        """Scores (candidates, tasks) of each ranking, on the host, and the milliseconds it took.

        Out of memory: a single ranking is tried once more, a batch is left to the caller to take apart. Raises what
        the model raises, ModelError if its scores have other shapes.
        """
        return self._run(lambda: self._score(batch), None if len(batch) > 1 else lambda: self._score(batch))

    def warm_up(self, region: KVRegion) -> None:
        """First-use costs (allocations, compilation) and a first fit of the costs, with `region` as scratch.

        Raises CapacityError when the device has no memory for it beside the tiers.
        """
        try:
            self._warm_round(region, times=2)
            self.costs = Costs()  # what ran so far paid for first uses: fit again from a second, warm round
            self._warm_round(region, times=1)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{self.device} has no memory left for inference beside worker.hbm_bytes: lower that "
                f"({str(error).splitlines()[0]})"
            ) from error

    def _warm_round(self, region: KVRegion, times: int) -> None:
        for n in dict.fromkeys(min(n, region.capacity) for n in WARMUP_TOKENS):
            tokens = Tokens(np.zeros((3, n), np.int64))
            # Halves, so that extensions are among what is learnt; a whole where the model takes nothing else.
            stops = (n // 2, n) if self.model.incremental else (n,)
            for _ in range(times):
                region.length = 0
                for stop in stops:
                    self._extend(region, tokens.slice(region.length, stop))
            for rows in WARMUP_ROWS:
                self._score([ScoreInput(region, _NONE, np.zeros(rows, np.int64))])
        region.length = 0

    def _extend(self, region: KVRegion, tokens: Tokens) -> float:
        position, start = region.length, self._clock()
        try:
            with torch.inference_mode():
                self.model.extend(region, tokens)
                self._synchronize()
            if region.length != position + len(tokens):
                raise ModelError(
                    f"extend() was given {len(tokens)} tokens behind {position} and left kv.length at {region.length}"
                )
        except Exception:
            region.length = position
            raise
        ms = (self._clock() - start) * 1e3
        self.costs.extended(position, len(tokens), ms)
        self._calm += 1
        if self._calm >= CALM_CHUNKS:
            self._calm, self._longest = 0, min(MAX_CHUNK, 2 * self._longest)
        return ms

    def _score(self, batch: Sequence[ScoreInput]) -> tuple[list[npt.NDArray[np.float32]], float]:
        start = self._clock()
        with torch.inference_mode():
            scores = [row.to("cpu", torch.float32).numpy() for row in self.model.score(batch)]
        ms = (self._clock() - start) * 1e3
        expected = [(len(one.candidates), len(self.model.tasks)) for one in batch]
        if [row.shape for row in scores] != expected:
            raise ModelError(f"score() returned shapes {[row.shape for row in scores]}, expected {expected}")
        if len(batch) == 1:
            one = batch[0]
            self.costs.scored(one.kv.length, len(one.suffix) + len(one.candidates), ms)
        return scores, ms

    def _run(self, operation: Callable[[], T], again: Callable[[], T] | None) -> T:
        """Run and count; where memory ran out, do `again`, if there is that, after giving cached blocks back.

        The tiers are no help there: each is one allocation, for good.
        """
        try:
            short_of_memory = False
            try:
                result = operation()
            except torch.OutOfMemoryError:
                self.out_of_memory += 1
                self._calm = 0
                if again is None:
                    raise
                short_of_memory = True
            if short_of_memory and again is not None:
                # Not in the handler: the error's traceback keeps alive what the operation had allocated.
                if self.device.type != "cpu":
                    torch.accelerator.empty_cache()
                result = again()
        except Exception as error:
            self.failures += 1
            self.failed_in_a_row += 1
            self.last_error = describe(error)
            raise
        self.failed_in_a_row = 0
        return result

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def describe(error: Exception) -> str:
    """An error as text. What fails on a device is not kept as an exception, which keeps the device's memory too."""
    return f"{type(error).__name__}: {error}"
