"""The device: runs a model's two operations, measures them, learns their cost. Used by the device thread alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar, cast

import numpy as np
import numpy.typing as npt
import structlog
import torch

from relaygr_stream.errors import CapacityError, ModelError
from relaygr_stream.models.api import KVRegion, RankingModel, ScoreInput, SteppedModel, Tokens, WarmedModel
from relaygr_stream.worker.cost_model import MAX_CHUNK, MIN_CHUNK, Costs

# Some tokens being appended to a KV region, in the model's own steps where it has them. Knows nothing of time limits.


class Chunk:
    """Used by the device thread alone. Dropped half-way, it leaves region.length where it was."""

    def __init__(
        self,
        model: RankingModel,
        region: KVRegion,
        tokens: Tokens,
        clock: Callable[[], float],
        synchronize: Callable[[], None],
    ) -> None:
        self.position = region.length
        self.tokens = len(tokens)
        self.ms = 0.0  # spent so far
        self.steps = 0  # taken so far
        self._last_ms = 0.0  # of the last of them
        self.finished = False
        self._region = region
        self._clock = clock
        self._synchronize = synchronize
        self._rest = _steps(model, region, tokens)

    @property
    def whole_steps(self) -> float:
        """How many steps, such as those before the last one, the chunk so far is worth: the last one is what is left
        to do, next to nothing or nearly as much as the others."""
        before, ms = self.steps - 1, self.ms - self._last_ms
        return before * self.ms / ms if before and ms > 0 else 1.0

    def step(self) -> float:
        """Take the next step and wait for the device; returns the milliseconds.

        Raises what the model raises, ModelError if it did not append what it was given; region.length is then as
        before the chunk, which is over.
        """
        start = self._clock()
        try:
            with torch.inference_mode():
                self.finished = next(self._rest, self) is self
                self._synchronize()
            if self.finished and self._region.length != self.position + self.tokens:
                raise ModelError(
                    f"extend() was given {self.tokens} tokens behind {self.position} and left kv.length at "
                    f"{self._region.length}"
                )
        except BaseException:
            self._region.length = self.position
            raise
        ms = (self._clock() - start) * 1e3
        self._last_ms = ms
        self.ms += ms
        self.steps += 1
        return ms


def _steps(model: RankingModel, region: KVRegion, tokens: Tokens) -> Iterator[None]:
    """The model's own steps. Asked of its class: a wrapper that forwards what it does not define means its `extend`."""
    if hasattr(type(model), "extend_in_steps"):
        return cast(SteppedModel, model).extend_in_steps(region, tokens)
    return _whole(model, region, tokens)


def _whole(model: RankingModel, region: KVRegion, tokens: Tokens) -> Iterator[None]:
    """`extend` as a single step."""
    model.extend(region, tokens)
    yield from ()


log = structlog.get_logger(__name__)

T = TypeVar("T")

#: Prefix lengths of the warm-up: enough to fit both polynomials; the longest allowed prefix caps them.
WARMUP_TOKENS: Final = (64, 256, 512, 1024)
#: Fewer candidates at a time cost about the same: the prefix KV is read for each time.
MIN_ROWS: Final = 8
WARMUP_ROWS: Final = (16, 64, 128)
#: After the device ran out of memory chunks stay half as long; so many chunks later they may double again. At some
#: milliseconds each that is about a second: memory that others took is free again, or one more retry is paid.
CALM_CHUNKS: Final = 256
#: Kinds of errors whose traceback is logged; a model with more lines that raise says little with the next one.
MAX_KINDS_SHOWN: Final = 64
#: Weight of a new chunk in the running mean of how many steps a chunk is worth.
STEPS_STEP: Final = 0.1

_NONE = Tokens(np.zeros((3, 0), np.int64))


