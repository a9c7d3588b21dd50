"""Forecasts whether a ranking will be answered in time, given what waits already, so that it can be refused early.

All times are milliseconds of device time, predicted and then corrected by how earlier predictions came out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from relaygr_stream.engine.clients import Account, Clients, Measure
from relaygr_stream.engine.ranking import QUEUED_DEADLINE_FRACTION, Ranking
from relaygr_stream.engine.work_tree import WorkTree

#: Comparisons of predictions with measurements before a prediction may refuse anything.
MIN_SAMPLES: Final = 20
#: Weight that a comparison keeps after each further one: about the last fifty count.
FORGETTING: Final = 0.98
#: A measurement counts as at most this many times its prediction: longer is another program's doing, or a hang.
OUTLIER: Final = 5.0
#: With nothing before it, a ranking is refused only if its own work takes this many times the time that it has.
ALONE_DEADLINE_FACTOR: Final = 1.5
#: As QUEUED_DEADLINE_FRACTION (ranking.py), for one that another worker could have answered, a forwarded one or a hedge
#: that finds nothing here: the last places in the queue are for those whose prefix KV may be here.
FORWARDED_DEADLINE_FRACTION: Final = 0.75


class Calibration:
    """The ratio of measured to predicted times: batches are cheaper than their parts, chunks dearer than the whole.

    factor: multiply predictions by this. trusted: there are enough comparisons to refuse by.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self.trusted = False
        self._predicted = 0.0
        self._measured = 0.0
        self._samples = 0

    def add(self, predicted_ms: float, measured_ms: float) -> None:
        """Add a comparison."""
        self._predicted = FORGETTING * self._predicted + predicted_ms
        self._measured = FORGETTING * self._measured + min(measured_ms, OUTLIER * predicted_ms)
        self._samples += 1
        if self._samples >= MIN_SAMPLES:
            self.trusted = True
            self.factor = self._measured / self._predicted if self._predicted > 0 else 1.0


#: Of so many answers one takes longer than AnswerWay.ms.
LONGER_OF: Final = 20
#: Eight answers in a row that take longer double it, 139 that do not halve it.
LONGER: Final = math.exp(0.1 * (1 - 1 / LONGER_OF))
SHORTER: Final = math.exp(-0.1 / LONGER_OF)
#: The least: a batch of the producer and a fetch. The most: what a timeout of a second leaves for it (REPLY_SHARE).
LEAST_WAY_MS: Final = 5.0
MOST_WAY_MS: Final = 200.0


class AnswerWay:
    """How long an answer takes, once the device is done with it, to the broker: what few of the last answers exceeded.

    ms: rankings are due so much earlier. The way on, from the broker to the client, is not known here.
    """

    def __init__(self) -> None:
        self.ms = LEAST_WAY_MS

    def add(self, ms: float) -> None:
        """An answer took so long."""
        self.ms = min(MOST_WAY_MS, max(LEAST_WAY_MS, self.ms * (LONGER if ms > self.ms else SHORTER)))


@dataclass(frozen=True, slots=True)
class Full:
    """What is too scarce for a ranking, and why, in words.

    before: rankings with a later deadline are not in its way. hopeless: not even without all other clients' rankings.
    """

    measure: Measure
    reason: str
    before: float = float("inf")
    hopeless: bool = False


