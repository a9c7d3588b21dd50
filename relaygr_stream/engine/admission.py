"""Admission of rankings: queue places, memory and device time are shared fairly among clients.

places, bytes and time left? ─► admit
  └── no ─► does another client hold more of what is scarce? ─► that client loses its latest ranking
              └── no ─► is it in time by its scenario's turn? ─► admit
                          └── no ─► refuse
"""

from __future__ import annotations

import math
from itertools import count
from operator import attrgetter
from typing import Final

from sortedcontainers import SortedKeyList

from relaygr_stream.cache.entry import Coverage, Found
from relaygr_stream.engine.clients import Clients
from relaygr_stream.engine.executor import Executor
from relaygr_stream.engine.forecast import (
    ALONE_DEADLINE_FACTOR,
    LEAST_IDLE,
    STILL_IDLE,
    Calibration,
    Forecast,
    Full,
    IdleShare,
)
from relaygr_stream.engine.prefill import PrefillJobs
from relaygr_stream.engine.ranking import QUEUED_DEADLINE_FRACTION, Booking, PrefillJob, Ranking
from relaygr_stream.models.api import takes_suffix

#: What the answer to a ranking that made room says.
GAVE_WAY: Final = {
    "waiting": "this one gives way, because its client has the most rankings waiting",
    "nbytes": "this one gives way, because its client has the most memory waiting",
    "ms": "this one gives way, because its client has the most device time waiting",
}

#: Where no ranking that needs inference, or none that needs none, was admitted for so long, the next one is tried. A
#: new level of costs shows in eight of the last fifteen measurements (cost_model.py, LEVEL_SAMPLES): 16 s of trials.
TRY_S: Final = 2.0


