"""Budgets: how a worker divides memory and device time among its lanes, for triggers to admit by.

Device time follows demand: the prefix bytes that rankings asked for, admitted or not. Signals would not do: a lane
without budget gets none, and would never get a larger one. Pinned bytes are one room of all lanes (trigger/load.py),
stated in equal parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

#: Weight that demand keeps after a second: traffic shifts between lanes within seconds, not minutes.
DEMAND_DECAY: Final = 0.8
#: Weight of a lane without requests, relative to the mean of the others: its first request finds some budget.
QUIET_WEIGHT: Final = 0.1


def equal_parts(whole: int, lanes: Iterable[int]) -> dict[int, int]:
    """lane → its part of so many bytes; the parts add up to the whole, so that a prefix that just fits it fits."""
    owned = sorted(lanes)
    return {lane: (whole + number) // len(owned) for number, lane in enumerate(owned)}


class LaneShares:
    """Shares of the owned lanes, from how much each was asked for. averaging: factor of the time that demand keeps."""

    def __init__(self, averaging: float = 1.0) -> None:
        self._averaging = averaging
        self._demand: dict[int, float] = {}
        self._seen: dict[int, int] = {}

    def update(self, lanes: Iterable[int], asked: Mapping[int, int], seconds: float) -> dict[int, float]:
        """asked: running totals per lane; returns lane → share, adding up to 1 over the lanes.

        Half follows demand, half is equal among the lanes with requests, because demand is bursty.
        """
        owned = sorted(lanes)
        if not owned:
            return {}
        keep = DEMAND_DECAY ** (seconds / self._averaging)
        demand, active = {}, 0
        for lane in owned:
            total, left = asked.get(lane, 0), self._demand.get(lane, 0.0) * keep
            seen = self._seen.get(lane, 0)
            if total > seen:
                left += total - seen
            self._seen[lane] = total
            if left < 1.0:  # it would shrink for hours, and never become 0: floats near 0 round up again
                left = 0.0
            demand[lane] = left
            active += left > 0
        self._demand = demand
        if not active:
            return dict.fromkeys(owned, 1.0 / len(owned))
        mean = sum(demand.values()) / active
        weights = {lane: left + mean if left > 0 else QUIET_WEIGHT * mean for lane, left in demand.items()}
        whole = sum(weights.values())
        return {lane: weight / whole for lane, weight in weights.items()}


# ---- shares of the device's time ----


#: Long enough that single operations do not show, short enough that a rush of a few seconds does.
AVERAGE_S: Final = 1.0


class BusyShare:
    """The share of the device's time that some work takes, 0…1, averaged over about a second, times `averaging`.

    Of all work, it is what other workers must not count on when they forward; of ranking, what pre-inference must not.
    """

    def __init__(self, averaging: float = 1.0) -> None:
        self._average_s = averaging * AVERAGE_S
        self.share = 0.0
        self._last_ms = 0.0

    def update(self, total_ms: float, seconds: float) -> float:
        """total_ms: of that work, ever; seconds: since the last call. Returns the share from now on."""
        busy = min(1.0, max(0.0, total_ms - self._last_ms) / (seconds * 1e3))
        self._last_ms = total_ms
        self.share += min(1.0, seconds / self._average_s) * (busy - self.share)
        return self.share


# ---- device time, split between ranking and pre-inference ----
#
# Ranking takes what it needs, full inference included; pre-inference gets the rest, up to its cap. While the device has
# time to spare, each grant is a little larger than the last; without, pre-inference is shed first. Triggers cannot know
# what is cached: the worker states which share of the tokens asked for it had to compute lately, and an admission is
# charged that share of its prefix.


#: The share of prefix tokens that had to be computed is averaged over some ten seconds: it depends on which users come.
REUSE_AVERAGE_S: Final = 10.0
#: A new worker assumes that nothing is cached; so many tokens of evidence outweigh the assumption.
PRIOR_TOKENS: Final = 10_000.0
#: The least share charged. Should all users be new at once, ten times too much is admitted at most, for some seconds,
#: and waits behind ranking.
LEAST_COMPUTED: Final = 0.1


class LoadSplit:
    """Device milliseconds a second that triggers may ask for.

    cap: share of the device for pre-inference at most. averaging: factor of the times over which is averaged.
    """

    def __init__(self, cap: float, averaging: float = 1.0) -> None:
        self._cap = cap
        self._averaging = averaging
        self._ranking = BusyShare(averaging)
        self._last_asked = self._last_computed = 0.0
        self._asked = self._computed = 0.0

    @property
    def ranking_share(self) -> float:
        """Ranking's share of the device's time."""
        return self._ranking.share

    @property
    def computed_share(self) -> float:
        """Share of the tokens asked for that had to be computed, LEAST_COMPUTED…1."""
        share = (PRIOR_TOKENS + self._computed) / (PRIOR_TOKENS + self._asked)
        return min(1.0, max(LEAST_COMPUTED, share))

    def update(self, ranking_ms: float, asked: float, computed: float, seconds: float) -> float:
        """The grant from now on, in milliseconds a second.

        All running totals: device time of ranking (full inference included), prefix tokens that signals asked for,
        and those of them that had to be computed. seconds: since the last call.
        """
        self._ranking.update(ranking_ms, seconds)
        keep = max(0.0, 1.0 - seconds / (self._averaging * REUSE_AVERAGE_S))
        self._asked = keep * self._asked + max(0.0, asked - self._last_asked)
        self._computed = keep * self._computed + max(0.0, computed - self._last_computed)
        self._last_asked, self._last_computed = asked, computed
        free = max(0.0, min(self._cap, 1.0 - self.ranking_share))
        return 1e3 * free
