"""A worker's inside at toy size: the real model, memory, cache and core, on a clock that the test moves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.cache.copy import Before, CopyEngine, CopyTicket
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.engine.audit import Auditor
from relaygr_stream.engine.commands import (
    Answer,
    Command,
    Measured,
    Placed,
    Prefill,
    PrefillTask,
    Rank,
    RankTask,
    Times,
)
from relaygr_stream.engine.executor import Executor
from relaygr_stream.engine.ranking import Ranking
from relaygr_stream.engine.scheduler import Limits, Scheduler
from relaygr_stream.models.api import RankingModel, ScoreInput, Tokens, relative_deviation, takes_suffix
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.loading import load_model
from relaygr_stream.settings.schema import Relay
from relaygr_stream.settings.worker import Model
from relaygr_stream.wire.messages import tenant_key
from tests.unit.cache.worlds import GRANULE_BYTES as CACHE_GRANULE
from tests.unit.cache.worlds import HookedCopy, broken, file_of

CPU = torch.device("cpu")
TOY = Model(
    layers=2, dim=16, heads=2, dqk=8, dv=8, vocab=101, max_positions=512, scale_tokens=64, tasks=("click", "like")
)
#: 2 layers × 2 heads × (8 + 8) × 4 bytes = 256 bytes a token: 16 KiB a granule of 64 tokens.
GRANULE_BYTES = 64 * 256
MAX_TOKENS = 192  # three granules
LIMITS = Limits(pinned_bytes=6 * GRANULE_BYTES, max_ranking_delay_ms=0.2, batch=4, queue_limit=64)


TRANSFORMER = msgspec.structs.replace(TOY, factory="relaygr_stream.models.transformer:make")
#: A state of 1 KiB for any length, which takes a page of 4 KiB.
RETENTION = msgspec.structs.replace(TOY, factory="examples.models.retention:make")
#: Learned context tokens that see the whole prefix, and a suffix behind it.
WITH_CONTEXT = msgspec.structs.replace(TOY, factory="examples.models.contextual:make")
#: Its first tokens see the whole history: nothing of it can be reused for a longer one.
CONTEXTUAL = msgspec.structs.replace(TOY, contextual_seq_len=2)


@cache
def toy_model(device: torch.device = CPU, model: Model = TOY) -> RankingModel:
    relay = Relay(max_suffix_tokens=0 if model.contextual_seq_len else 16)
    return load_model(model, relay, device=device, dtype=torch.float32)


def history(user: int, length: int, version: int = 0) -> Tokens:
    """A user's first `length` behaviours: a longer history continues a shorter one of the same version."""
    return Tokens(_behaviours(user, version)[:, :length].astype(np.int64))


@cache
def _behaviours(user: int, version: int) -> npt.NDArray[np.int64]:
    rng = np.random.default_rng((user, version))
    return np.stack([rng.integers(0, most, MAX_TOKENS) for most in (1000, 5, 10**6)])


