"""The load bound: token buckets of device milliseconds, one per lane and, behind those, one per owner.

A lane's bucket keeps it to what its owner grants it; the owner's keeps all lanes of a trigger that it owns to a second
of what it grants them together, however many they are. Knows nothing of what the device time is spent on.
"""

from __future__ import annotations

import math
from typing import Final

#: A new bucket holds what this many seconds refill. Not a full burst: triggers restart and hand lanes over, and each
#: time every lane would be owed another burst. One second's refill summed over an owner's lanes is one second of its
#: pre-infer share, whatever the number of lanes.
START_S: Final = 1.0
#: A lane's bucket holds at most what so many seconds refill: what was saved up under a grant that is withdrawn is
#: withdrawn with it. About as long as an owner takes a lane for one that is asked (worker/budgets.py).
LANE_S: Final = 10.0
#: And an owner's: its lanes may save up as much as its device does in a second, which is less than a life window.
OWNER_S: Final = 1.0
#: A rate below this is none: what rounding leaves of a sum of rates that were withdrawn one by one.
LEAST_MS_PER_S: Final = 1e-6


class LoadBucket:
    """Device milliseconds that may still be asked for. Times are seconds of a monotonic clock.

    It holds at most `depth`: what depth_s seconds refill, and never more than burst_ms. Over any interval of dt seconds
    at most burst_ms + rate·dt is taken. A cost above the depth is let through when the bucket is full, and leaves it in
    debt: then the bound is exceeded by (cost - depth), once, and paid back. Without a rate nothing is let through.
    """

    def __init__(self, burst_ms: float, depth_s: float = LANE_S) -> None:
        self._burst_ms = burst_ms
        self._depth_s = depth_s
        self._rate = 0.0
        self._level_ms = 0.0
        self._at_s: float | None = None  # None until the first rate is known

    @property
    def rate(self) -> float:
        """Milliseconds a second that refill it."""
        return self._rate

    @property
    def depth(self) -> float:
        """Device milliseconds that it holds when it is full."""
        return min(self._burst_ms, self._rate * self._depth_s)

    def set_rate(self, ms_per_s: float, now_s: float, more_ms: float = 0.0) -> None:
        """From now on refill at this rate; the first call starts the bucket. more_ms: put in beside that."""
        level = self.level(now_s) + more_ms if self._at_s is not None else ms_per_s * START_S
        self._at_s = now_s
        self._rate = ms_per_s if ms_per_s >= LEAST_MS_PER_S else 0.0
        self._level_ms = min(self.depth, level)

    def level(self, now_s: float) -> float:
        """Device milliseconds available; negative: in debt. Changes nothing."""
        if self._at_s is None:
            return 0.0
        return min(self.depth, self._level_ms + self._rate * max(0.0, now_s - self._at_s))

    def allows(self, cost_ms: float, now_s: float) -> bool:
        """Whether `take` is permitted now. Changes nothing."""
        return self._rate > 0 and self.level(now_s) >= min(cost_ms, self.depth)

    def take(self, cost_ms: float, now_s: float) -> None:
        """Spend; the caller asked `allows` at the same instant."""
        self._level_ms = self.level(now_s) - cost_ms
        self._at_s = now_s


class OwnerLoads:
    """One bucket for each owner of lanes that a trigger decides for; its rate is the sum of theirs."""

    def __init__(self) -> None:
        self._lanes: dict[int, tuple[str, float]] = {}
        self._buckets: dict[str, LoadBucket] = {}
        self._counts: dict[str, int] = {}

    def observe(self, lane: int, owner: str, ms_per_s: float, now_s: float) -> LoadBucket:
        """This lane has this owner, who grants it this rate; returns the owner's bucket."""
        before, known_ms = self._lanes.get(lane, ("", 0.0))
        if before != owner:
            self.lost(lane, now_s)
            self._counts[owner] = self._counts.get(owner, 0) + 1
            known_ms = 0.0
        bucket = self._buckets.get(owner)
        if bucket is None:
            bucket = self._buckets[owner] = LoadBucket(math.inf, OWNER_S)
        self._lanes[lane] = owner, ms_per_s
        new = before != owner
        bucket.set_rate(bucket.rate + ms_per_s - known_ms, now_s, ms_per_s * START_S if new else 0.0)
        return bucket

    def lost(self, lane: int, now_s: float) -> None:
        """Another trigger decides for this lane now, or it has another owner."""
        owner, ms_per_s = self._lanes.pop(lane, ("", 0.0))
        if not owner:
            return
        self._counts[owner] -= 1
        if self._counts[owner]:
            bucket = self._buckets[owner]
            bucket.set_rate(bucket.rate - ms_per_s, now_s)
        else:
            del self._counts[owner], self._buckets[owner]
