"""The load bound: a token bucket of device milliseconds, one per lane.

Knows nothing of what the device time is spent on.
"""

from __future__ import annotations

from typing import Final

#: A new bucket holds what this many seconds refill. Not a full burst: triggers restart and hand lanes over, and each
#: time every lane would be owed another burst. One second's refill summed over an owner's lanes is one second of its
#: pre-infer share, whatever the number of lanes.
START_S: Final = 1.0


class LoadBucket:
    """Device milliseconds a lane may still ask for. Times are seconds of a monotonic clock.

    Over any interval of dt seconds the lane takes at most burst_ms + rate·dt. A cost above burst_ms is let through when
    the bucket is full, and leaves it in debt: then the bound is exceeded by (cost - burst_ms), once, and paid back.
    """

    def __init__(self, burst_ms: float) -> None:
        self._burst_ms = burst_ms
        self._rate = 0.0
        self._level_ms = 0.0
        self._at_s: float | None = None  # None until the first rate is known

    def set_rate(self, ms_per_s: float, now_s: float) -> None:
        """From now on refill at this rate; the first call starts the bucket."""
        self._level_ms = self.level(now_s) if self._at_s is not None else min(self._burst_ms, ms_per_s * START_S)
        self._at_s = now_s
        self._rate = ms_per_s

    def level(self, now_s: float) -> float:
        """Device milliseconds available; negative: in debt. Changes nothing."""
        if self._at_s is None:
            return 0.0
        return min(self._burst_ms, self._level_ms + self._rate * max(0.0, now_s - self._at_s))

    def allows(self, cost_ms: float, now_s: float) -> bool:
        """Whether `take` is permitted now. Changes nothing."""
        return self._at_s is not None and self.level(now_s) >= min(cost_ms, self._burst_ms)

    def take(self, cost_ms: float, now_s: float) -> None:
        """Spend; the caller asked `allows` at the same instant."""
        self._level_ms = self.level(now_s) - cost_ms
        self._at_s = now_s
