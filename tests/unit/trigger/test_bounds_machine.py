"""The footprint and load bounds against simulated workers, a simulated log and simulated time: events, late and lost
statements, lost and ambiguous sends, handed-over and crashed owners, restarted triggers, a log that loses its tail."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from relaygr_stream.messages import WorkerStatus
from relaygr_stream.owners import OwnerDirectory
from relaygr_stream.trigger.decision import LaneState, Policy, decide
from relaygr_stream.trigger.ledger import LaneLedger, Pending
from relaygr_stream.trigger.load import START_S, LoadBucket
from tests.unit.trigger.parts import event, lane_status, worker_status

BUDGET = 100
RATE = 200.0
SILENCE_MS = 3000.0
KEEP_S = 60.0
POLICY = Policy(risk_ms=10.0, stale_ms=1000.0, life_ms=2000.0, burst_ms=100.0, max_prefix_tokens=1000)


@dataclass
class Signal:
    """Of one byte a token; `owner`: the worker on whose statement it was admitted."""

    nbytes: int
    owner: str
    pending: Pending
    trigger: int


@dataclass
class Worker:
    """Reads signals in order, pins what fits, unpins what was ranked or whose life ended."""

    name: str
    read_to: int
    pinned: list[tuple[float, int]] = field(default_factory=list)  # (end of life, bytes)

    @property
    def pinned_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.pinned)

    def status(self) -> WorkerStatus:
        lane = lane_status(budget=BUDGET, pinned=self.pinned_bytes, offset=self.read_to, rate=RATE)
        return worker_status(lane, name=self.name, bytes_per_token=1, alloc_bytes=1)


class Bounds(RuleBasedStateMachine):
    """One lane. The real directory, decision, ledger and bucket; everything around them simulated."""

    @initialize()
    def begin(self) -> None:
        self.now = 1000.0
        self.log: list[Signal] = []
        self.flying: deque[Signal] = deque()  # handed to the producer, not in the log
        self.landed: deque[tuple[Signal, int]] = deque()  # in the log, acknowledgement under way
        self.statements: deque[WorkerStatus] = deque()
        self.workers = [Worker("w0", 0)]
        self.refused = 0
        self.unclean = False  # signals were read again, or a former owner spoke
        self.triggers = 0
        self.requests = 0
        self.start_trigger()

    def start_trigger(self) -> None:
        self.triggers += 1
        self.directory = OwnerDirectory(SILENCE_MS, clock=lambda: self.now)
        self.lane = LaneState(POLICY, len(self.log), KEEP_S, self.now)
        self.admitted: list[tuple[float, float]] = []  # (when, device ms)
        self.first_observed: float | None = None

    @property
    def worker(self) -> Worker:
        return self.workers[-1]

    def unpin_expired(self) -> None:
        for worker in self.workers:
            worker.pinned = [(ends, nbytes) for ends, nbytes in worker.pinned if ends > self.now]

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.unpin_expired()

    @rule(tokens=st.integers(5, 60))
    def event_comes(self, tokens: int) -> None:
        self.requests += 1
        request = event(tokens, f"r{self.requests}")
        owner = self.directory.owner(0)
        self.lane.observe(owner, self.now)
        if owner is not None and self.first_observed is None:
            self.first_observed = self.now
        decision = decide(request, policy=POLICY, lane=self.lane, owner=owner, age_ms=0.0, now_s=self.now)
        if decision.admit:
            assert owner is not None
            pending = self.lane.admit(request, decision, self.now)
            self.flying.append(Signal(tokens, owner.worker.name, pending, self.triggers))
            self.admitted.append((self.now, decision.cost_ms))
            self.check_load()

    def check_load(self) -> None:
        """No interval that ends now may have admitted more than burst and refill."""
        last_at, last_ms = self.admitted[-1]
        excess = max(0.0, last_ms - POLICY.burst_ms) + 1e-6
        total = 0.0
        for at, cost in reversed(self.admitted):
            total += cost
            assert total <= POLICY.burst_ms + RATE * (last_at - at) + excess
        assert self.first_observed is not None
        start = min(POLICY.burst_ms, RATE * START_S)
        assert total <= start + RATE * (last_at - self.first_observed) + excess

    @precondition(lambda self: self.flying)
    @rule()
    def signal_lands(self) -> None:
        signal = self.flying.popleft()
        self.landed.append((signal, len(self.log)))
        self.log.append(signal)

    @precondition(lambda self: self.landed)
    @rule()
    def acknowledgement_comes(self) -> None:
        signal, offset = self.landed.popleft()
        if signal.trigger == self.triggers:
            self.lane.ledger.acknowledged(signal.pending, offset, self.now)

    @precondition(lambda self: self.landed)
    @rule()
    def acknowledgement_is_lost(self) -> None:
        signal, _ = self.landed.popleft()
        if signal.trigger == self.triggers:
            self.lane.ledger.failed(signal.pending, self.now)

    @precondition(lambda self: self.flying)
    @rule()
    def signal_is_lost(self) -> None:
        signal = self.flying.popleft()
        if signal.trigger == self.triggers:
            self.lane.ledger.failed(signal.pending, self.now)

    @precondition(lambda self: self.worker.read_to < len(self.log))
    @rule()
    def worker_reads(self) -> None:
        worker = self.worker
        signal = self.log[worker.read_to]
        worker.read_to += 1
        if worker.pinned_bytes + signal.nbytes > BUDGET:
            # The bound itself: no worker has to refuse what was admitted on its own word.
            assert signal.owner != worker.name
            assert self.unclean
            self.refused += 1
        else:
            worker.pinned.append((self.now + POLICY.life_ms / 1000, signal.nbytes))

    @precondition(lambda self: self.worker.pinned)
    @rule(which=st.integers(0, 100))
    def request_is_ranked(self, which: int) -> None:
        del self.worker.pinned[which % len(self.worker.pinned)]

    @rule()
    def worker_states(self) -> None:
        self.statements.append(self.worker.status())

    @precondition(lambda self: len(self.workers) > 1)
    @rule()
    def former_owner_states(self) -> None:
        self.unclean = True
        self.statements.append(self.workers[-2].status())

    @precondition(lambda self: self.statements)
    @rule()
    def statement_arrives(self) -> None:
        self.directory.take(self.statements.popleft())

    @precondition(lambda self: self.statements)
    @rule()
    def statement_is_lost(self) -> None:
        self.statements.popleft()

    @rule()
    def owner_hands_over(self) -> None:
        self.workers.append(Worker(f"w{len(self.workers)}", self.worker.read_to))

    @precondition(lambda self: self.worker.read_to)
    @rule(again=st.integers(1, 5))
    def owner_crashes_and_its_successor_reads_again(self, again: int) -> None:
        self.unclean = True
        self.workers.append(Worker(f"w{len(self.workers)}", max(0, self.worker.read_to - again)))

    @rule()
    def trigger_restarts(self) -> None:
        # What the old one had under way has landed or never will.
        self.flying.clear()
        self.start_trigger()

    @precondition(lambda self: not self.landed and self.worker.read_to < len(self.log))
    @rule(count=st.integers(1, 3))
    def log_loses_its_tail(self, count: int) -> None:
        del self.log[max(self.worker.read_to, len(self.log) - count) :]

    @rule()
    def trigger_reconciles(self) -> None:
        self.lane.ledger.reconcile(len(self.log), self.now)

    @invariant()
    def owner_stays_within_its_budget(self) -> None:
        if hasattr(self, "workers"):
            assert all(worker.pinned_bytes <= BUDGET for worker in self.workers)

    def teardown(self) -> None:
        """Nothing counts for ever: once all is read and ranked or expired, the whole budget is free again."""
        if not hasattr(self, "workers"):
            return
        while self.flying:
            self.signal_lands()
        while self.landed:
            self.acknowledgement_comes()
        while self.worker.read_to < len(self.log):
            self.worker_reads()
        self.now += 10.0
        self.unpin_expired()
        self.lane.ledger.reconcile(len(self.log), self.now)
        self.directory.take(self.worker.status())
        self.lane.observe(self.directory.owner(0), self.now)
        assert self.lane.ledger.outstanding == 0
        assert self.lane.ledger.fits(BUDGET)


def run(examples: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Bounds,
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_both_bounds_hold_and_nothing_is_counted_for_ever() -> None:
    run(150)


def never_on_hold(ledger: LaneLedger) -> bool:
    return False


def only_what_is_pinned(ledger: LaneLedger) -> int:
    return ledger._pinned_bytes


def without_pending(ledger: LaneLedger) -> int:
    return ledger._pinned_bytes + ledger._unread_bytes


def without_unread(ledger: LaneLedger) -> int:
    return ledger._pinned_bytes + ledger._pending_bytes


def forgetting_what_was_read(original: Callable[..., None]) -> Callable[..., None]:
    def observe(ledger: LaneLedger, status: object) -> None:
        original(ledger, status)
        ledger._logged = [entry for entry in ledger._logged if entry.offset >= ledger._read_to]

    return observe


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (LaneLedger, "fits", lambda ledger, nbytes: not ledger.on_hold),
        (LaneLedger, "on_hold", property(never_on_hold)),
        (LaneLedger, "outstanding", property(only_what_is_pinned)),
        (LaneLedger, "outstanding", property(without_pending)),
        (LaneLedger, "outstanding", property(without_unread)),
        (LaneLedger, "observe", forgetting_what_was_read(LaneLedger.observe)),
        (LaneLedger, "failed", lambda ledger, pending, now_s: ledger._settle(pending)),
        (LaneLedger, "reconcile", lambda ledger, log_end, asked_s: 0),
        (LoadBucket, "allows", lambda bucket, cost_ms, now_s: True),
        (LoadBucket, "take", lambda bucket, cost_ms, now_s: None),
    ],
    ids=[
        "no footprint bound",
        "no hold after a restart",
        "only the owner's word",
        "unacknowledged signals forgotten",
        "unread signals forgotten",
        "read signals forgotten at once",
        "failed signals forgotten",
        "never reconciled",
        "no load bound",
        "load never charged",
    ],
)
def test_without_one_part_of_a_bound_the_machine_finds_it_broken(
    owner: type, name: str, broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError):
        run(2000)
