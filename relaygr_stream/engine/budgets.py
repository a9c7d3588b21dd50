"""Budgets: how a worker divides memory and device time among its lanes, for triggers to admit by.

Device time follows demand. Pinned bytes do so too, but a budget below a lane's largest prefix is worth nothing to that
prefix: such a lane would never have it admitted. So each lane that is asked gets room for its largest prefix first, in
turns where there is not room for all, and then for a second one: with room for one, the next request waits until the
first is ranked. Lanes without requests lend theirs; what is left follows demand.

Bytes granted to one lane are granted to another only when no trigger can use them any more (`LaneBudgets`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Final

#: Weight that demand keeps after a second: traffic shifts between lanes within seconds, not minutes.
DEMAND_DECAY: Final = 0.8
#: A lane counts as asked while its faded demand is this share of its largest prefix: 13 s after one request.
ASKED_SHARE: Final = 0.05
#: Weight of a lane without requests, relative to the mean of the others: its first request finds some budget.
QUIET_WEIGHT: Final = 0.1
#: Once every asked lane has room for two of its largest prefixes, this share of the rest makes room for the first
#: prefix of lanes without requests.
QUIET_PART: Final = 0.5


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

    def asked(self, lane: int, largest: int) -> bool:
        """Whether requests came for this lane lately; largest: bytes of its largest prefix."""
        return largest > 0 and self._demand.get(lane, 0.0) >= ASKED_SHARE * largest


@dataclass
class _Granted:
    """The bytes that a lane may pin, as stated. An earlier grant counts until no trigger can act on it any more."""

    now: int = 0
    before: list[tuple[float, int]] = field(default_factory=list)  # (when superseded, bytes), each fewer than the last

    def grant(self, nbytes: int, now_s: float) -> None:
        """Supersede the present grant. Earlier grants that are not larger stop counting, since they end sooner."""
        if nbytes != self.now:
            while self.before and self.before[-1][1] <= self.now:
                del self.before[-1]
            self.before.append((now_s, self.now))
            self.now = nbytes

    def most(self) -> int:
        return max(self.now, self.before[0][1]) if self.before else self.now


class LaneBudgets:
    """Bytes that each lane may have pinned; together never more than `whole`.

    A trigger may act on a statement for hold_s (trigger.max_status_age_ms) after it was superseded: it may have been
    lost. So a lane's bytes count as its own until hold_s after they were taken from it, and while they are pinned:

        Σ max(pinned, every grant of the last hold_s) ≤ whole

    at all times, if what a trigger has pinned for its lanes together stays within their grants. turn_s: where there is
    not room for the largest prefix of every lane that is asked, a lane keeps its room for so long, once it has it,
    before it is another's turn.
    """

    def __init__(self, whole: int, hold_s: float, turn_s: float) -> None:
        self._whole = whole
        self._hold_s = hold_s
        self._turn_s = turn_s
        self._granted: dict[int, _Granted] = {}
        self._served_s: dict[int, float] = {}  # lane → when its turn began (inf: not yet)
        self._queue: list[int] = []  # lanes in turn order, the next one first

    def update(
        self,
        shares: Mapping[int, float],
        largest: Mapping[int, int],
        asked: Iterable[int],
        pinned: Mapping[int, int],
        now_s: float,
    ) -> dict[int, int]:
        """The budgets to state now, for the lanes of `shares`.

        largest: bytes of each lane's largest prefix, 0 unknown; asked: lanes with requests lately.
        """
        self._forget(shares.keys(), now_s)
        targets = self._targets(shares, largest, set(asked), now_s)
        most = {lane: granted.most() for lane, granted in self._granted.items()}
        # A lane may have more pinned than it was granted: of what its trigger was granted for others (trigger/load.py).
        room = max(0, self._whole - sum(max(pinned.get(lane, 0), granted) for lane, granted in most.items()))
        budgets = {}
        for lane in self._queue:
            budget, already = targets[lane], most[lane]
            if budget > already:
                budget = min(budget, already + room)
                room -= budget - already
            budgets[lane] = budget
            if budget >= largest[lane] and self._served_s.get(lane) == math.inf:
                self._served_s[lane] = now_s
            self._granted[lane].grant(budget, now_s)
        return budgets

    def _forget(self, lanes: Set[int], now_s: float) -> None:
        """Drop lanes that are gone, and grants that no trigger can act on any more."""
        for granted in self._granted.values():
            before = granted.before
            while before and now_s - before[0][0] > self._hold_s:
                del before[0]
        if lanes == self._granted.keys():
            return
        self._granted = {lane: self._granted.get(lane, _Granted()) for lane in lanes}
        self._served_s = {lane: at for lane, at in self._served_s.items() if lane in lanes}
        known = [lane for lane in self._queue if lane in lanes]
        self._queue = known + sorted(lanes - set(known))

    def _targets(
        self, shares: Mapping[int, float], largest: Mapping[int, int], asked: set[int], now_s: float
    ) -> dict[int, int]:
        """The target of each lane: room for its largest prefix (in turns), for a second one, and part of the rest."""
        self._next_turns(now_s)
        left = self._whole
        targets = dict.fromkeys(shares, 0)
        for lane in [lane for lane in self._queue if lane in asked]:
            if 0 < largest[lane] <= left:
                targets[lane] = largest[lane]
                left -= largest[lane]
                self._served_s.setdefault(lane, math.inf)
            else:
                self._served_s.pop(lane, None)
        # Smallest first: this serves the most lanes, and the same ones every time.
        for lane in sorted((lane for lane, room in targets.items() if room), key=lambda lane: (largest[lane], lane)):
            if largest[lane] <= left:
                targets[lane] += largest[lane]
                left -= largest[lane]
        usual = max((largest[lane] for lane in asked), default=0)
        for_quiet = int(QUIET_PART * left)
        for lane in [lane for lane in self._queue if lane not in asked]:
            self._served_s.pop(lane, None)
            first = largest[lane] or usual
            if first <= for_quiet:
                targets[lane] = first
                for_quiet -= first
                left -= first
        takers = asked or set(shares)
        weight = sum(shares[lane] for lane in takers)
        if weight > 0:
            for lane in takers:
                targets[lane] += int(left * shares[lane] / weight)
        return targets

    def _next_turns(self, now_s: float) -> None:
        """A lane keeps its room until its turn is over; then the lanes that wait longest come first."""
        if not self._served_s:
            return
        over = [lane for lane, since in self._served_s.items() if now_s - since >= self._turn_s]
        for lane in over:
            del self._served_s[lane]
        serving = [lane for lane in self._queue if lane in self._served_s]
        waiting = [lane for lane in self._queue if lane not in self._served_s and lane not in over]
        self._queue = serving + waiting + over


# ---- demand, by which budgets are divided ----
#
# It is counted from rankings, admitted or not. Signals would not do: a lane whose budget is too small for its prefixes
# gets no signals, and would never get a larger budget.


#: A lane's largest prefix is that of the present and the previous epoch of so many seconds: even a quiet lane has
#: some requests in it.
EPOCH_S: Final = 30.0


class Demand:
    """Running totals of prefix bytes per lane, and each lane's largest recent prefix. averaging: factor of EPOCH_S."""

    def __init__(self, averaging: float = 1.0) -> None:
        self._epoch_s = averaging * EPOCH_S
        self.totals: defaultdict[int, int] = defaultdict(int)  # lane → bytes asked for so far
        self._epoch = 0
        self._now: dict[int, int] = {}
        self._before: dict[int, int] = {}

    def ask(self, lane: int, nbytes: int, now: float) -> None:
        """A ranking came whose prefix KV take so many bytes."""
        epoch = int(now / self._epoch_s)
        if epoch != self._epoch:
            self._before = self._now if epoch == self._epoch + 1 else {}
            self._now, self._epoch = {}, epoch
        self.totals[lane] += nbytes
        self._now[lane] = max(nbytes, self._now.get(lane, 0))

    def largest(self, lane: int) -> int:
        """Bytes of the largest prefix of the EPOCH_S to 2·EPOCH_S before the newest ranking, on any lane; 0: none."""
        now, before = self._now.get(lane, 0), self._before.get(lane, 0)
        return now if now > before else before

    def lanes_lost(self, lanes: Iterable[int]) -> None:
        """Drop the totals of lanes that other workers own now."""
        for lane in lanes:
            self.totals.pop(lane, None)
            self._now.pop(lane, None)
            self._before.pop(lane, None)


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