class Forecast:
    """Rankings that are to be answered in time, by due time, and whether another one can be.

    `full` takes O(log n) for n waiting rankings, for each client that has some.
    """

    def __init__(self, clients: Clients | None = None) -> None:
        self._clients = Clients() if clients is None else clients
        self._all: WorkTree[Ranking] = WorkTree()
        self._by_client: dict[Account, WorkTree[Ranking]] = {}
        self._by_scenario: dict[Account, WorkTree[Ranking]] = {}  # where the worker serves several
        self.count = 0  # of those that are counted
        self._new: dict[Ranking, None] = {}  # added since the trees were asked: most have their answer before that

    def add(self, ranking: Ranking) -> None:
        """Count a waiting ranking, whose expected_ms and number are known."""
        self.count += 1
        self._new[ranking] = None

    def _plant(self) -> None:
        """Put what was added into the trees, which are to be asked."""
        for ranking in self._new:
            key, ms = _key(ranking), work_ms(ranking)
            self._all.add(key, ms, ranking)
            for trees, account in self._parts(ranking):
                own = trees.get(account)
                if own is None:
                    own = trees[account] = WorkTree()
                own.add(key, ms, ranking)
        self._new.clear()

    def _parts(self, ranking: Ranking) -> Iterator[tuple[dict[Account, WorkTree[Ranking]], Account]]:
        """The trees that it is in beside that of all, and the account of each."""
        return zip((self._by_client, self._by_scenario), ranking.booking.account.parts, strict=False)

    def remove(self, ranking: Ranking) -> None:
        """Stop counting a ranking that was added."""
        self.count -= 1
        if ranking in self._new:
            del self._new[ranking]
            return
        key = _key(ranking)
        self._all.remove(key)
        for trees, account in self._parts(ranking):
            trees[account].remove(key)
            if not trees[account]:
                del trees[account]

    def worked(self, ranking: Ranking) -> None:
        """The device has worked for a ranking that was added: its device_ms has changed."""
        if ranking in self._new:
            return
        key, ms = _key(ranking), work_ms(ranking)
        self._all.change(key, ms)
        for trees, account in self._parts(ranking):
            trees[account].change(key, ms)

    def latest(self, account: Account, before: float) -> Ranking | None:
        """The client's ranking with the latest deadline up to `before` that the device has not started."""
        self._plant()
        own = self._by_client.get(account)
        return (
            None if own is None else next((each for each in own.backwards(before) if not each.measured.started), None)
        )

    def full(
        self,
        ranking: Ranking,
        now: float,
        own: float | None = None,
        *,
        alone: float = ALONE_DEADLINE_FACTOR,
        first: bool = False,
    ) -> Full | None:
        """Why this ranking cannot be answered in time, or only at the cost of one accepted before it; None: it can.

        own: its milliseconds; None: its expected_ms. alone: the share of its time that it may take if nothing waits.
        first: its scenario's turn is before the others', whose rankings it may make late.
        """
        self._plant()
        left, own = (ranking.due - now) * 1e3, ranking.booking.expected_ms if own is None else own
        if not self._all:
            reason = f"it takes {own:.0f} ms, and {left:.0f} ms are left"
            return Full("ms", reason, hopeless=True) if own > alone * left else None
        sure = left * (FORWARDED_DEADLINE_FRACTION if ranking.booking.guest else QUEUED_DEADLINE_FRACTION)
        if self._all.total_ms + own <= min(sure, (self._all.first() - now) * 1e3):
            return None
        # One that is late anyway does not count: it ends before now.
        beside = self._by_scenario.get(ranking.booking.account.parts[-1]) if first else self._all
        hurt = None if beside is None else beside.first_within(ranking.due, now * 1e3, now * 1e3 + own)
        if hurt is not None:
            return Full("ms", f"its {own:.0f} ms would make a ranking late that was accepted before it", hurt)
        mine, ahead = self._ahead(ranking, own)
        if ahead + own > (sure if ahead else alone * left):
            reason = f"the rankings before it take {ahead:.0f} ms, it takes {own:.0f} ms, and {left:.0f} ms are left"
            return Full("ms", reason, ranking.due, hopeless=mine + own > sure)
        return None

    def full_when_idle(self, ranking: Ranking, now: float, idle: float, *, waits: bool = False) -> Full | None:
        """The same for one that gets the share `idle` of the device's time, with those that wait for that already.

        waits: it is one of these; it need not be removed to be asked about.
        """
        self._plant()
        left, own = (ranking.due - now) * 1e3, work_ms(ranking)
        mine, ahead = self._ahead(ranking, own, counted=waits)
        if idle > 0 and ahead + own <= QUEUED_DEADLINE_FRACTION * left * idle:
            return None
        reason = (
            f"it is too late for the SLO, so it gets only what device time others leave, now {idle:.0%}; it and the "
            f"rankings before it still take {ahead + own:.0f} ms, and {left:.0f} ms are left"
        )
        return Full("ms", reason, ranking.due, hopeless=mine + own > left)

    def _ahead(self, ranking: Ranking, own: float, *, counted: bool = False) -> tuple[float, float]:
        """What its own client, and all clients, have before it. counted: its own work is in the trees."""
        before = {account: work.until(ranking.due) for account, work in self._by_client.items()}
        mine = max(0.0, before.pop(ranking.booking.account, 0.0) - (own if counted else 0.0))
        return mine, mine + self._in_turn(ranking.booking.account, mine + own, before)

    def _in_turn(self, account: Account, ms: float, others: dict[Account, float]) -> float:
        """How much of the others' work is done before this client has been given so many milliseconds."""
        if account.parent is None:
            return 0.0
        until = max(account.served_ms, account.parent.floor_ms) + ms + self._clients.slack(account)
        beside, elsewhere = 0.0, defaultdict[Account, float](float)
        for other, work in others.items():
            if other.parent is account.parent:
                beside += min(work, max(0.0, until - other.served_ms))
            elif other.parent is not None:  # of another scenario
                elsewhere[other.parent] += work
        return beside + (self._in_turn(account.parent, ms + beside, elsewhere) if elsewhere else 0.0)