class Engine:
    """A model on its device, with measured costs. clock: in seconds, what operations are timed by.

    failures counts operations that failed for good, failed_in_a_row those since the last chunk or ranking
    that succeeded.
    """

    def __init__(
        self, model: RankingModel, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.model = model
        self.device = device
        self._clock = clock
        self._asynchronous = device.type != "cpu"
        self._steps: float | None = None  # of a chunk, about equal in time
        self.costs = Costs()
        self.failures = 0
        self.failed_in_a_row = 0
        self.last_error = ""
        self._shown: set[tuple[str, str, int]] = set()
        self.out_of_memory = 0
        self._longest = MAX_CHUNK
        self._calm = 0

    def costs_of_prefix(self, tokens: int) -> float:
        """Predicted milliseconds of inferring a whole prefix."""
        return self.costs.prefix_ms(tokens)

    def chunk_tokens(self, position: int, step_ms: float) -> int:
        """Tokens of a chunk behind `position` whose steps are expected to take so long each."""
        return min(self.costs.chunk(position, self.chunk_ms(step_ms)), self._longest)

    def chunk_ms(self, step_ms: float) -> float:
        """How long a chunk is meant to take whose steps take so long each."""
        return step_ms * (self._steps or 1.0)

    def candidates_within(self, region: KVRegion, suffix: Tokens, bound_ms: float) -> int:
        """Candidates that are scored within half of bound_ms (as extension.SHARE), by prediction; at least MIN_ROWS."""
        none = self.costs.score_ms(region.length, len(suffix))
        each = (self.costs.score_ms(region.length, len(suffix) + MAX_CHUNK) - none) / MAX_CHUNK
        room = bound_ms / 2 - none
        return max(MIN_ROWS, min(MAX_CHUNK, int(room / each))) if each > 0 else MAX_CHUNK

    def chunk(self, region: KVRegion, tokens: Tokens) -> Chunk:
        """Begin to append these tokens, all of them, behind region.length."""
        return Chunk(self.model, region, tokens, self._clock, self._synchronize)

    def learn(self, chunk: Chunk) -> None:
        """The chunk is finished."""
        self.failed_in_a_row = 0
        self.costs.extended(chunk.position, chunk.tokens, chunk.ms)
        steps = chunk.whole_steps
        self._steps = steps if self._steps is None else self._steps + STEPS_STEP * (steps - self._steps)
        self._calm += 1
        if self._calm >= CALM_CHUNKS:
            self._calm, self._longest = 0, min(MAX_CHUNK, 2 * self._longest)

    def shorten(self, chunk: Chunk) -> None:
        """There was no memory for this chunk: make shorter ones for a while."""
        self._longest = max(MIN_CHUNK, chunk.tokens // 2)

    def score(self, batch: Sequence[ScoreInput]) -> tuple[list[npt.NDArray[np.float32]], float]:
        """Scores (candidates, tasks) of each ranking, on the host, and the milliseconds it took.

        Out of memory: a single ranking is tried once more, a batch is left to the caller to take apart. Raises what
        the model raises, ModelError if its scores have other shapes.
        """
        scored = self.attempt(lambda: self._score(batch), None if len(batch) > 1 else lambda: self._score(batch))
        self.failed_in_a_row = 0
        return scored

    def warm_up(self, region: KVRegion) -> None:
        """First-use costs (allocations, compilation), then a first fit of the costs, with `region` as scratch.

        Raises CapacityError when the device has no memory for it beside the tiers.
        """
        try:
            if hasattr(type(self.model), "warm_up"):
                cast(WarmedModel, self.model).warm_up(min(MAX_CHUNK, region.capacity))
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
                    chunk = self.chunk(region, tokens.slice(region.length, stop))
                    while not chunk.finished:
                        chunk.step()
                    self.learn(chunk)
            for rows in WARMUP_ROWS:
                self._score([ScoreInput(region, _NONE, np.zeros(rows, np.int64))])
        region.length = 0

    def _score(self, batch: Sequence[ScoreInput]) -> tuple[list[npt.NDArray[np.float32]], float]:
        start = self._clock()
        with torch.inference_mode():
            scores = [row.to("cpu", torch.float32).numpy() for row in self.model.score(batch)]
        ms = (self._clock() - start) * 1e3
        expected = [(len(one.candidates), len(self.model.tasks)) for one in batch]
        if [row.shape for row in scores] != expected:
            raise ModelError(f"score() returned shapes {[row.shape for row in scores]}, expected {expected}")
        for one in batch:
            self.costs.saw_suffix(len(one.suffix))
        if len(batch) == 1:
            one = batch[0]
            self.costs.scored(one.kv.length, len(one.suffix) + len(one.candidates), ms)
        return scores, ms

    def attempt(self, operation: Callable[[], T], again: Callable[[], T] | None) -> T:
        """Run and count failures; where memory ran out, do `again`, if there is that, after giving cached blocks back.

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
                if self._asynchronous:
                    torch.accelerator.empty_cache()
                result = again()
        except Exception as error:
            self.failures += 1
            self.failed_in_a_row += 1
            self.last_error = describe(error)
            self._show(error)
            raise
        return result

    def _show(self, error: Exception) -> None:
        """Its traceback, for who wrote the model: once per kind, which is its type and the line that raised it."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        kind = (
            type(error).__name__,
            trace.tb_frame.f_code.co_filename if trace else "",
            trace.tb_lineno if trace else 0,
        )
        if kind not in self._shown and len(self._shown) < MAX_KINDS_SHOWN:
            self._shown.add(kind)
            log.error("the model or its device failed", error=describe(error), exc_info=error)

    def _synchronize(self) -> None:
        if self._asynchronous:
            torch.accelerator.synchronize(self.device)


def describe(error: Exception) -> str:
    """An error as text. What fails on a device is not kept as an exception, which keeps the device's memory too."""
    return f"{type(error).__name__}: {error}"


# Appending a sequence to a KV region, one slice of device time after the other. The sequence goes in chunks, a chunk
# in the model's own steps (a layer, say) where it has them. A slice ends between two steps, so a ranking that comes
# meanwhile waits for a step or two, not for a chunk; and a chunk may be long, which the device likes. Knows nothing
# of entries or of who waits.


#: Steps are made to take this share of the bound, by prediction, and slices filled up to it: one that takes twice as
#: long as predicted is still within the bound. `make bench-scheduler` prints what comes of it.
SHARE: Final = 0.5


class Extension:
    """`tokens` on their way into `region`, whose length is where they stand. Used by the device thread alone."""

    def __init__(self, engine: Engine, region: KVRegion, tokens: Tokens) -> None:
        self.region = region
        self.tokens = tokens
        self._engine = engine
        self._chunk: Chunk | None = None  # under way

    @property
    def done(self) -> bool:
        """Everything is there."""
        return self.region.length >= len(self.tokens)

    def advance(self, bound_ms: float) -> float:
        """Work for about half of bound_ms, at least one step; returns the milliseconds. Not to be called when done.

        Out of memory: the chunk begins once more, with half as many tokens where the model takes fewer. Raises what
        the model raises; region.length is then as before the chunk.
        """
        work = partial(self._slice, bound_ms)
        return self._engine.attempt(work, work)

    def _slice(self, bound_ms: float) -> float:
        chunk = self._chunk
        if chunk is None:
            engine, position = self._engine, self.region.length
            stop = min(len(self.tokens), position + engine.chunk_tokens(position, SHARE * bound_ms))
            chunk = self._chunk = engine.chunk(
                self.region, self.tokens.slice(position, stop if engine.model.incremental else len(self.tokens))
            )
        spent = 0.0
        try:
            while True:
                step = chunk.step()
                spent += step
                if chunk.finished or spent + step > SHARE * bound_ms:
                    break
        except BaseException as error:
            self._chunk = None
            if isinstance(error, torch.OutOfMemoryError):
                self._engine.shorten(chunk)
            raise
        if chunk.finished:
            self._chunk = None
            self._engine.learn(chunk)
        return spent
