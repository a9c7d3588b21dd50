"""The loads of a member's lanes, in records a second over the last minutes, as it states them in its claims.

All records of the group's topics count: a worker's are signals, rankings, and what others forward to it.

Knows neither Kafka nor the assignment (balance.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from relaygr_stream.bus.balance import LEVELS_AN_OCTAVE, MOST_LEVEL

#: A load is an average over so long: a lane's users come and go within minutes.
AVERAGE_S: Final = 300.0
#: A lane that is owned for a shorter time has no known load: its first records are what waited for an owner.
LEAST_S: Final = 60.0
#: Each lane counts so many records more than it had in AVERAGE_S. By chance so many differ by 5 %, and fewer by more,
#: which moves no lane.
PRIOR_RECORDS: Final = 400.0


@dataclass
class _Measured:
    began: float
    at: float
    position: int
    rate: float = 0.0


def level_of(rate: float) -> int:
    """The level (MemberClaim) of a lane with so many records a second."""
    return min(MOST_LEVEL, 1 + round(LEVELS_AN_OCTAVE * math.log2(1.0 + rate * AVERAGE_S / PRIOR_RECORDS)))


class LaneLoads:
    """Averages the rates of lanes from their positions. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._lanes: dict[int, _Measured] = {}

    def note(self, positions: Mapping[int, int], now: float) -> None:
        """The positions of all lanes owned now: records read of each, from any start."""
        for lane in self._lanes.keys() - positions.keys():
            del self._lanes[lane]
        for lane, position in positions.items():
            seen = self._lanes.setdefault(lane, _Measured(now, now, position))
            seconds = now - seen.at
            if seconds > 0:
                rate = max(0, position - seen.position) / seconds
                seen.rate += min(1.0, seconds / min(AVERAGE_S, now - seen.began)) * (rate - seen.rate)
                seen.at, seen.position = now, position

    @property
    def levels(self) -> dict[int, int]:
        """The level of each lane whose load is known (MemberClaim)."""
        known = {lane: seen.rate for lane, seen in self._lanes.items() if seen.at - seen.began >= LEAST_S}
        return {lane: level_of(rate) for lane, rate in known.items()}

    @property
    def telling(self) -> bool:
        """Whether so much was read lately that the device's costs are those of this work."""
        return sum(seen.rate for seen in self._lanes.values()) * AVERAGE_S >= PRIOR_RECORDS
