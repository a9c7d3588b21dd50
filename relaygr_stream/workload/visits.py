"""The requests of traffic in the order of time: gaps, users, lengths, head starts. The same for the same seed.

    gap ─► Pace ─► time        who ─► first visit or return ─► length

Gaps are multiples of the mean time between two requests, so the same visits can come at any rate. All visits of a user
are on one lane, so a part of a fleet has exactly its own users.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from relaygr_stream.workload.arrivals import ArrivalLog
from relaygr_stream.workload.traffic import Tide, Traffic
from relaygr_stream.workload.users import BLOCK, WHOLE, Part, Returners, UserLaw, mixed

#: Users whose lengths are remembered; the longest unseen come back as new ones. 200 bytes each.
MOST_KNOWN: Final = 1 << 20
#: Makes it independent of users' lanes who is on a hot one.
HOT_SALT: Final = 1 << 40
#: Halvings of an interval of about a period, down to a float's precision.
TIDE_STEPS: Final = 60


class Visit(NamedTuple):
    """One request. suffix and candidates are the traffic's."""

    gap: float  # since the request before, in mean times between two requests of the whole traffic
    user: int
    life: int  # a user whose prefix is full begins a new life; (user, life) names a history
    prefix: int  # tokens
    returning: bool  # the history was there before, and was shorter
    long: bool  # one of the long users: not of the mix's short ones; without a mix, longer at first than the median
    head_start: float  # seconds from the event to the ranking


class Pace:
    """The times of visits at a rate. start: the time of the visit before the first."""

    def __init__(self, rate: float, tide: Tide | None = None, start: float = 0.0) -> None:
        self._rate = rate
        self._tide = tide
        self._at = start

    def after(self, gap: float) -> float:
        """The time of the next visit."""
        if self._tide is None:
            self._at += gap / self._rate
        else:
            self._at = _inverse(self._tide, self._tide.requests(self._at) + gap / self._rate, self._at)
        return self._at


class Arrival(NamedTuple):
    """One request: event at `at`, ranking at `rank_at` (seconds); lane: within the part."""

    at: float
    rank_at: float
    user: int
    life: int
    lane: int
    prefix: int
    returning: bool
    long: bool


def arrivals(traffic: Traffic, part: Part, seed: int) -> Iterator[Arrival]:
    """The part's requests at the traffic's rate, from its midst on, for ever."""
    pace = Pace(traffic.rate, traffic.tide)
    lanes: dict[int, int] = {}
    for visit in visits(traffic, seed, part):
        at = pace.after(visit.gap)
        lane = lanes.get(visit.user)
        if lane is None:
            lane = lanes[visit.user] = int(part.lane(np.array([visit.user]))[0])
        yield Arrival(
            at, at + visit.head_start, visit.user, visit.life, lane, visit.prefix, visit.returning, visit.long
        )


def on_one_lane(requests: Iterator[Arrival], share: float) -> Iterator[Arrival]:
    """The same requests, with this share of the users on lane 0, whatever their own lane."""
    bound = np.uint64(share * 2**64)
    for request in requests:
        hot = mixed(np.array([request.user + HOT_SALT]))[0] < bound
        yield request._replace(lane=0) if hot else request


def visits(traffic: Traffic, seed: int, part: Part = WHOLE, *, known: int | None = None) -> Iterator[Visit]:
    """The part's visits, for ever.

    known: this many first visits introduce the users who then return. None: the traffic begins in its midst, where the
    users who are about to return have been there before. With a log's users, it has no effect.
    """
    rng = np.random.default_rng(seed)
    log = traffic.arrivals
    has_users = log is not None and log.users is not None
    who = _of_log(log, part) if log is not None and has_users else _of_model(traffic, part, rng, known)
    lengths, starts = _Lengths(traffic, rng), _normals(rng)
    for gap, user in who:
        yield Visit(gap, user, *lengths.next_visit(user), traffic.delay.from_normal(next(starts)))


