"""Simulated traffic: an open Poisson stream of requests by users who return, with the lengths of their histories.

First visits are a Poisson process, with Zipf or uniform users. After each request, the user returns with probability
`revisit`, after an exponential time. The total rate is then `rate`. All visits of a user are on one lane, so a part of
the fleet can be simulated with exactly its own users.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from relaygr_stream.errors import ConfigError
from relaygr_stream.lab.workload.items import StageDelay
from relaygr_stream.trigger.decision import Reason
from relaygr_stream.wire.messages import Outcome, Status

#: Users drawn at once, since each call of numpy has a fixed cost.
BLOCK: Final = 1 << 14
#: Ranks whose Zipf weights are summed exactly; beyond, the sum is replaced by its integral, with a relative error below
#: 1e-10.
EXACT_RANKS: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The traffic of the whole fleet. Raises ConfigError for a number out of range."""

    rate: float  # requests per second
    users: int
    exponent: float = 0.0  # of the Zipf law over users; 0: uniform
    revisit: float = 0.5  # share of requests that are returns
    return_s: float = 20.0  # mean time from a request to the return
    length: float = 1024.0  # prefix tokens at a user's first request: median of a log-normal law
    sigma: float = 0.0  # of that law
    growth: float = 3.0  # mean new behaviours at a return: 1 + Poisson
    max_prefix: int = 4096
    suffix: int = 8
    candidates: int = 100
    delay: StageDelay = field(default_factory=StageDelay)

    def __post_init__(self) -> None:
        for name in ("rate", "users", "return_s", "length", "max_prefix", "candidates"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be above 0")
        for name in ("exponent", "sigma", "suffix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 0")
        if not 0 <= self.revisit < 1:
            raise ConfigError(f"revisit = {self.revisit:g}: must be a probability below 1")
        if self.growth < 1:
            raise ConfigError(f"growth = {self.growth:g}: a return brings at least 1 new behaviour")
        if self.length > self.max_prefix:
            raise ConfigError(f"length = {self.length:g}: relay.max_prefix_tokens is {self.max_prefix}")


@dataclass(frozen=True)
class Part:
    """The lanes first … first + lanes − 1 of all."""

    first: int
    lanes: int
    all_lanes: int

    @property
    def share(self) -> float:
        """The part's share of all users."""
        return self.lanes / self.all_lanes


class Arrival(NamedTuple):
    """One request: event at `at`, ranking at `rank_at` (seconds); lane: within the part."""

    at: float
    rank_at: float
    user: int
    lane: int
    prefix: int
    returning: bool


def arrivals(traffic: Traffic, part: Part, seed: int) -> Iterator[Arrival]:
    """The part's requests in the order of their events, for ever; the same for the same seed."""
    rng = np.random.default_rng(seed)
    newcomers = _newcomers(traffic, part, rng)
    rate = traffic.rate * part.share
    lengths: dict[int, int] = {}
    delays = _delays(traffic.delay, rng)
    # The stream starts in its steady state: pending returns are Poisson, and times to a return are memoryless.
    pending = int(rng.poisson(rate * traffic.revisit * traffic.return_s))
    returns = [(float(rng.exponential(traffic.return_s)), *next(newcomers)) for _ in range(pending)]
    heapq.heapify(returns)
    first = rate * (1 - traffic.revisit)
    next_first = float(rng.exponential(1 / first))
    while True:
        if returns and returns[0][0] <= next_first:
            at, user, lane = heapq.heappop(returns)
        else:
            at, (user, lane) = next_first, next(newcomers)
            next_first += float(rng.exponential(1 / first))
        known = lengths.get(user)
        if known is None:
            prefix = max(1, round(traffic.length * math.exp(traffic.sigma * float(rng.standard_normal()))))
        else:
            prefix = known + 1 + int(rng.poisson(traffic.growth - 1))
        lengths[user] = prefix = min(prefix, traffic.max_prefix)
        if rng.random() < traffic.revisit:
            heapq.heappush(returns, (at + float(rng.exponential(traffic.return_s)), user, lane))
        yield Arrival(at, at + next(delays), user, lane, prefix, known is not None)


class UserLaw:
    """User ranks 0…users−1 with weights (rank + 1)^−exponent."""

    def __init__(self, users: int, exponent: float) -> None:
        self._users = users
        self._exponent = exponent
        exact = min(users, EXACT_RANKS) if exponent else 0
        self._head = np.cumsum(np.arange(1, exact + 1, dtype=np.float64) ** -exponent)
        self._tail = self._integral(users + 0.5) - self._integral(exact + 0.5) if users > exact > 0 else 0.0

    def draw(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """Draw `count` independent ranks."""
        if not self._exponent:
            return rng.integers(0, self._users, count, np.int64)
        head = self._head
        drawn = rng.random(count) * (head[-1] + self._tail)
        ranks = np.searchsorted(head, drawn, side="right").astype(np.int64)
        beyond = ranks >= len(head)
        at = self._inverse(drawn[beyond] - head[-1] + self._integral(len(head) + 0.5))
        ranks[beyond] = np.minimum(np.rint(at).astype(np.int64), self._users) - 1
        return np.asarray(ranks, np.int64)

    def _integral(self, x: float) -> float:
        return math.log(x) if self._exponent == 1 else x ** (1 - self._exponent) / (1 - self._exponent)

    def _inverse(self, y: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.exp(y) if self._exponent == 1 else (y * (1 - self._exponent)) ** (1 / (1 - self._exponent))


def _newcomers(traffic: Traffic, part: Part, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    """(user, lane) of the part's users, drawn from the law over all users; users of other lanes are skipped."""
    law = UserLaw(traffic.users, traffic.exponent)
    while True:
        ranks = law.draw(rng, BLOCK)
        lanes = (_mixed(ranks) % np.uint64(part.all_lanes)).astype(np.int64) - part.first
        ours = (lanes >= 0) & (lanes < part.lanes)
        yield from zip(ranks[ours].tolist(), lanes[ours].tolist(), strict=True)


def _mixed(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """A hash of each value (SplitMix64), as uniform as the partitioner's murmur2 and 1,000 times as fast in numpy."""
    x = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _delays(delay: StageDelay, rng: np.random.Generator) -> Iterator[float]:
    while True:
        factors = np.clip(np.exp(delay.sigma * rng.standard_normal(BLOCK)), 0.25, 4.0)  # as StageDelay.draw
        yield from (delay.median_ms / 1e3 * factors).tolist()


@dataclass(slots=True, eq=False)
class Request:
    """A request. Times are seconds. Until it completes, latency is infinite and status None."""

    number: int
    at: float  # its event
    rank_at: float
    user: int
    lane: int
    prefix: int
    returning: bool  # the user was seen before
    reason: Reason | None = None  # the trigger's decision
    latency_s: float = math.inf  # from rank_at to the client's scores
    status: Status | None = None  # of the answer; None: none came in time
    outcome: Outcome | None = None
    answers: int = 0

    @property
    def name(self) -> str:
        """Its request id."""
        return f"s{self.number}"

    @property
    def user_id(self) -> str:
        """Its user id."""
        return f"u{self.user}"
