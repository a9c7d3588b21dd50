"""Runs a model's two operations on its device, measures them and learns their cost. Used by the device thread alone.

    score(batch)             candidates against prefix KV, at once
    prefill(region, tokens)  a run that appends tokens to prefix KV, one slice of device time per `advance`

A prefix goes in chunks, and a chunk in the model's own steps (a layer, say) where it has them. A slice ends between two
steps, so a ranking that comes meanwhile waits for a step or two, not for a chunk; and a chunk may be long, which the
device likes. Out of memory, chunks are halved and memory is given back here: callers see an operation that succeeded,
or one that failed for good.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import structlog
import torch

from relaygr_stream.engine.cost_model import MAX_CHUNK, MIN_CHUNK, Costs
from relaygr_stream.errors import CapacityError, ModelError
from relaygr_stream.models.api import RankingModel, ScoreInput, SteppedModel, Tokens, WarmedModel, schema_of
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.telemetry.clocks import Clock

log = structlog.get_logger(__name__)

T = TypeVar("T")
On = TypeVar("On")

#: Steps are made to take this share of the delay bound, by prediction, and slices filled up to it: one that takes twice
#: as long as predicted is still within the bound. `make bench-scheduler` prints what comes of it. A chunk of one step
#: may take twice its fixed costs, whatever the bound (cost_model.py).
SLICE_SHARE: Final = 0.5
#: A chunk is meant to be so long that its fixed time is this share of it: shorter ones take the device's time, longer
#: ones keep it from rankings. Simulated at 1.25 times capacity (`make bench-hand-set`; costs `cpu`, first visits, one
#: seed), 12 % answered 6 % less within the SLO than 6 %, and 3 % answered 4 % more.
FIXED_SHARE: Final = 0.04
#: Shorter slices would cost what lies between two of them.
LEAST_DELAY_MS: Final = 1.0
#: Prefix lengths of the warm-up: enough to fit both polynomials; the longest allowed prefix caps them.
WARMUP_TOKENS: Final = (64, 256, 512, 1024)
#: Fewer candidates at a time cost about the same: the prefix KV is read for each time.
MIN_ROWS: Final = 8
WARMUP_ROWS: Final = (16, 64, 128)
#: Where no ranking waits for it, a chunk may take any time.
UNHURRIED_MS: Final = 1e5
#: After the device ran out of memory at a chunk, chunks are half as long; so much later, and again, they may double:
#: memory that others took is free again, or one more retry is paid.
CALM_S: Final = 1.0
#: Kinds of errors whose traceback is logged; a model with more lines that raise says little with the next one.
MAX_KINDS_SHOWN: Final = 64
#: Weight of a new chunk in the running mean of how many steps a chunk is worth.
STEPS_STEP: Final = 0.1


class Executor:
    """A model on its device, with measured costs. clock: in seconds, what operations are timed by.

    failures counts operations that failed for good, failed_in_a_row those since the last chunk or ranking that
    succeeded; out_of_memory counts how often the device had no memory.
    """

    def __init__(self, model: RankingModel, device: torch.device, clock: Clock = time.perf_counter) -> None:
        self.model = model
        self.device = device
        self.clock = clock
        self.costs = Costs()
        self.failures = 0
        self.failed_in_a_row = 0
        self.failed_ms = 0.0  # that the last operation to fail had taken
        self.last_error = ""
        self.out_of_memory = 0
        self._inference = torch.inference_mode()  # entered for each step: to make it takes as long as to enter it
        self._asynchronous = device.type != "cpu"
        self._steps: float | None = None  # of a chunk, about equal in time
        self._longest = MAX_CHUNK
        self._calm_s = 0.0  # since when the device has had memory for the longest chunks allowed
        self._shown: set[tuple[str, str, int]] = set()

    # ---- the two operations ----

    def score(self, batch: Sequence[ScoreInput]) -> tuple[list[npt.NDArray[np.float32]], float]:
        """Scores (candidates, tasks) of each ranking, on the host, and the milliseconds it took.

        Out of memory: a single ranking is tried once more, a batch is left to the caller to take apart. Raises what
        the model raises, ModelError if its scores have other shapes.
        """
        scored = self._attempt(self._score, batch, once_more=len(batch) == 1)
        self.failed_in_a_row = 0
        return scored

    def prefill(self, region: KVRegion, tokens: Tokens) -> PrefillRun:
        """A run that appends to `region` what it lacks of `tokens`, the whole sequence. Nothing is computed yet."""
        return PrefillRun(self, region, tokens)

    def warm_up(self, region: KVRegion, max_candidates: int = WARMUP_ROWS[-1]) -> None:
        """First-use costs (allocations, compilation), then a first fit of the costs, with `region` as scratch.

        max_candidates: the most of a ranking (relay.max_candidates), which the model may rely on.
        Raises CapacityError when the device has no memory for it beside the tiers.
        """
        try:
            if hasattr(type(self.model), "warm_up"):
                cast(WarmedModel, self.model).warm_up(min(MAX_CHUNK, region.capacity))
            self._warm_round(region, max_candidates)  # pays for first uses
            rounds = [self._warm_round(region, max_candidates) for _ in range(2)]
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{self.device} has no memory left for inference beside worker.hbm_bytes: lower that "
                f"({str(error).splitlines()[0]})"
            ) from error
        # The shorter time of each: the first one scales the whole fit, and a process without a core for a moment once
        # made prefixes cost a hundred times as much, so that triggers refused its lanes.
        self.costs = Costs()
        for timings in zip(*rounds, strict=True):
            best = min(timings, key=lambda timing: timing.ms)
            learn = self.costs.scored if best.scored else self.costs.prefilled
            learn(best.behind, best.tokens, best.ms)

    def works(self, region: KVRegion) -> bool:
        """Whether the device can prefill and score input as that of the warm-up, with `region` as scratch."""
        schema = schema_of(self.model)
        tokens = Tokens.zeros(min(WARMUP_TOKENS[0], region.capacity), schema)
        candidates, features = np.zeros(WARMUP_ROWS[0], np.int64), schema.zeros("candidate", WARMUP_ROWS[0])
        region.length = 0
        run = self.prefill(region, tokens)
        try:
            while not run.done:
                run.advance(UNHURRIED_MS)
            self.score([ScoreInput(region, tokens.slice(0, 0), candidates, features)])
        except Exception:  # logged, and counted as a failure; the caller decides
            return False
        finally:
            region.length = 0
        return True

    # ---- predictions ----

    def costs_of_prefix(self, tokens: int) -> float:
        """Predicted milliseconds of inferring a whole prefix."""
        return self.costs.prefill_ms(0, tokens)

    def chunk_ms(self, step_ms: float) -> float:
        """How long a chunk is meant to take whose steps take so long each."""
        return step_ms * (self._steps or 1.0)

    def delay_ms(self, most_ms: float) -> float:
        """How long a slice may keep the device from a ranking, by what chunks cost; at most most_ms."""
        slice_ms = self.costs.fixed_ms / FIXED_SHARE / (self._steps or 1.0)
        return min(most_ms, max(LEAST_DELAY_MS, slice_ms / SLICE_SHARE))

    def candidates_within(self, region: KVRegion, suffix: Tokens, bound_ms: float) -> int:
        """Candidates that are scored within SLICE_SHARE of bound_ms, by prediction; at least MIN_ROWS."""
        none = self.costs.score_ms(region.length, len(suffix))
        each = (self.costs.score_ms(region.length, len(suffix) + MAX_CHUNK) - none) / MAX_CHUNK
        room = SLICE_SHARE * bound_ms - none
        return max(MIN_ROWS, min(MAX_CHUNK, int(room / each))) if each > 0 else MAX_CHUNK

    # ---- inside, shared with PrefillRun ----

    def _chunk_end(self, position: int, total: int, step_ms: float) -> int:
        """Where a chunk ends that begins at `position` and whose steps are expected to take so long each."""
        if not self.model.incremental:
            return total
        return min(total, position + min(self.costs.chunk(position, self.chunk_ms(step_ms)), self._longest))

    def _chunk_completed(self, chunk: _Chunk) -> None:
        self.failed_in_a_row = 0
        self.costs.prefilled(chunk.position, chunk.tokens, chunk.ms)
        if chunk.taken > 1:  # on a GPU short chunks have one step, long ones a step a layer
            steps = chunk.whole_steps
            self._steps = steps if self._steps is None else self._steps + STEPS_STEP * (steps - self._steps)
        if self._longest < MAX_CHUNK and (now := self.clock()) - self._calm_s >= CALM_S:
            self._calm_s, self._longest = now, min(MAX_CHUNK, 2 * self._longest)

    def _chunk_too_large(self, chunk: _Chunk) -> None:
        """There was no memory for this chunk: make shorter ones for a while."""
        self._longest = max(MIN_CHUNK, chunk.tokens // 2)
        self._calm_s = self.clock()

    def _attempt(self, operation: Callable[[On], T], on: On, *, once_more: bool = True) -> T:
        """Run and count failures; where memory ran out, give cached blocks back and run it once more, if allowed.

        The tiers are no help there: each is one allocation, for good.
        """
        start = self.clock()
        try:
            try:
                return operation(on)
            except torch.OutOfMemoryError:
                self.out_of_memory += 1
                if not once_more:
                    raise
            # Not in the handler: the error's traceback keeps alive what the operation had allocated.
            if self._asynchronous:
                torch.accelerator.empty_cache()
            return operation(on)
        except Exception as error:
            self.failures += 1
            self.failed_in_a_row += 1
            self.failed_ms = (self.clock() - start) * 1e3
            self.last_error = describe(error)
            self._show(error)
            raise

    def _score(self, batch: Sequence[ScoreInput]) -> tuple[list[npt.NDArray[np.float32]], float]:
        start = self.clock()
        with self._inference:
            # Copied on a CPU too: the rows may be views of a buffer that the model's next call overwrites.
            scores = [row.to("cpu", torch.float32, copy=True).numpy() for row in self.model.score(batch)]
        ms = (self.clock() - start) * 1e3
        expected = [(len(one.candidates), len(self.model.tasks)) for one in batch]
        if [row.shape for row in scores] != expected:
            raise ModelError(f"score() returned shapes {[row.shape for row in scores]}, expected {expected}")
        for one in batch:
            self.costs.saw_suffix(len(one.suffix))
        if len(batch) == 1:
            one = batch[0]
            self.costs.scored(one.kv.length, len(one.suffix) + len(one.candidates), ms)
        return scores, ms

    def _warm_round(self, region: KVRegion, max_candidates: int) -> list[_Timing]:
        schema = schema_of(self.model)
        timings = []
        for n in dict.fromkeys(min(n, region.capacity) for n in WARMUP_TOKENS):
            tokens = Tokens.zeros(n, schema)
            # Halves, so that extensions are among what is learnt; a whole where the model takes nothing else.
            stops = (n // 2, n) if self.model.incremental else (n,)
            region.length = 0
            for stop in stops:
                chunk = _Chunk(self, region, tokens.slice(region.length, stop))
                while not chunk.finished:
                    chunk.step()
                self._chunk_completed(chunk)
                timings.append(_Timing(False, chunk.position, chunk.tokens, chunk.ms))
            for rows in dict.fromkeys(min(rows, max_candidates) for rows in WARMUP_ROWS):
                candidates, features = np.zeros(rows, np.int64), schema.zeros("candidate", rows)
                _, ms = self._score([ScoreInput(region, tokens.slice(0, 0), candidates, features)])
                timings.append(_Timing(True, n, rows, ms))
        region.length = 0
        return timings

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
        if self._asynchronous:  # this stream alone: the tiers' copies go on, and have their own order (cache/copy.py)
            torch.accelerator.current_stream(self.device).synchronize()


class _Timing(NamedTuple):
    """An operation of the warm-up: the scoring of `tokens` candidates, or their prefill, behind a prefix."""

    scored: bool
    behind: int
    tokens: int
    ms: float


class PrefillRun:
    """`tokens` on their way into `region`; region.length says how many are there. Dropping it half-way is no error."""

    def __init__(self, executor: Executor, region: KVRegion, tokens: Tokens) -> None:
        self.region = region
        self.tokens = tokens
        self._executor = executor
        self._chunk: _Chunk | None = None  # under way

    @property
    def done(self) -> bool:
        """All tokens are in the region."""
        return self.region.length >= len(self.tokens)

    def rest_ms(self, predicted_ms: float) -> float:
        """Until it is done. predicted_ms: of the tokens that are not there, those of the chunk under way among them."""
        chunk = self._chunk
        return predicted_ms if chunk is None else max(predicted_ms - chunk.ms, chunk.last_ms)

    def advance(self, bound_ms: float) -> float:
        """Work for SLICE_SHARE of bound_ms or so, at least a step; returns the milliseconds. Do not call it when done.

        Out of memory: the chunk begins once more, with half as many tokens where the model takes fewer. Raises what
        the model raises, ModelError if it did not append what it was given; region.length is then as before the chunk.
        """
        return self._executor._attempt(self._slice, SLICE_SHARE * bound_ms)

    def _slice(self, budget_ms: float) -> float:
        executor, chunk = self._executor, self._chunk
        if chunk is None:
            position = self.region.length
            stop = executor._chunk_end(position, len(self.tokens), budget_ms)
            chunk = self._chunk = _Chunk(executor, self.region, self.tokens.slice(position, stop))
        spent = 0.0
        try:
            while True:
                step = chunk.step()
                spent += step
                if chunk.finished or spent + step > budget_ms:
                    break
        except BaseException as error:
            self._chunk = None
            if isinstance(error, torch.OutOfMemoryError):
                executor._chunk_too_large(chunk)
            raise
        if chunk.finished:
            self._chunk = None
            executor._chunk_completed(chunk)
        return spent


class _Chunk:
    """Some tokens being appended to a region, in the model's steps. Dropped half-way, it leaves region.length as is."""

    def __init__(self, executor: Executor, region: KVRegion, tokens: Tokens) -> None:
        self.position = region.length
        self.tokens = len(tokens)
        self.ms = 0.0  # spent so far
        self.finished = False
        self._executor = executor
        self._region = region
        self.taken = 0  # steps so far
        self.last_ms = 0.0  # of the last of them
        self._rest = _steps(executor.model, region, tokens)

    @property
    def whole_steps(self) -> float:
        """The chunk so far in steps of average time: the last one, which may be shorter, counts by its time, at most as
        one: a longer one was interrupted."""
        before, ms = self.taken - 1, self.ms - self.last_ms
        return min(before * self.ms / ms, float(self.taken)) if before and ms > 0 else 1.0

    def step(self) -> float:
        """Take the next step and wait for the device; returns the milliseconds. Raises as PrefillRun.advance."""
        executor, region = self._executor, self._region
        start = executor.clock()
        try:
            with executor._inference:
                self.finished = next(self._rest, self) is self
                executor._synchronize()
            if self.finished and region.length != self.position + self.tokens:
                raise ModelError(
                    f"prefill() was given {self.tokens} tokens behind {self.position} and left kv.length at "
                    f"{region.length}"
                )
        except BaseException:
            region.length = self.position
            raise
        self.last_ms = (executor.clock() - start) * 1e3
        self.ms += self.last_ms
        self.taken += 1
        return self.last_ms


def _steps(model: RankingModel, region: KVRegion, tokens: Tokens) -> Iterator[None]:
    # Looked up on the class: a wrapper with __getattr__ would claim a method that it does not define.
    if hasattr(type(model), "prefill_in_steps"):
        return cast(SteppedModel, model).prefill_in_steps(region, tokens)
    return _in_one_step(model, region, tokens)


def _in_one_step(model: RankingModel, region: KVRegion, tokens: Tokens) -> Iterator[None]:
    model.prefill(region, tokens)
    yield from ()


def describe(error: Exception) -> str:
    """An error as text. What fails on a device is not kept as an exception, which keeps the device's memory too."""
    return f"{type(error).__name__}: {error}"