def full_scores(
    model: RankingModel, task: RankTask, suffix: Tokens
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """The truth: everything inferred at once, in memory of its own."""
    tokens = task.tokens
    if not takes_suffix(model):
        tokens, suffix = tokens.followed_by(suffix), Tokens.zeros(0)
    n = len(tokens)
    region = KVRegion.new(model.layout, n)
    with torch.inference_mode():
        if n:
            model.prefill(region, tokens)
        return model.score([ScoreInput(region, suffix, task.candidates)])[0].numpy()


class Wrapped:
    """A model that fails when told to."""

    def __init__(self, model: RankingModel) -> None:
        self.model = model
        self.fail_prefill = 0
        self.fail_score = 0
        self.error: Exception = RuntimeError("the device is on fire")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        if self.fail_prefill:
            self.fail_prefill -= 1
            kv.length += 1  # it failed half-way
            raise self.error
        self.model.prefill(kv, tokens)

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        if self.fail_score:
            self.fail_score -= 1
            raise self.error
        return self.model.score(batch)


class Fraud(Wrapped):
    """A model whose first scores are wrong, each half as large again."""

    factor = 1.5

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        factor, self.factor = self.factor, 1.0
        return [scores * factor for scores in super().score(batch)]


class Flaky(CopyEngine):
    """Copies some of which the device refuses, after it wrote what nobody should read."""

    fail_next = 0

    def submit(
        self, dst: torch.Tensor, src: torch.Tensor, *, urgent: bool = False, before: Before | None = None
    ) -> CopyTicket:
        if self.fail_next:
            self.fail_next -= 1
            return self.enqueue(HookedCopy(dst, src, broken), urgent=urgent)
        return super().submit(dst, src, urgent=urgent, before=before)


class Look(NamedTuple):
    """A command of tests alone: `call(scheduler, now)` where the scheduler lives."""

    call: Callable[[Scheduler, float], object]


def look(call: Callable[[Scheduler, float], object]) -> Command:
    """For DeviceThread.submit and ask."""
    return cast(Command, Look(call))


class OpenScheduler(Scheduler):
    """One that tests may look into."""

    def handle(self, command: Command, now: float) -> object:
        if isinstance(command, Look):
            return command.call(self, now)
        return super().handle(command, now)


@dataclass
class World:
    """A scheduler over `hbm` and `dram` granules, and everything it said."""

    hbm: int = 9
    dram: int = 8
    folder: Path | None = None  # of the DRAM tier's file
    audit_share: float = 0.0
    lag: int = 0
    limits: Limits = LIMITS
    device: torch.device = CPU
    kind: Model = TOY
    wrap: Callable[[RankingModel], RankingModel] = lambda model: model
    copier: Callable[[torch.device], CopyEngine] = CopyEngine
    clock: Callable[[], float] = time.perf_counter  # what the executor measures by
    now: float = 100.0
    answers: list[Answer] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    audits: list[tuple[RankTask, float]] = field(default_factory=list)
    suffixes: dict[RankTask, Tokens] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.truth = toy_model(model=self.kind)
        on_cpu = self.device.type == "cpu"
        self.model = self.wrap(self.truth if on_cpu else toy_model(self.device, self.kind))
        self.executor = Executor(self.model, self.device, self.clock)
        self.copies = self.copier(self.device)
        size = self.dram * GRANULE_BYTES
        file = None if self.folder is None else file_of(self.folder / "tier", size // CACHE_GRANULE, self.truth.layout)
        dram = TierMemory(size, CPU, pinned=not on_cpu, file=file) if self.dram else None
        self.cache = PrefixCache(
            self.model.layout,
            TierMemory(self.hbm * GRANULE_BYTES, self.device),
            dram,
            self.copies,
            self.executor.costs_of_prefix,
            scratch_tokens=MAX_TOKENS,
            incremental=self.model.incremental,
            max_stale_tokens=self.lag,
        )
        auditor = Auditor(self.audit_share, self._audited, seed=1)
        self.scheduler = OpenScheduler(self.executor, self.cache, self.limits, auditor)

    def _audited(self, task: RankTask, measured: Measured, deviation: float, ms: float) -> bool:
        self.audits.append((task, deviation))
        return deviation > 0.1

    def signal(
        self,
        request: str,
        user: int,
        length: int,
        *,
        version: int = 0,
        life: float = 2.0,
        tenant: str = "",
        lane: int | None = None,
        scenario: str = "",
        due_s: float = 0.1,
    ) -> None:
        tokens = history(user, length, version)
        due, expires = self.now + due_s, self.now + life
        lane = user % 4 if lane is None else lane
        keys = tenant_key(tenant, request), tenant_key(tenant, f"u{user}")
        task = PrefillTask(*keys, lane, tokens, due, expires, self.now, origin=request, scenario=scenario)
        self.handle(Prefill(task))

    def rank(
        self, request: str, user: int, length: int, *, pass_to: int | None = None, waited_s: float = 0.0, **options: Any
    ) -> RankTask:
        """Hand a ranking in, which arrives now. options: as `ranking` takes them."""
        task = self.ranking(request, user, length, **options)
        self.handle(Rank(task, pass_to, waited_s))
        return task

    def waiting(self, task: RankTask) -> Ranking:
        """What the scheduler knows of a ranking that waits for its answer."""
        found: Ranking = next(each for each in self.scheduler.admission.waiting if each.task is task)
        return found

    def measured(self, task: RankTask) -> Measured:
        """What a ranking's answer tells, or would tell now."""
        found = [answer.measured for answer in self.answers if answer.task is task]
        return found[0] if found else self.waiting(task).measured

    def ranking(
        self,
        request: str,
        user: int,
        length: int,
        *,
        version: int = 0,
        suffix: int = 3,
        full: bool = False,
        timeout: float = 1.0,
        due: float = math.inf,
        candidates: int = 5,
        tenant: str = "",
        client: str = "",
        nbytes: int = 0,
        hops: int = 0,
        scenario: str = "",
    ) -> RankTask:
        tokens = history(user, length, version)
        after = Tokens(np.full((3, suffix), 7, np.int64))
        task = RankTask(
            tenant_key(tenant, request),
            tenant_key(tenant, f"u{user}"),
            user % 4,
            tokens,
            after,
            np.arange(candidates, dtype=np.int64) * 3,
            Times(self.now, self.now + min(due, timeout), self.now + timeout),
            full=full,
            client=client,
            nbytes=nbytes,
            hops=hops,
            scenario=scenario,
        )
        self.suffixes[task] = after
        return task

    def handle(self, command: Command) -> object:
        """Hand a command in; `answers` gets what it answers at once."""
        try:
            return self.scheduler.handle(command, self.now)
        finally:
            self._take_results()

    def step(self, now: float | None = None) -> bool:
        """One step, now or at another time; `answers` gets what was answered since the last."""
        try:
            return self.scheduler.step(self.now if now is None else now)
        finally:
            self._take_results()

    def _take_results(self) -> None:
        answers, placed = self.scheduler.take_results()
        self.answers += answers
        self.placed += placed

    def settle(self, most: int = 10_000) -> None:
        """Step until there is nothing to do, copies included."""
        for _ in range(most):
            if not self.step():
                if not self.scheduler.cache.copying:
                    return
                time.sleep(0.0005)  # the copy engine's threads need a turn
        raise AssertionError("the core never comes to rest")

    def answer(self, request: str) -> Answer:
        """The one answer to a request."""
        found = [answer for answer in self.answers if answer.task.request_id == request]
        assert len(found) == 1, f"{len(found)} answers to {request}"
        return found[0]

    def outcome(self, request: str) -> str | None:
        answer = self.answer(request)
        assert answer.status == "ok", answer
        return answer.measured.outcome

    def check_scores(self, tolerance: float = 1e-5) -> None:
        """Every score given so far equals full inference on the CPU."""
        for answer in self.answers:
            if answer.status == "ok":
                assert answer.scores is not None
                truth = full_scores(self.truth, answer.task, self.suffixes[answer.task])
                deviation = relative_deviation(answer.scores, truth)
                assert deviation <= tolerance, (deviation, answer, truth)

    def close(self) -> None:
        self.cache.close()


@contextmanager
def world(**options: Any) -> Iterator[World]:
    """A world whose books, scores and pins are checked at the end."""
    made = World(**options)
    yield made
    made.settle()
    made.check_scores()
    made.scheduler.check_integrity()
    made.now += 100.0
    made.settle()
    assert made.cache.pinned_bytes == 0
    made.close()