class Admission:
    """The admitted rankings without an answer. places, nbytes: how many rankings and bytes may wait.

    truncate_to: behaviours that `truncate` leaves a ranking; 0: it cuts none.
    """

    def __init__(
        self,
        executor: Executor,
        jobs: PrefillJobs,
        clients: Clients,
        places: int,
        nbytes: int,
        truncate_to: int = 0,
    ) -> None:
        self._executor = executor
        self._takes_suffix = takes_suffix(executor.model)
        self._jobs = jobs
        self._places = places
        self._nbytes = nbytes
        self._truncate_to = truncate_to
        self.clients = clients
        self.waiting: SortedKeyList[Ranking] = SortedKeyList(key=attrgetter("booking.number"))  # in the order they came
        self._numbers = count()
        #: When a ranking was last admitted, by whether it needs inference.
        self._admitted_s: dict[bool, float] = {}
        self._forecast, self._late = Forecast(clients), Forecast(clients)
        self._forecasts = (self._forecast, self._late)  # by whether a ranking is late
        self.idle = IdleShare()
        self.calibration = Calibration()  # of scoring, in the batches that come

    def book(self, ranking: Ranking, found: Found) -> None:
        """Give it a number, and its client's account and predicted device time. found: what the cache has for it."""
        task = ranking.task
        score_ms, infer_ms = self.score_ms(ranking) * self.calibration.factor, self._infer_ms(ranking, found)
        cost_ms = infer_ms + score_ms
        # A prediction refuses nothing until predictions of its kind have been compared with measurements.
        trusted = self.calibration.trusted and (not infer_ms or self._jobs.calibration.trusted)
        ranking.booking = Booking(
            number=next(self._numbers),
            account=self.clients.account(task.client, task.scenario),
            nbytes=task.nbytes,
            cost_ms=cost_ms,
            expected_ms=cost_ms if trusted else 0.0,
            infers=bool(infer_ms),
            guest=bool(task.hops) and found[1] is Coverage.NONE,
        )

    def truncate(self, ranking: Ranking, now: float) -> bool:
        """Cut a booked ranking, which needs inference and no worker has in time, to its newest behaviours.

        They are a history of their own: positions count from 0, and the first gap is 0. True: it is in time, perhaps in
        full by now. False, nothing changed: it must not be cut, or is not in time even so.
        """
        booking = ranking.booking
        if self._may_be_cut(ranking) and self._in_time(ranking, booking.expected_ms, now):
            return True
        if (ms := self._cut_ms(ranking, now)) is None:
            return False
        ranking.keep_newest(self._truncate_to)
        booking.cost_ms = booking.expected_ms = ms
        return True

    def takes_late(self, ranking: Ranking, now: float) -> bool:
        """Whether this booked ranking, which is refused, may be admitted if it is handed in again as late."""
        unknown = not ranking.booking.expected_ms
        return unknown or self.idle.share(now) >= LEAST_IDLE or self._cut_ms(ranking, now) is not None

    def _may_be_cut(self, ranking: Ranking) -> bool:
        booking, barred = ranking.booking, ranking.full or ranking.rank.whole
        predicted = booking.infers and booking.expected_ms and self._executor.model.incremental
        return bool(self._truncate_to and predicted and not barred)

    def _cut_ms(self, ranking: Ranking, now: float) -> float | None:
        """Predicted device time with the newest behaviours alone; None: it must not be cut, or is late even so."""
        behaviours = len(ranking.tokens) - ranking.tokens.context + len(ranking.suffix)
        if behaviours <= self._truncate_to or not self._may_be_cut(ranking):
            return None
        ms = self._newest_ms(ranking)
        return ms if self._in_time(ranking, ms, now) else None

    def _newest_ms(self, ranking: Ranking) -> float:
        """Predicted device time of inferring and scoring with the newest behaviours alone."""
        size = self._truncate_to
        suffix = min(size, len(ranking.suffix))
        score_ms = self._executor.costs.score_ms(size - suffix, suffix + len(ranking.task.candidates))
        return self._jobs.prefill_ms(0, size - suffix) + score_ms * self.calibration.factor

    def _in_time(self, ranking: Ranking, ms: float, now: float) -> bool:
        """Whether it would be in time if it took so long: with a margin even if nothing is before it."""
        return self._forecast.full(ranking, now, ms, alone=QUEUED_DEADLINE_FRACTION) is None

    def full(self, ranking: Ranking, now: float) -> Full | None:
        """What is too scarce to admit this booked ranking; None: there is room."""
        if len(self.waiting) >= self._places:
            return Full("waiting", f"{len(self.waiting)} rankings are waiting (worker.max_queue)")
        if self.clients.whole.nbytes + ranking.booking.nbytes > self._nbytes:
            now_mib, most_mib = self.clients.whole.nbytes >> 20, self._nbytes >> 20
            return Full("nbytes", f"rankings of {now_mib} of {most_mib} MiB are waiting (worker.max_waiting_bytes)")
        full = self._too_late(ranking, now) if ranking.booking.expected_ms else None
        if full is None:
            self._admitted_s[ranking.booking.infers] = now
        return full

    def _too_late(self, ranking: Ranking, now: float) -> Full | None:
        return self._too_late_when_idle(ranking, now) if ranking.late else self._forecast.full(ranking, now)

    def _too_late_when_idle(self, ranking: Ranking, now: float, *, waits: bool = False) -> Full | None:
        idle = self.idle.share(now)
        enough = idle >= (STILL_IDLE if waits else LEAST_IDLE)
        return self._late.full_when_idle(ranking, now, idle if enough else 0.0, waits=waits)

    def overdue(self, ranking: Ranking, now: float) -> Full | None:
        """A waiting ranking should have been begun (Ranking.begin_by), or done: from its due time on it gets the time
        that others leave. Why that will be too late; None: it will not."""
        # Nothing is refused before some have been measured. A late one waits on while there is idle time (below).
        known = ranking.booking.expected_ms and not ranking.late
        if known and not ranking.measured.started and self._forecast.count > 1:
            return Full("ms", "it was not begun in time for the SLO, and rankings wait that can be in time")
        if now < ranking.task.due:
            return None
        if ranking.late:
            return self._too_late_when_idle(ranking, now, waits=True)
        self._forecast.remove(ranking)
        ranking.is_late()
        full = self._too_late_when_idle(ranking, now)
        self._late.add(ranking)
        return full

    def comes_late(self, ranking: Ranking, job: PrefillJob, now: float) -> Full | None:
        """Why not to go on with the job for this waiter: what is left of it comes too late, and nothing gets idle time.

        One that the device has not begun, and that keeps nobody waiting, may have been predicted too long.
        """
        if ranking.late or not ranking.booking.expected_ms or self.idle.share(now) >= LEAST_IDLE:
            return None
        left = (ranking.due - now) * 1e3
        ms = self._jobs.remaining_ms(job) + self.score_ms(ranking) * self.calibration.factor
        alone = self._forecast.count == 1 and not ranking.measured.started
        if ms <= (ALONE_DEADLINE_FACTOR * left if alone else left):
            return None
        return Full("ms", f"what is left of it takes {ms:.0f} ms, and {left:.0f} ms are left")

    def tries(self, ranking: Ranking, full: Full, now: float) -> bool:
        """Whether to admit a ranking all the same for which an idle device would take too long, by prediction.

        Only what is computed is measured: what a slow spell taught would refuse rankings of a kind for ever.
        """
        if self.waiting or not full.hopeless or now - self._admitted_s.get(ranking.booking.infers, -math.inf) < TRY_S:
            return False
        self._admitted_s[ranking.booking.infers] = now
        ranking.booking.expected_ms = 0.0  # it makes nobody late
        return True

    def goes_first(self, ranking: Ranking, now: float) -> bool:
        """Whether a ranking for which nobody gives way is in time by its scenario's turn, which is before the others'.

        A ranking of theirs that the device has started may be late for it.
        """
        first = not ranking.late and self.clients.goes_first(ranking.booking.account)
        return first and self._forecast.full(ranking, now, first=True) is None

    def loser(self, ranking: Ranking, full: Full) -> Ranking | None:
        """The waiting ranking that loses its place to this one; None: refuse this one.

        It is the latest of the client that has the most waiting of what is scarce, if that is more than this one's
        client would have with it. A ranking that the device has started keeps its place.
        """
        account = None if full.hopeless else self.clients.heavier(full.measure, ranking.booking)
        if account is None or (ranking.late and full.measure == "ms"):
            return None
        late = None if full.measure == "ms" else self._late.latest(account, full.before)
        return late or (None if ranking.late else self._forecast.latest(account, full.before))

    def add(self, ranking: Ranking) -> None:
        """Count a booked ranking as waiting; one that was removed comes back to its place."""
        self.waiting.add(ranking)
        self.clients.add(ranking.booking)
        self._forecasts[ranking.late].add(ranking)

    def remove(self, ranking: Ranking) -> None:
        """Stop counting a ranking that has its answer; one that was never added is no error."""
        if ranking in self.waiting:
            self.waiting.remove(ranking)
            self.clients.remove(ranking.booking)
            self._forecasts[ranking.late].remove(ranking)

    def charge(self, ranking: Ranking, ms: float, *, of: int = 1) -> None:
        """Count device time as the ranking's and as its client's. of: rankings that it was for together."""
        ranking.measured.device_ms += ms
        ranking.booking.account.serve(ms / of)
        if ranking in self.waiting:
            self._forecasts[ranking.late].worked(ranking)

    def score_ms(self, ranking: Ranking) -> float:
        """Predicted device time of scoring it alone, uncorrected."""
        return self._executor.costs.score_ms(len(ranking.tokens), len(ranking.suffix) + len(ranking.task.candidates))

    def _infer_ms(self, ranking: Ranking, found: Found) -> float:
        """Predicted device time until its prefix KV are there; a job that others wait for costs nothing more."""
        entry, coverage = found
        tokens, suffix = len(ranking.tokens), 0 if self._takes_suffix else len(ranking.suffix)
        if entry is None or coverage is Coverage.NONE or ranking.full or suffix:
            return self._jobs.prefill_ms(0, tokens + suffix)
        if coverage is Coverage.COVERS and not entry.computing:
            return 0.0
        job = self._jobs.job_of(entry)
        begun = self._jobs.remaining_ms(job) if job is not None and not job.waiters else 0.0
        if coverage is Coverage.COVERS:
            return begun
        there = len(entry.tokens)
        return begun + self._jobs.prefill_ms(there, tokens - there)
