"""Workers in simulated time that forward to each other: real decisions and books of peers, a device that counts."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np

from relaygr_stream.engine.budgets import BusyShare
from relaygr_stream.engine.commands import Rank, RankTask, Times
from relaygr_stream.engine.forecast import Forecast
from relaygr_stream.engine.ranking import Ranking
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.models.api import Tokens
from relaygr_stream.wire.messages import CostModel, WorkerStatus
from relaygr_stream.wire.topic_files import lane_of
from relaygr_stream.worker.forwarding import Forwarding
from tests.statuses import lane_statuses, worker_status

STATUS_S, TRAVEL_S = 0.25, 0.005
NOTHING = Tokens(np.zeros((3, 0), np.int64))


@dataclass
class Request:
    """What a client asked for."""

    number: int
    user: str
    tokens: int
    at: float
    timeout_s: float


@dataclass
class Sent:
    """One forward: when, from whom to whom, its cost there, and the time that was left."""

    at: float
    to: str
    ms: float
    left_ms: float
    status: WorkerStatus


@dataclass
class Books:
    """Everything that happened."""

    answers: defaultdict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    computed: Counter[int] = field(default_factory=Counter)
    visited: defaultdict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    sent: defaultdict[str, list[Sent]] = field(default_factory=lambda: defaultdict(list))
    device_ms: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def count(self, status: str) -> int:
        return sum(answer == status for given in self.answers.values() for answer in given)


class Worker:
    """Its lanes, a queue by deadline and a device that does one ranking after the other."""

    def __init__(self, fleet: Fleet, name: str, lanes: list[int], ms_per_token: float, forward: bool) -> None:
        self.fleet, self.name, self.lanes = fleet, name, lanes
        self.ms_per_token = ms_per_token
        self.peers = OwnerDirectory(1500.0, clock=lambda: fleet.now)
        self.forwarding = Forwarding(name, self.peers, fleet, seed=1) if forward else None
        self.forecast = Forecast()
        self.queue: list[tuple[float, int, Ranking]] = []
        self.running = False
        self.busy = BusyShare()
        self.delays: list[float] = []

    def read(self, request: Request, hops: int) -> None:
        fleet, books = self.fleet, self.fleet.books
        books.visited[request.number].append(self.name)
        left_s = request.at + request.timeout_s - fleet.now
        if left_s <= 0:
            books.answers[request.number].append("deadline_exceeded")
            return
        task = RankTask(
            str(request.number), request.user, 0, NOTHING, NOTHING, np.zeros(1, np.int64),
            Times(fleet.now, fleet.now + left_s), full=False, hops=hops, origin=request,
        )  # fmt: skip
        ranking = Ranking.of(Rank(task))
        ranking.booking.number, ranking.booking.expected_ms = request.number, request.tokens * self.ms_per_token
        if not self.forecast.full(ranking, fleet.now):
            self.forecast.add(ranking)
            heapq.heappush(self.queue, (task.deadline, request.number, ranking))
            self.next()
            return
        lane = "off" if self.forwarding is None else self.forwarding.elsewhere(
            request.user, request.tokens, 0, hops, left_s * 1e3, fleet.now
        )  # fmt: skip
        if isinstance(lane, str):
            books.answers[request.number].append("overloaded")
            return
        to = fleet.owner[lane]
        ms = request.tokens * to.ms_per_token
        books.sent[self.name].append(Sent(fleet.now, to.name, ms, left_s * 1e3, self.peers.workers()[to.name]))
        fleet.after(TRAVEL_S, partial(to.read, request, hops + 1))

    def next(self) -> None:
        while self.queue and not self.running:
            _, number, ranking = heapq.heappop(self.queue)
            if ranking.deadline <= self.fleet.now:
                self.end(ranking, "deadline_exceeded")
                continue
            self.running = True
            self.delays.append(self.fleet.now - ranking.task.arrived)
            self.fleet.books.computed[number] += 1
            self.fleet.after(ranking.booking.expected_ms / 1e3, partial(self.finish, ranking))

    def finish(self, ranking: Ranking) -> None:
        self.running = False
        self.fleet.books.device_ms[self.name] += ranking.booking.expected_ms
        self.end(ranking, "ok" if self.fleet.now <= ranking.deadline else "deadline_exceeded")
        self.next()

    def end(self, ranking: Ranking, status: str) -> None:
        self.forecast.remove(ranking)
        self.fleet.books.answers[ranking.task.origin.number].append(status)

    def state(self) -> None:
        waited = [self.fleet.now - each.task.arrived for _, _, each in self.queue]
        mean = sum(self.delays) / len(self.delays) if self.delays else 0.0
        self.delays.clear()
        status = worker_status(
            self.name,
            lane_statuses(self.lanes),
            costs=CostModel(c0=0, c1=self.ms_per_token, c2=0, c3=0),
            queue_ms=1e3 * max([mean, *waited]),
            busy_share=self.busy.update(self.fleet.books.device_ms[self.name], STATUS_S),
        )
        for worker in self.fleet.workers:
            self.fleet.after(TRAVEL_S, partial(worker.peers.take, status))
        self.fleet.after(STATUS_S, self.state)


class Fleet:
    """So many workers with so many lanes each; statuses begin at different times. speeds: milliseconds a token."""

    def __init__(self, speeds: list[float], lanes_each: int, forward: bool) -> None:
        self.now = 100.0
        self.lanes = len(speeds) * lanes_each
        self.books = Books()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.workers = [
            Worker(self, f"w{number}", list(range(number, self.lanes, len(speeds))), speed, forward)
            for number, speed in enumerate(speeds)
        ]
        self.owner = {lane: worker for worker in self.workers for lane in worker.lanes}
        for number, worker in enumerate(self.workers):
            self.after(STATUS_S * number / len(speeds), worker.state)

    def lane_of(self, user_id: str) -> int:
        return lane_of(user_id, self.lanes)

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def run(self, requests: list[Request]) -> Books:
        """Send these, and wait until nothing waits any more."""
        for request in requests:
            home = self.owner[self.lane_of(request.user)]
            self.after(request.at - self.now, partial(home.read, request, 0))
        end = max(request.at + request.timeout_s for request in requests) + 5.0
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.books


@cache
def users_of(lane: int, lanes: int, count: int) -> list[str]:
    """Users whose lane that is."""
    names = (f"u{number}" for number in itertools.count())
    return list(itertools.islice((name for name in names if lane_of(name, lanes) == lane), count))