class _Lengths:
    """What is known of each user: the life, the length and the kind."""

    def __init__(self, traffic: Traffic, rng: np.random.Generator) -> None:
        self._traffic = traffic
        self._rng = rng
        self._known: dict[int, tuple[int, int, bool]] = {}  # the longest unseen first
        self._lives = 0

    def next_visit(self, user: int) -> tuple[int, int, bool, bool]:
        """(life, prefix, returning, long) of the user's next visit."""
        traffic, rng = self._traffic, self._rng
        known = self._known.pop(user, None)
        if known is not None:
            life, prefix, long = known
            prefix += 1 + int(rng.poisson(traffic.growth - 1))
            if prefix <= traffic.max_prefix:
                self._known[user] = (life, prefix, long)
                return life, prefix, True, long
        life, (prefix, long) = self._lives, self._first()
        self._lives += 1
        self._known[user] = (life, prefix, long)
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return life, prefix, False, long

    def _first(self) -> tuple[int, bool]:
        traffic, rng = self._traffic, self._rng
        normal = float(rng.standard_normal())
        median, long = traffic.length, normal > 0
        if traffic.mix is not None:
            long = float(rng.random()) >= traffic.mix.share
            median = traffic.length if long else traffic.mix.tokens
        return min(traffic.max_prefix, max(1, round(median * math.exp(traffic.sigma * normal)))), long


def _of_log(log: ArrivalLog, part: Part) -> Iterator[tuple[float, int]]:
    """(gap, user) of a log with users, again and again, each time with other users."""
    assert log.users is not None
    gaps, count, skipped, turn = log.gaps, log.user_count, 0.0, 0
    while True:
        users = log.users + turn * count
        ours = part.has(users)
        for gap, user, mine in zip(gaps.tolist(), users.tolist(), ours.tolist(), strict=True):
            skipped += gap
            if mine:
                yield skipped, user
                skipped = 0.0
        turn += 1


def _of_model(traffic: Traffic, part: Part, rng: np.random.Generator, known: int | None) -> Iterator[tuple[float, int]]:
    """(gap, user) of generated users, at a log's or at Poisson times."""
    law = UserLaw(traffic.users, traffic.zipf)
    share = law.share(part)
    newcomers, returners = law.newcomers(part, rng), Returners(rng)
    gaps = _exponential(rng, share) if traffic.arrivals is None else _thinned(traffic.arrivals, share)
    places, elapsed = known or 0, 0.0
    if known is None and traffic.returns:
        for _ in range(max(1, round(traffic.pool * share))):
            returners.add(next(newcomers))
    for gap in gaps:
        elapsed += gap
        if len(returners) < places:
            user = next(newcomers)
            returners.add(user)
        elif len(returners) and float(rng.random()) < traffic.revisit_at(elapsed / traffic.rate):
            user = returners.take()
        else:
            user = next(newcomers)
            returners.came(user)
        yield gap, user


def _exponential(rng: np.random.Generator, share: float) -> Iterator[float]:
    while True:
        yield from (rng.standard_exponential(BLOCK) / share).tolist()


def _thinned(log: ArrivalLog, share: float) -> Iterator[float]:
    """The gaps of a share of a log's arrivals, again and again."""
    gaps, skipped, turn = log.gaps, 0.0, 0
    while True:
        numbers = np.arange(turn * len(gaps), (turn + 1) * len(gaps), dtype=np.int64)
        ours = mixed(numbers) < np.uint64(min(share, 1 - 2**-53) * 2**64)
        if share >= 1:
            ours[:] = True
        for gap, mine in zip(gaps.tolist(), ours.tolist(), strict=True):
            skipped += gap
            if mine:
                yield skipped
                skipped = 0.0
        turn += 1


def _normals(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.standard_normal(BLOCK).tolist()


def _inverse(tide: Tide, requests: float, low: float) -> float:
    """The time at which the tide has brought so many requests; it is after `low`."""
    high = low
    while tide.requests(high) < requests:
        high += tide.period_s + requests - tide.requests(high)
    for _ in range(TIDE_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if tide.requests(middle) < requests else (low, middle)
    return high