def _key(ranking: Ranking) -> tuple[float, int]:
    return ranking.due, ranking.booking.number


def work_ms(ranking: Ranking) -> float:
    """Device time that it still takes, as predicted when it was booked."""
    return max(0.0, ranking.booking.expected_ms - ranking.measured.device_ms)


#: Over how long the share of idle time is averaged: some SLOs, so that it follows a load that rises.
IDLE_S: Final = 0.25
#: Less admits no ranking as late. Under overload the share wavers about a tenth, and what were admitted by that would
#: wait in vain: simulated at 1.25 times the load that is carried, 1 of 100 refusals came after a second, not 15 ms.
LEAST_IDLE: Final = 0.25
#: With less, one that was admitted as late does not wait on: its own predicted work may be none, and no time is enough.
STILL_IDLE: Final = LEAST_IDLE / 2


class IdleShare:
    """The share of the device's time, lately, that rankings in time and pre-inference have left.

    From one step to the next, and not the operations alone: under overload a late ranking gets none of the time that
    the device's thread takes between them, or waits for a processor.
    """

    def __init__(self) -> None:
        self._busy = 0.0
        self._works = 0.0  # 1: for what comes first
        self._at = 0.0

    def works(self, now: float, *, first: bool) -> None:
        """From now on the device works for what comes first, or for what is late, or not at all."""
        self._follow(now)
        self._works = float(first)

    def share(self, now: float) -> float:
        """Between 0 and 1."""
        self._follow(now)
        return 1.0 - self._busy

    def _follow(self, now: float) -> None:
        if now > self._at:
            kept = math.exp((self._at - now) / IDLE_S)
            self._busy, self._at = kept * self._busy + (1 - kept) * self._works, now


# ---- whether rankings are better scored together or one after the other ----
#
# A batch of n takes s0 + n·s1, a ranking alone s0 + s1. One after the other, n rankings are done after (n + 1)/2 times
# that on average; together, all after s0 + n·s1. Together is sooner if s1 < s0, whatever n is: so on accelerators, but
# hardly on CPUs.


#: From this s0 / (s0 + s1) on, rankings scored together are done sooner on average.
PAYS_FROM: Final = 0.5
#: This many go together in any case: s0 is learnt from what that saves.
ALWAYS_TOGETHER: Final = 2


class Batching:
    """Learns s0 / (s0 + s1) from batches of two and more, against what rankings alone take.

    pays: rankings scored together are done sooner on average.
    """

    def __init__(self) -> None:
        self.pays = False
        self._alone = Calibration()
        self._batches = 0
        self._saved_ms = 0.0
        self._could_ms = 0.0  # what batches would have saved if s1 were 0

    def add(self, predicted_ms: float, rankings: int, ms: float) -> None:
        """Learn from rankings that were scored together in `ms`. predicted_ms: the sum of their times alone."""
        if rankings == 1:
            self._alone.add(predicted_ms, ms)
            return
        alone_ms = predicted_ms * self._alone.factor
        self._batches += 1
        self._saved_ms = FORGETTING * self._saved_ms + alone_ms - min(ms, OUTLIER * alone_ms)
        self._could_ms = FORGETTING * self._could_ms + alone_ms * (1 - 1 / rankings)
        self.pays = self._saved_ms > PAYS_FROM * self._could_ms

    def ms(self, predicted_ms: float, rankings: int) -> float:
        """What so many take together. predicted_ms: the sum of their times alone. s1 is 0 until it is learnt."""
        learnt = self._batches >= MIN_SAMPLES and self._could_ms > 0
        saved = min(1.0, max(0.0, self._saved_ms / self._could_ms)) if learnt else 1.0
        return predicted_ms * self._alone.factor * (1 - saved * (1 - 1 / rankings))
