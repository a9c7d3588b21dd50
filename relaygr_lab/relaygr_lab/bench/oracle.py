"""An oracle queue: what the devices could serve with perfect knowledge and no bus, a request at a time.

It has the same costs and the same kind of arrivals as a probe, and its scheduler knows everything at once: where prefix
KV are (everywhere), what is due, and which device is free. It scores each ranking alone, so it is no upper bound: a
relay that scores rankings together shares an operation's fixed time, and may carry more where prefixes are short.
Without head start it is the queue of textbooks, and is tested against their closed forms.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr_lab.bench.modes import Mode
from relaygr_lab.bench.options import DELAY_SIGMA
from relaygr_lab.bench.search import bisected
from relaygr_lab.bench.statistics import QUANTILE
from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_stream.workload.arrivals import ArrivalLog
from relaygr_stream.workload.quantiles import nearest_rank

Floats = npt.NDArray[np.float64]

#: Requests of one queue: a hundred of them beyond the 99th percentile, so that the rate found is good to a few percent.
REQUESTS: Final = 10_000
#: The first share is not judged: the queue begins empty.
SETTLING: Final = 0.1
#: Halvings of the bracket of a rate, which begins at the devices' capacity: to 0.1 %.
HALVINGS: Final = 10


@dataclass(frozen=True)
class Shape:
    """What the requests of a queue have in common. Times in milliseconds."""

    length: int
    revisit: float
    rows: int  # suffix and candidates
    growth: float
    delay_ms: float  # head start, median
    slo_ms: float
    workers: int
    short: int = 0  # tokens of short users
    short_share: float = 0.0

    def lengths(self, draws: Floats) -> Floats:
        """The prefix of each request. draws: evenly between 0 and 1."""
        return np.where(draws < self.short_share, float(self.short), float(self.length))

    def first_ms(self, costs: DeviceCosts, lengths: Floats) -> Floats:
        """Device time of a first visit's prefix."""
        e0, e1, e2 = costs.prefill_ms
        return np.asarray(e0 + e1 * lengths + e2 * lengths * lengths / 2)

    def hit_ms(self, costs: DeviceCosts, lengths: Floats, more: Floats | float = 0.0) -> Floats:
        """Device time of a ranking that finds its prefix KV. more: further rows, such as new behaviours."""
        e0, e1, e2 = costs.score_ms
        return np.asarray(e0 + (self.rows + more) * (e1 + e2 * lengths))


def largest_rate(mode: Mode, costs: DeviceCosts, shape: Shape, log: ArrivalLog | None = None) -> float:
    """The largest rate (requests/s) whose P99 is within the SLO; 0 if none is.

    The same arrivals serve every rate and every mode: Poisson, or those of a log again and again.
    """
    rng = np.random.default_rng(0)
    gaps, returns = rng.exponential(size=REQUESTS), rng.random(REQUESTS) < (shape.revisit if mode.keeps else 0.0)
    if log is not None:
        gaps = np.resize(log.gaps, REQUESTS)
        if log.users is not None and mode.keeps:
            returns = np.resize(log.returning, REQUESTS)
    delays = shape.delay_ms * np.exp(DELAY_SIGMA * rng.standard_normal(REQUESTS))
    servers = rng.integers(shape.workers, size=REQUESTS)
    lengths = shape.lengths(rng.random(REQUESTS))
    prefix = np.where(returns, 0.0, shape.first_ms(costs, lengths))
    # A return's new behaviours are scored with the suffix, which costs least.
    hit = shape.hit_ms(costs, lengths, np.where(returns, shape.growth, 0.0))
    capacity = 1e3 * shape.workers / float((prefix + hit).mean())

    def in_time(rate: float) -> bool:
        arrivals = np.cumsum(gaps) * 1e3 / rate
        if mode.announce:
            latency = relayed(arrivals, arrivals + delays, prefix, hit, shape.workers)
        elif mode.route == "lane":
            latency = by_lane(arrivals, prefix + hit, servers)
        else:
            latency = first_come(arrivals, prefix + hit, shape.workers)
        judged = latency[int(SETTLING * len(latency)) :]
        return nearest_rank(judged, QUANTILE) <= shape.slo_ms

    return capacity * bisected(lambda busy: in_time(busy * capacity), 0.0, 1.0, HALVINGS)


def first_come(arrivals: Floats, service: Floats, servers: int) -> Floats:
    """Times in a queue of several servers, first come, first served: of each request, its wait and its service."""
    free = [0.0] * servers
    latency = np.empty(len(arrivals))
    for index, (at, needs) in enumerate(zip(arrivals.tolist(), service.tolist(), strict=True)):
        done = max(at, free[0]) + needs
        heapq.heapreplace(free, done)
        latency[index] = done - at
    return latency


def by_lane(arrivals: Floats, service: Floats, lanes: npt.NDArray[np.int64]) -> Floats:
    """As first_come, where each request has its server."""
    latency = np.empty(len(arrivals))
    for lane in np.unique(lanes):
        own = lanes == lane
        latency[own] = first_come(arrivals[own], service[own], 1)
    return latency


def relayed(announced: Floats, ranked: Floats, prefix: Floats, hit: Floats, servers: int) -> Floats:
    """Times from the ranking request to its end, where the prefix may be computed from the announcement on.

    Earliest deadline first over all servers, interrupting: equal SLOs make that the order of ranking requests. A prefix
    that is not complete when its ranking comes is continued; its ranking follows at once.
    """
    queue = _Deadlines(ranked, servers)
    events = [(at, index, False) for index, at in enumerate(announced.tolist())]
    events += [(at, index, True) for index, at in enumerate(ranked.tolist())]
    heapq.heapify(events)
    prefixes, hits = prefix.tolist(), hit.tolist()
    while events:
        at, index, is_ranking = heapq.heappop(events)
        queue.run_until(at)
        if is_ranking:
            queue.add(index, hits[index])
        elif prefixes[index] > 0:
            queue.add(index, prefixes[index])
    queue.run_until(np.inf)
    return queue.done - ranked


class _Deadlines:
    """Jobs on servers by the earliest deadline, interrupting. A request's job is its work known so far, in order."""

    def __init__(self, deadlines: Floats, servers: int) -> None:
        self._deadline = deadlines.tolist()
        self._servers = servers
        self._now = 0.0
        self._left: dict[int, float] = {}  # request → work
        self._waiting: list[tuple[float, int]] = []
        self._running: list[tuple[float, int]] = []  # at most one a server
        self.done = np.zeros(len(deadlines))

    def add(self, index: int, work: float) -> None:
        """More work of a request, from now on."""
        if index in self._left:
            self._left[index] += work
            return
        self._left[index] = work
        job = (self._deadline[index], index)
        if len(self._running) < self._servers:
            self._running.append(job)
            return
        latest = max(self._running)
        if job < latest:
            self._running.remove(latest)
            self._running.append(job)
            job = latest
        heapq.heappush(self._waiting, job)

    def run_until(self, time: float) -> None:
        """Work on the running jobs up to this time."""
        while self._running:
            first = min(self._running, key=lambda job: self._left[job[1]])
            step = self._left[first[1]]
            if self._now + step > time:
                for _, index in self._running:
                    self._left[index] -= time - self._now
                break
            self._now += step
            for _, index in self._running:
                self._left[index] -= step
            self._running.remove(first)
            del self._left[first[1]]
            self.done[first[1]] = self._now
            if self._waiting:
                self._running.append(heapq.heappop(self._waiting))
        self._now = max(self._now, time)
