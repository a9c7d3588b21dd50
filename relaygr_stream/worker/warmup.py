"""Warm-up: in idle time, prefix KV of users likely to return soon come from DRAM back to HBM before they are asked for.

A user is expected back after the running mean of the times between his rankings. Some time before, and only while the
device has nothing else to do, his entry is reloaded, one at a time, behind every other copy, and only if it is worth
more to the eviction policy (recency, frequency and cost; the expected use counts as one) than what would have to go
for it. It is not pinned: it may be evicted at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.worker.queue import TimerHeap

#: Weight of the last gap in a user's mean gap: two visits back weighs half of the last one.
GAP_STEP: Final = 0.5
#: A user is expected from so much of his mean gap on: with 0.5, four of five warmed entries were evicted again before
#: he came (benchmarks/trigger.py warm_up).
EARLY: Final = 0.85
#: … and given up when so much of it has gone by.
LATE: Final = 1.3
#: Users remembered, the longest silent dropped first: 300 bytes each.
MAX_USERS: Final = 100_000


@dataclass
class WarmUpCounters:
    """Running totals. started = hit + wasted + those that wait for their user."""

    started: int = 0
    hit: int = 0  # asked for while it was still in HBM: the gain
    wasted: int = 0  # evicted before anyone asked for it


@dataclass(slots=True)
class _User:
    last: float
    gap: float = 0.0  # seconds; 0: seen once


@dataclass(slots=True, eq=False)
class _Expected:
    """A user's expected return; over once the user came, or another return is expected instead."""

    user_id: str
    until: float
    over: bool = False


class WarmUp:
    """Expected returns, and the entries reloaded for them. Without `enabled` it does nothing."""

    def __init__(self, cache: PrefixCache, *, enabled: bool) -> None:
        self._cache = cache
        self._enabled = enabled and cache.has_dram
        self._users: OrderedDict[str, _User] = OrderedDict()
        self._expected: dict[str, _Expected] = {}
        self._timers: TimerHeap[_Expected] = TimerHeap(lambda each: each.over)
        self._warmed: OrderedDict[str, None] = OrderedDict()  # not asked for since
        self.counters = WarmUpCounters()

    def seen(self, user_id: str, now: float) -> None:
        """A ranking of this user came."""
        if not self._enabled:
            return
        user = self._users.get(user_id)
        if user is None:
            self._users[user_id] = _User(now)
            if len(self._users) > MAX_USERS:
                self._drop(self._users.popitem(last=False)[0])
            return
        self._users.move_to_end(user_id)
        gap, user.last = now - user.last, now
        user.gap = gap if not user.gap else user.gap + GAP_STEP * (gap - user.gap)
        self._drop(user_id)
        expected = _Expected(user_id, now + LATE * user.gap)
        self._expected[user_id] = expected
        self._timers.add(now + EARLY * user.gap, expected)

    def asked(self, user_id: str) -> None:
        """A signal or a ranking of this user came, and is about to look for the user's entry."""
        if user_id in self._warmed:
            del self._warmed[user_id]
            if self._cache.in_hbm(user_id):
                self.counters.hit += 1
            else:
                self.counters.wasted += 1

    def step(self, now: float) -> bool:
        """The device has nothing to do: start one reload, if a user is expected. False: there was none to start."""
        if not self._enabled:
            return False
        self._count_waste()
        if self._cache.copying:  # one at a time, and behind those that requests wait for
            return False
        while (first := self._timers.first()) is not None and first[0] <= now:
            expected = self._timers.pop()
            expected.over = True
            del self._expected[expected.user_id]
            if expected.until >= now and self._cache.warm(expected.user_id):
                self.counters.started += 1
                self._warmed[expected.user_id] = None
                return True
        return False

    def erase(self, names: Callable[[str], bool]) -> None:
        """Forget when these users came."""
        for user_id in [each for each in self._users if names(each)]:
            del self._users[user_id]
            self._drop(user_id)

    def _drop(self, user_id: str) -> None:
        expected = self._expected.pop(user_id, None)
        if expected is not None:
            expected.over = True

    def _count_waste(self) -> None:
        """Count the entries that were warmed longest ago and are gone by now."""
        while self._warmed and not self._cache.in_hbm(next(iter(self._warmed))):
            self._warmed.popitem(last=False)
            self.counters.wasted += 1
