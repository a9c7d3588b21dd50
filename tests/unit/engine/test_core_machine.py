"""Random traffic against the whole core: one answer each, exact scores, bounds and books that hold at every step."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from relaygr_stream.engine.commands import DELEGATED_LANE, Cancel, LanesLost
from tests.properties import examples
from tests.unit.engine.worlds import (
    GRANULE_BYTES,
    LIMITS,
    MAX_TOKENS,
    RETENTION,
    TOY,
    WITH_CONTEXT,
    Flaky,
    World,
    Wrapped,
)

USERS = st.integers(0, 3)
LENGTHS = st.integers(1, MAX_TOKENS)
CLIENTS = st.sampled_from(["", "a", "b"])


class CoreMachine(RuleBasedStateMachine):
    lag = 0
    kind = TOY
    hbm, dram = 10, 9  # granules

    def __init__(self) -> None:
        super().__init__()
        limits = dataclasses.replace(LIMITS, queue_limit=12, waiting_bytes=20, delegated_bytes=2 * GRANULE_BYTES)
        self.world = World(
            self.hbm, self.dram, audit_share=0.2, lag=self.lag, limits=limits, kind=self.kind, wrap=Wrapped,
            copier=Flaky,
        )  # fmt: skip
        self.answerable = 0
        self.sent = 0
        self.signalled: list[tuple[str, int, int, int]] = []
        self.cancelled: set[str] = set()

    @rule(user=USERS, length=LENGTHS, version=st.sampled_from([0, 0, 0, 1]), life=st.floats(0.05, 1))
    def signal(self, user: int, length: int, version: int, life: float) -> None:
        self.sent += 1
        request = f"r{self.sent}"
        self.world.signal(request, user, length, version=version, life=life)
        self.signalled.append((request, user, length, version))

    @rule(data=st.data(), timeout=st.floats(0.05, 2), client=CLIENTS, nbytes=st.integers(0, 8))
    def rank_signalled(self, data: st.DataObject, timeout: float, client: str, nbytes: int) -> None:
        if self.signalled:
            at = data.draw(st.integers(0, len(self.signalled) - 1))
            request, user, length, version = self.signalled[at]  # which leaves it there for a duplicate
            self.answerable += 1
            self.world.rank(request, user, length, version=version, timeout=timeout, client=client, nbytes=nbytes)

    @rule(data=st.data(), ahead=st.booleans())
    def cancel(self, data: st.DataObject, ahead: bool) -> None:
        """What the request pinned is released before anything else happens; a signal behind it pins nothing."""
        if ahead:  # of a signal that never comes, or of the next one
            request = f"r{self.sent + data.draw(st.integers(1, 2))}"
        elif self.signalled:
            request = self.signalled[data.draw(st.integers(0, len(self.signalled) - 1))][0]
        else:
            return
        self.world.handle(Cancel(request))
        assert request not in self.world.scheduler.pins
        self.cancelled.add(request)

    @rule(user=USERS, length=st.integers(0, MAX_TOKENS), full=st.booleans(), suffix=st.integers(0, 4), client=CLIENTS)
    def rank_unannounced(self, user: int, length: int, full: bool, suffix: int, client: str) -> None:
        self.sent += 1
        self.answerable += 1
        self.world.rank(f"r{self.sent}", user, length, full=full, suffix=suffix, client=client, nbytes=2)

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @rule(seconds=st.floats(0.01, 1.0))
    def time_passes(self, seconds: float) -> None:
        self.world.settle()
        self.world.now += seconds

    @rule(seconds=st.floats(0.01, 1.5), steps=st.integers(0, 3))
    def time_passes_at_work(self, seconds: float, steps: int) -> None:
        """Deadlines and life windows end while things are computed, copied, waiters."""
        for _ in range(steps):
            self.world.step()
        self.world.now += seconds
        self.world.step()

    @rule(fails=st.sampled_from([0, 1, 2]))
    def next_copies_fail(self, fails: int) -> None:
        copier = self.world.copies
        assert isinstance(copier, Flaky)
        copier.fail_next = fails

    @rule(extend=st.sampled_from([0, 0, 1, 2]), score=st.sampled_from([0, 0, 1, 2]), memory=st.booleans())
    def device_fails(self, extend: int, score: int, memory: bool) -> None:
        model = self.world.model
        assert isinstance(model, Wrapped)
        model.fail_prefill, model.fail_score = extend, score
        model.error = torch.OutOfMemoryError("none left") if memory else RuntimeError("on fire")

    @rule(user=USERS, length=LENGTHS, life=st.floats(0.05, 1))
    def signal_on_anothers_behalf(self, user: int, length: int, life: float) -> None:
        self.sent += 1
        self.world.signal(f"s{self.sent}", user, length, life=life, lane=DELEGATED_LANE)
        self.signalled.append((f"s{self.sent}", user, length, 0))

    @rule(user=USERS, length=LENGTHS)
    def rank_what_another_worker_has(self, user: int, length: int) -> None:
        """It is scored here if all of it is here, else refused at once, to be passed on."""
        self.sent += 1
        self.answerable += 1
        self.world.rank(f"p{self.sent}", user, length, pass_to=7)

    @rule(lane=st.integers(0, 3))
    def lose_a_lane(self, lane: int) -> None:
        self.world.handle(LanesLost(frozenset([lane])))

    @invariant()
    def books_hold(self) -> None:
        world = self.world
        world.scheduler.check_integrity()
        assert len({answer.task for answer in world.answers}) == len(world.answers)
        assert not any(request in world.scheduler.pins for request in self.cancelled)
        assert world.cache.hbm_used <= self.hbm * GRANULE_BYTES
        assert world.cache.dram_used <= self.dram * GRANULE_BYTES
        assert world.scheduler.pins.lane_bytes(DELEGATED_LANE) <= world.limits.delegated_bytes
        assert len(world.scheduler.rankings) <= world.limits.queue_limit
        assert world.scheduler.admission.clients.whole.nbytes <= world.limits.waiting_bytes

    def teardown(self) -> None:
        world = self.world
        world.settle()
        world.check_scores()
        assert len(world.scheduler.rankings) == 0
        assert len(world.answers) == self.answerable
        world.now += 10.0
        world.settle()
        assert world.cache.pinned_bytes == 0, "pins outlived their life windows"
        assert Counter(each.task.origin for each in world.placed) == Counter(each[0] for each in self.signalled)
        assert all(each.started <= each.ended for each in world.placed)
        world.scheduler.check_integrity()
        assert all(deviation <= 1e-5 for _, deviation in world.audits)
        world.close()


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=examples(40), stateful_step_count=50, suppress_health_check=list(HealthCheck))


class LaggingMachine(CoreMachine):
    """Much of a prefix may be missing from what is cached."""

    lag = 60


TestCoreThatLags = LaggingMachine.TestCase
TestCoreThatLags.settings = TestCore.settings


class RecurrentMachine(CoreMachine):
    """A state that is rewritten as it grows. Memory holds four, the scratch region among them; copies, three."""

    lag = 20
    kind = RETENTION
    hbm, dram = 1, 1


TestCoreWithAState = RecurrentMachine.TestCase
TestCoreWithAState.settings = settings(TestCore.settings, max_examples=examples(25))


class ContextMachine(CoreMachine):
    """A prefix that cannot grow, with suffixes behind it."""

    kind = WITH_CONTEXT


TestCoreWithContext = ContextMachine.TestCase
TestCoreWithContext.settings = settings(TestCore.settings, max_examples=examples(15))


@pytest.mark.long
@pytest.mark.timeout(3600)
class TestCoreForLong(CoreMachine.TestCase):  # type: ignore[misc, valid-type]
    """Tens of thousands of operations, in longer lives."""

    settings = settings(max_examples=300, stateful_step_count=200, suppress_health_check=list(HealthCheck))
