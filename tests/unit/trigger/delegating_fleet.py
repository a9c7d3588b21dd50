"""Workers in simulated time behind the trigger's real decisions: first visits, with and without delegation."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from relaygr_stream.engine.budgets import BusyShare
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.trigger.core import Delegate, Signal, TriggerCore
from relaygr_stream.trigger.decision import Policy
from relaygr_stream.trigger.delegation import Delegation
from relaygr_stream.trigger.sent import SentBooks
from relaygr_stream.wire.messages import CostModel, WorkerStatus
from tests.unit.trigger.parts import behaviours, event, lane_status, worker_status

STATUS_S, TRAVEL_S, SLICE_S = 0.25, 0.005, 0.005
TOKENS, TOKEN_MS, SCORE_MS = 195, 0.5, 2.5
PREFILL_MS = TOKENS * TOKEN_MS
SERVICE_MS = PREFILL_MS + SCORE_MS
POLICY = Policy(stale_ms=1000.0, life_ms=2000.0, max_prefix_tokens=1000, delegate=True)
#: owners, what was sent, lanes, seed
MakeDelegation = Callable[[OwnerDirectory, SentBooks, int, int], Delegation]


@dataclass(eq=False)
class Job:
    """Prefix KV on the way, then the score. ranked_s: when its ranking came; None: not yet."""

    number: int
    due_s: float
    left_ms: float = PREFILL_MS
    ranked_s: float | None = None
    started: bool = False


class Worker:
    """A device that gives slices to rankings and what they wait for, then to pre-inference, each by due time."""

    def __init__(self, fleet: Fleet, name: str, lanes: list[int]) -> None:
        self.fleet, self.name, self.lanes = fleet, name, lanes
        self.jobs: dict[int, Job] = {}
        self.working = False
        self.ranking = BusyShare()
        self.ranking_ms = 0.0
        self.delays: list[float] = []

    def prefill(self, number: int, due_s: float) -> None:
        if number in self.fleet.answered_s or number in self.jobs:
            return
        self.jobs[number] = Job(number, due_s)
        self.work()

    def rank(self, number: int) -> None:
        job = self.jobs.setdefault(number, Job(number, self.fleet.now))
        self.fleet.outcomes["full" if job.left_ms == PREFILL_MS and not job.started else "hit"] += 1
        job.ranked_s, job.due_s = self.fleet.now, self.fleet.now
        job.left_ms += SCORE_MS
        job.started = False
        self.work()

    def work(self) -> None:
        if not self.working:
            self.working = True
            self.fleet.after(0.0, self.slice)

    def slice(self) -> None:
        ready = [job for job in self.jobs.values() if job.left_ms > 0]
        if not ready:
            self.working = False
            return
        job = min(ready, key=lambda each: (each.ranked_s is None, each.due_s))
        if job.ranked_s is not None and not job.started:
            self.delays.append((self.fleet.now - job.ranked_s) * 1e3)
        job.started = True
        ms = min(job.left_ms, SLICE_S * 1e3)
        self.fleet.after(ms / 1e3, partial(self.sliced, job, ms))

    def sliced(self, job: Job, ms: float) -> None:
        job.left_ms -= ms
        if job.ranked_s is not None:
            self.ranking_ms += ms
            if job.left_ms <= 1e-9:
                del self.jobs[job.number]
                self.fleet.answer(job.number, self.name)
        self.slice()

    def state(self) -> WorkerStatus:
        waiting = sum(job.left_ms for job in self.jobs.values() if job.ranked_s is None)
        ranking_share = self.ranking.update(self.ranking_ms, STATUS_S)
        unstarted = [job.ranked_s for job in self.jobs.values() if job.ranked_s is not None and not job.started]
        waits = [(self.fleet.now - ranked_s) * 1e3 for ranked_s in unstarted]
        queue = max([*waits, float(np.mean(self.delays)) if self.delays else 0.0])
        self.delays = []
        lanes = (lane_status(lane=lane, budget=10**9) for lane in self.lanes)
        plain = worker_status(
            *lanes,
            name=self.name,
            costs=CostModel(c0=0.0, c1=TOKEN_MS, c2=0.0, c3=0.0),
            queue_ms=queue,
            pre_infer_wait_ms=waiting / max(0.02, 1.0 - ranking_share),
        )
        return msgspec.structs.replace(plain, delegated_bytes=10**9)


@dataclass
class Books:
    """What happened: who answered, when, and how the trigger decided."""

    latencies_ms: list[float] = field(default_factory=list)
    decisions: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    answers: defaultdict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    delegates: dict[int, str] = field(default_factory=dict)
    homes: dict[int, str] = field(default_factory=dict)

    def p(self, q: float) -> float:
        return float(np.quantile(self.latencies_ms, q))


class Fleet:
    """`each` lanes a worker, divided among triggers. make: their delegation; None: they delegate nothing."""

    def __init__(self, workers: int, each: int, make: MakeDelegation | None, triggers: int = 1) -> None:
        self.now = 100.0
        self.books = Books()
        self.outcomes = self.books.outcomes
        self.answered_s: dict[int, float] = {}
        self.ranked_s: dict[int, float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.owners = OwnerDirectory(3000.0, clock=lambda: self.now)
        count = workers * each
        self.cores = [
            TriggerCore(POLICY, self.owners, delegation=make and make(self.owners, SentBooks(), count, seed))
            for seed in range(triggers)
        ]
        self.workers = [Worker(self, f"w{n}", list(range(n * each, (n + 1) * each))) for n in range(workers)]
        self.by_name = {worker.name: worker for worker in self.workers}
        self.core_of = [self.cores[lane % triggers] for lane in range(count)]
        for lane, core in enumerate(self.core_of):
            core.take_lane(lane)
        self.home = {lane: worker for worker in self.workers for lane in worker.lanes}
        for number, worker in enumerate(self.workers):
            self.after(number * STATUS_S / workers, partial(self.state, worker))

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), do))

    def state(self, worker: Worker) -> None:
        self.after(TRAVEL_S, partial(self.owners.take, worker.state()))
        self.after(STATUS_S, partial(self.state, worker))

    def run(self, load: float, seconds: float, head_start_s: float, seed: int = 1) -> Books:
        """Poisson arrivals that take this share of all devices."""
        random = np.random.default_rng(seed)
        at, number, until = self.now + 1.0, 0, self.now + 1.0 + seconds
        while (at := at + random.exponential(SERVICE_MS / 1e3 / load / len(self.workers))) < until:
            lane = int(random.integers(len(self.core_of)))
            self.after(at - self.now, partial(self.announce, number, lane, head_start_s))
            number += 1
        while self._events and len(self.answered_s) < number:
            self.now, _, do = heapq.heappop(self._events)
            do()
        return self.books

    def announce(self, number: int, lane: int, head_start_s: float) -> None:
        asked = event(0, str(number), f"u{number}", rank_in_ms=head_start_s * 1e3)
        asked = msgspec.structs.replace(asked, prefix=PREFIX)
        effect = self.core_of[lane].on_event(lane, asked, 0.0, self.now)
        found = effect.decision
        self.books.decisions[found.reason] += 1
        home, due_s = self.home[lane], self.now + head_start_s
        self.books.homes[number] = home.name
        target = home
        if found.delegate is not None:
            target = self.by_name[found.delegate.worker]
            self.books.delegates[number] = target.name
        if isinstance(effect, Signal | Delegate):
            self.after(TRAVEL_S, partial(target.prefill, number, due_s))
        ways = 1 + (target is not home)
        self.ranked_s[number] = due_s
        self.after(head_start_s + ways * TRAVEL_S, partial(target.rank, number))

    def answer(self, number: int, worker: str) -> None:
        self.books.answers[number].append(worker)
        self.answered_s[number] = self.now
        self.books.latencies_ms.append((self.now - self.ranked_s[number] + TRAVEL_S) * 1e3)


PREFIX = behaviours(TOKENS)
