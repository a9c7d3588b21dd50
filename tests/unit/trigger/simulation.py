"""A simulated lane around the trigger's real directory, decision, ledger and bucket.

Simulated are time, the log, the workers that read it and what can go wrong in between: late and lost statements, lost
and ambiguous sends, handed-over and crashed owners, restarted triggers, bursts, events that come twice, requests that
are never ranked, rates that change, a log that loses its tail. Each seed draws its own budgets and its own mix of
these, so that some runs are calm and some are one disaster over and over.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from relaygr_stream.fleet import Claim, OwnerDirectory
from relaygr_stream.trigger.core import Signal as Admitted
from relaygr_stream.trigger.core import TriggerCore
from relaygr_stream.trigger.decision import Policy
from relaygr_stream.trigger.ledger import Pending
from relaygr_stream.trigger.load import OWNER_S
from relaygr_stream.wire.messages import RequestEvent, WorkerStatus
from tests.unit.trigger.parts import behaviours, lane_status, worker_status

SILENCE_MS: Final = 3000.0
KEEP_S: Final = 60.0
POLICY: Final = Policy(stale_ms=1000.0, life_ms=2000.0, burst_ms=100.0, max_prefix_tokens=1000)
LONGEST: Final = 130  # tokens; costs a millisecond each, so some cost more than a burst
PREFIXES: Final = [behaviours(tokens) for tokens in range(LONGEST + 1)]

#: What happens, and how often in a calm run.
CALM: Final = {
    "event_comes": 10.0,
    "time_passes": 6.0,
    "signal_lands": 9.0,
    "acknowledgement_comes": 9.0,
    "worker_reads": 9.0,
    "request_is_ranked": 4.0,
    "worker_states": 4.0,
    "statement_arrives": 5.0,
}
#: What goes wrong, or is rare.
TROUBLE: Final = {
    "statement_is_lost": 1.0,
    "signal_is_lost": 0.3,
    "acknowledgement_is_lost": 0.3,
    "former_owner_states": 0.3,
    "owner_hands_over": 0.3,
    "owner_crashes_and_its_successor_reads_again": 0.3,
    "trigger_restarts": 0.3,
    "log_loses_its_tail": 0.2,
    "a_long_time_passes": 0.2,
    "trigger_reconciles": 1.0,
    "a_burst_comes": 0.3,
    "an_event_comes_again": 2.0,
    "owner_changes_its_rate": 0.5,
}


@dataclass
class Signal:
    """A byte a token. trigger: that admitted it."""

    nbytes: int
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


class Lane:
    """One run. Every step asserts the bound; `settle` asserts that nothing is counted for ever."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.budget = self.random.choice([150, 300, 1500])
        self.rate = self.random.choice([50.0, 500.0, 1e6])
        self.now = 1000.0
        self.log: list[Signal] = []
        self.sent: deque[Signal] = deque()  # handed to the producer, not in the log
        self.logged: deque[tuple[Signal, int]] = deque()  # in the log, acknowledgement under way
        self.statements: deque[WorkerStatus] = deque()
        self.workers = [Worker("w0", 0)]
        self.triggers = 0
        self.requests = 0
        self.admissions = 0
        self.start_trigger()

    def run_checked(self, steps: int) -> None:
        """Let things happen, then settle; what must hold is checked at each step."""
        weights = dict(CALM)
        for name in self.random.sample(list(TROUBLE), self.random.randint(0, len(TROUBLE))):
            weights[name] = TROUBLE[name] * self.random.choice([1.0, 3.0, 10.0])
        for name in CALM:
            weights[name] *= self.random.choice([0.3, 1.0, 1.0, 3.0])
        if self.random.random() < 0.2:
            weights["request_is_ranked"] = 0.0  # then every pin lasts as long as its life
        for name in self.random.choices(list(weights), list(weights.values()), k=steps):
            getattr(self, name)()
        self.settle()

    @property
    def worker(self) -> Worker:
        return self.workers[-1]

    # ---- the trigger ----

    def start_trigger(self) -> None:
        self.triggers += 1
        self.directory = OwnerDirectory(SILENCE_MS, clock=lambda: self.now)
        self.core = TriggerCore(POLICY, self.directory, KEEP_S)
        self.core.take_lane(0, len(self.log), self.now)
        self.admitted: list[tuple[float, float]] = []  # (what was refilled until then, device ms)
        self.admitted_ids: dict[str, float] = {}  # request id → when
        self.refilled: float | None = None  # device ms that the rates known to the trigger have given; None: no rate
        self.start_ms = 0.0
        self.known_rate = 0.0
        self.known_owner = ""
        self.known_at = self.now

    def event_comes(self) -> None:
        self.requests += 1
        tokens = self.random.randint(5, self.random.choice([30, LONGEST]))
        self.decide_on(RequestEvent(request_id=str(self.requests), user_id="u", prefix=PREFIXES[tokens], candidates=0))

    def a_burst_comes(self) -> None:
        for _ in range(self.random.randint(5, 60)):
            self.event_comes()

    def an_event_comes_again(self) -> None:
        if self.requests:
            again = self.requests - self.random.randint(0, min(20, self.requests - 1))
            tokens = self.random.randint(5, 30)
            self.decide_on(RequestEvent(request_id=str(again), user_id="u", prefix=PREFIXES[tokens], candidates=0))

    def observe(self) -> Claim | None:
        owner = self.directory.owner(0)
        self.core.observe(0, self.now)
        if self.refilled is not None:
            self.refilled += self.known_rate * (self.now - self.known_at)
        self.known_at = self.now
        if owner is not None:
            if owner.worker.name != self.known_owner:  # what another one granted does not count
                self.known_owner, self.refilled = owner.worker.name, None
                self.admitted.clear()
            self.known_rate = owner.lane.device_ms_per_s
            if self.refilled is None:
                self.refilled, self.start_ms = 0.0, min(POLICY.burst_ms, self.known_rate * OWNER_S)
        return owner

    def decide_on(self, event: RequestEvent) -> None:
        owner = self.observe()
        effect = self.core.on_event(0, event, 0.0, self.now)
        decision = effect.decision
        if isinstance(effect, Admitted):
            assert owner is not None
            assert self.refilled is not None
            before = self.admitted_ids.get(event.request_id)
            assert before is None or self.now - before > POLICY.life_ms / 1000, "admitted twice"
            self.admitted_ids[event.request_id] = self.now
            self.sent.append(Signal(decision.nbytes, effect.pending, self.triggers))
            self.admitted.append((self.refilled, decision.cost_ms))
            self.admissions += 1
            self.check_load()

    def check_load(self) -> None:
        """No interval that ends now may have admitted more than burst and refill."""
        refilled, last_ms = self.admitted[-1]
        excess = max(0.0, last_ms - min(POLICY.burst_ms, self.known_rate * OWNER_S)) + 1e-6
        total = 0.0
        for at, cost in reversed(self.admitted):
            total += cost
            assert total <= POLICY.burst_ms + refilled - at + excess, "load"
        assert total <= self.start_ms + refilled + excess, "load since the start"

    def trigger_restarts(self) -> None:
        self.sent.clear()  # what the old one had under way has landed, or never will
        self.start_trigger()

    def trigger_reconciles(self) -> None:
        self.observe()  # the core observes, too: what it knows is counted here
        self.core.on_log_end(0, len(self.log), self.now, self.now)

    # ---- the log ----

    def signal_lands(self) -> None:
        if self.sent:
            signal = self.sent.popleft()
            self.logged.append((signal, len(self.log)))
            self.log.append(signal)

    def acknowledgement_comes(self) -> None:
        if self.logged:
            signal, offset = self.logged.popleft()
            if signal.trigger == self.triggers:
                self.core.on_acknowledged(0, signal.pending, offset, self.now)

    def acknowledgement_is_lost(self) -> None:
        if self.logged:
            signal, _ = self.logged.popleft()
            if signal.trigger == self.triggers:
                self.core.on_not_sent(0, signal.pending, self.now, taken=True)

    def signal_is_lost(self) -> None:
        if self.sent:
            signal = self.sent.popleft()
            if signal.trigger == self.triggers:
                self.core.on_not_sent(0, signal.pending, self.now, taken=True)

    def log_loses_its_tail(self) -> None:
        if not self.logged:
            del self.log[max(self.worker.read_to, len(self.log) - self.random.randint(1, 3)) :]

    # ---- workers and their statements ----

    def worker_reads(self) -> None:
        worker = self.worker
        if worker.read_to == len(self.log):
            return
        signal = self.log[worker.read_to]
        worker.read_to += 1
        if worker.pinned_bytes + signal.nbytes <= self.budget:
            worker.pinned.append((self.now + POLICY.life_ms / 1000, signal.nbytes))

    def request_is_ranked(self) -> None:
        if self.worker.pinned:
            del self.worker.pinned[self.random.randrange(len(self.worker.pinned))]

    def worker_states(self) -> None:
        self.statements.append(self.statement(self.worker))

    def owner_changes_its_rate(self) -> None:
        self.rate = self.random.choice([0.0, 20.0, 50.0, 500.0, 1e6])

    def former_owner_states(self) -> None:
        if len(self.workers) > 1:
            self.statements.append(self.statement(self.workers[-2]))

    def statement(self, worker: Worker) -> WorkerStatus:
        lane = lane_status(budget=self.budget, pinned=worker.pinned_bytes, offset=worker.read_to, rate=self.rate)
        return worker_status(lane, name=worker.name, bytes_per_token=1, alloc_bytes=1)

    def statement_arrives(self) -> None:
        if self.statements:
            self.directory.take(self.statements.popleft())

    def statement_is_lost(self) -> None:
        if self.statements:
            self.statements.popleft()

    def owner_hands_over(self) -> None:
        self.take_over(self.worker.read_to)

    def owner_crashes_and_its_successor_reads_again(self) -> None:
        again = self.random.randint(0, min(5, self.worker.read_to))
        self.take_over(self.worker.read_to - again)

    def take_over(self, read_to: int) -> None:
        self.workers.append(Worker(f"w{len(self.workers)}", read_to))
        self.worker_states()

    # ---- time ----

    def time_passes(self, seconds: float | None = None) -> None:
        self.now += self.random.choice([0.001, 0.01, 0.05, 0.2]) if seconds is None else seconds
        for worker in self.workers:
            worker.pinned = [(ends, nbytes) for ends, nbytes in worker.pinned if ends > self.now]

    def a_long_time_passes(self) -> None:
        self.time_passes(self.random.choice([1.0, 2.5, 5.0]))

    def settle(self) -> None:
        """Once all is read, and ranked or expired, the whole budget must be free again."""
        while self.sent:
            self.signal_lands()
        while self.logged:
            self.acknowledgement_comes()
        while self.worker.read_to < len(self.log):
            self.worker_reads()
        self.time_passes(10.0)
        self.trigger_reconciles()
        self.directory.take(self.statement(self.worker))
        self.observe()
        ledger = self.core.observe(0, self.now).ledger
        assert ledger.outstanding == 0, "counted for ever"
        assert not ledger.on_hold, "on hold for ever"
