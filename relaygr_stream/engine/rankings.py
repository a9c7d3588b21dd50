"""Rankings: takes each ranking request or refuses it, scores those that are ready, and gives each its one answer.

Residents find the prefix KV that a ranking is scored against.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Set
from operator import attrgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr_stream.cache.entry import Entry
from relaygr_stream.engine.admission import GAVE_WAY, Admission
from relaygr_stream.engine.commands import Answer, Rank
from relaygr_stream.engine.executor import SLICE_SHARE, describe
from relaygr_stream.engine.forecast import ALWAYS_TOGETHER, Batching, Full
from relaygr_stream.engine.queue import RecentIds, TimerHeap
from relaygr_stream.engine.ranking import PrefillJob, Ranking
from relaygr_stream.engine.residents import Residents
from relaygr_stream.wire.messages import Status

#: What is to be scored of a ranking that is ready.
_SCORED: Final = attrgetter("held.scored")
#: How often a late ranking is asked anew whether it will be done at all: about once an SLO.
RECHECK_S: Final = 0.05


class Rankings:
    """Ranking requests that wait for an answer; `answers` gets one for each, once it holds nothing any more."""

    def __init__(
        self, residents: Residents, admission: Admission, answered: RecentIds, *, most: int, max_delay_ms: float
    ) -> None:
        self._residents = residents
        self._executor, self._queue, self._auditor = residents.executor, residents.queue, residents.auditor
        self._cache, self._pins = residents.cache, residents.pins
        self._admission = admission
        self._answered = answered
        self._most = most  # rankings scored together
        self._most_ms = max_delay_ms  # that they take longer than one, where others wait with an SLO of their own
        self.max_delay_ms = max_delay_ms
        self.answers: list[Answer] = []
        self._timers: TimerHeap[Ranking] = TimerHeap(attrgetter("answered"))
        self._delays = (0.0, 0)  # seconds and number of delays until the device took a ranking
        self._batching = Batching()

    def __len__(self) -> int:
        """Rankings without an answer."""
        return len(self._admission.waiting)

    @property
    def next_timer(self) -> float | None:
        """When the next one is due, or expires."""
        first = self._timers.first()
        return None if first is None else first[0]

    def enqueue(self, rank: Rank, now: float) -> None:
        """A ranking request came; it gets exactly one answer."""
        ranking = Ranking(rank)
        if ranking.deadline <= now:
            self._answer(ranking, "deadline_exceeded", "the deadline passed before the worker read the request")
            return
        self._pins.ranked(rank.task.request_key, rank.task.times.arrived)
        found = self._residents.find(rank.task)
        if rank.pass_to is not None and not self._residents.is_here(found, ranking.tokens):
            self._answer(ranking, "overloaded", "its prefix KV are with another worker")  # and go there (replies.py)
            return
        self._admission.book(ranking, found)
        if rank.late and not self._admission.truncate(ranking, now) and ranking.due < ranking.deadline:
            ranking.is_late()
        lost: list[tuple[Ranking, Full]] = []
        while (full := self._admission.full(ranking, now)) is not None:
            loser = self._admission.loser(ranking, full)
            if loser is None:
                if full.measure == "ms" and self._admission.goes_first(ranking, now):
                    break
                if not lost and self._admission.tries(ranking, full, now):
                    break
                for each, _ in lost:  # it does not fit even so: nobody has lost a place for it
                    self._admission.add(each)
                self._refuse(ranking, full.reason, now)
                return
            self._admission.remove(loser)
            lost.append((loser, full))
        for loser, full in lost:
            self._refuse(loser, f"{full.reason}; {GAVE_WAY[full.measure]}", now)
        self._admission.add(ranking)
        self._timers.add(ranking.begin_by, ranking)
        # A loser may have been a copy of this request, and released what was found by its pin.
        self._residents.place(ranking, self._residents.find(rank.task) if lost else found)

    def expire(self, now: float) -> None:
        """Answer those whose deadline has passed, and those that are not begun, or done, in time and will not be."""
        while (first := self._timers.first()) is not None and first[0] <= now:
            ranking = first[1]
            self._timers.pop()
            if ranking.deadline <= now:
                waited = (now - ranking.task.arrived) * 1e3
                self._answer(ranking, "deadline_exceeded", f"the deadline passed after {waited:.0f} ms on the worker")
                continue
            if ranking.measured.started and not (ranking.late or ranking.booking.expected_ms):
                # Nothing is known of its kind until some have been done: under an overload from the start, all would be
                # given up on the way, and nothing be refused before.
                self._timers.add(ranking.deadline, ranking)
                continue
            was_late, full = ranking.late, self._admission.overdue(ranking, now)
            if full is not None:
                self._refuse(ranking, full.reason, now)
                continue
            if now < ranking.task.due:
                self._timers.add(ranking.task.due, ranking)
                continue
            if not was_late:
                self._residents.moved(ranking)
            self._timers.add(min(ranking.deadline, now + RECHECK_S), ranking)

    def look_ahead(self, job: PrefillJob, now: float) -> None:
        """Before a slice of the job: refuse the waiters for which it comes too late; without one left, it ends."""
        for ranking in job.waiters:
            if not ranking.answered and (full := self._admission.comes_late(ranking, job, now)) is not None:
                self._refuse(ranking, full.reason, now)

    def started(self, rankings: Iterable[Ranking], now: float) -> None:
        """The device works for these from now on, if it did not before."""
        for each in rankings:
            if not each.measured.started:
                each.measured.started = now
                if not each.late:
                    self._delays = (self._delays[0] + now - each.came, self._delays[1] + 1)

    def job_over(self, job: PrefillJob) -> None:
        """The job is over: its waiters are scored, look again, or learn of its error."""
        waiters, job.waiters = job.waiters, []
        for ranking in waiters:
            if job.error is not None:
                self._answer(ranking, "failed", job.error)
            elif job.entry is None:
                self._residents.ready(ranking, job.run.region, "full")
            else:
                self._residents.place_again(ranking)

    def next_batch(self, first: Ranking) -> list[Ranking]:
        """This ranking, which is next, and those behind it that are ready, up to the first job: as many as there are
        where batches pay, else so few that they take no longer than a chunk may, or two. Where the worker serves
        several scenarios, so few that another one's ranking need not wait for longer than the tightest SLO allows."""
        factor, score_ms = self._admission.calibration.factor, self._admission.score_ms
        within_ms = math.inf if self._batching.pays else SLICE_SHARE * self.max_delay_ms
        turns = self._queue.late if first.late else self._queue.in_time
        bound_ms = self._batching.ms(score_ms(first), 1) + self._most_ms if first.task.scenario else math.inf
        batch: list[Ranking] = []
        alone_ms = 0.0
        ranking: Ranking | PrefillJob | None = first
        while isinstance(ranking, Ranking):
            alone_ms += score_ms(ranking)
            if factor * alone_ms > within_ms and len(batch) >= ALWAYS_TOGETHER:
                break
            if batch and self._batching.ms(alone_ms, len(batch) + 1) > bound_ms:
                break
            turns.remove(ranking.booking.account)
            batch.append(ranking)
            ranking = turns.first() if len(batch) < self._most else None
        return batch

    def score(self, now: float, together: list[Ranking]) -> float:
        """Score rankings that are ready, and answer them; returns the milliseconds it took.

        Where a batch fails, each ranking is scored alone: a bad one must not take others along.
        """
        admission, batching, batches = self._admission, self._batching, [together]
        spent_ms, failed = 0.0, self._executor.failed_in_a_row
        while batches:
            batch = batches.pop()
            self.started(batch, now)
            try:
                scores, ms = self._executor.score(list(map(_SCORED, batch)))
            except Exception as error:  # a user's model or the device may raise anything; the requests must be answered
                ms = self._executor.failed_ms
                spent_ms += ms
                for ranking in batch:
                    admission.charge(ranking, ms / len(batch))
                if len(batch) > 1:
                    batches.extend([ranking] for ranking in reversed(batch))
                else:
                    self._answer(batch[0], "failed", describe(error))
                continue
            spent_ms += ms
            predicted_ms = sum(admission.score_ms(ranking) for ranking in batch)
            admission.calibration.add(predicted_ms, ms)
            batching.add(predicted_ms, len(batch), ms)
            for ranking, rows in zip(batch, scores, strict=True):
                if ranking.held.entry is not None and ranking.held.entry.failed:
                    # Another ranking's scores from these prefix KV were not finite: it was no hit, and is placed anew.
                    ranking.measured.outcome = None
                    self._residents.place_again(ranking)
                else:
                    self._answer_scored(ranking, rows, ms, len(batch))
        # A batch and its rankings alone are one failure: else some bad rankings that come together end the worker.
        self._executor.failed_in_a_row = min(self._executor.failed_in_a_row, failed + 1)
        return spent_ms

    def _answer_scored(self, ranking: Ranking, scores: npt.NDArray[np.float32], batch_ms: float, batch: int) -> None:
        ranking.measured.score_ms = batch_ms
        self._admission.charge(ranking, batch_ms / batch)
        if np.isfinite(scores).all():
            if not ranking.full:  # one whose user was erased leaves nothing
                self._auditor.consider(ranking.task, ranking.measured, scores)
            self._answer(ranking, "ok", scores=scores)
        else:
            self._answer_not_finite(ranking, scores)

    def _answer_not_finite(self, ranking: Ranking, scores: npt.NDArray[np.float32]) -> None:
        """NaN or infinite scores: answer `failed`, and evict the entry, which may have caused them."""
        if ranking.held.entry is not None:
            self._cache.evict(ranking.held.entry)
            self._pins.release_entry(ranking.held.entry)
        bad = int((~np.isfinite(scores)).sum())
        self._answer(ranking, "failed", f"{bad} of {scores.size} scores are NaN or infinite")

    def take_queue_ms(self, now: float) -> float:
        """Delay until the device takes a ranking that is in time: the mean since the last call, or the longest wait if
        that is more."""
        total, number = self._delays
        self._delays = (0.0, 0)
        oldest = next((each for each in self._admission.waiting if not (each.measured.started or each.late)), None)
        waited = 0.0 if oldest is None else now - oldest.came
        return max(total / number if number else 0.0, waited) * 1e3

    def holds(self) -> Counter[Entry]:
        """How often each entry is pinned from here."""
        return Counter(ranking.held.entry for ranking in self._admission.waiting if ranking.held.entry is not None)

    def users(self) -> set[str]:
        """The users whose rankings wait for an answer."""
        return {ranking.task.user_key for ranking in self._admission.waiting}

    def leave_nothing(self, users: Set[str]) -> None:
        """These users were erased: rankings that look again, after a reload, would bring entries of theirs back."""
        for ranking in self._admission.waiting:
            ranking.full = ranking.full or ranking.task.user_key in users

    # ---- answering ----

    def _refuse(self, ranking: Ranking, reason: str, now: float) -> None:
        """It is not done in time. To hand it in again as late takes another turn of the device: only where that may
        help."""
        self._admission.remove(ranking)
        self._answer(ranking, "overloaded", reason, retry_late=self._admission.takes_late(ranking, now))

    def _answer(
        self,
        ranking: Ranking,
        status: Status,
        detail: str = "",
        scores: npt.NDArray[np.float32] | None = None,
        *,
        retry_late: bool = True,
    ) -> None:
        """The one answer: release what the request held, then say so."""
        assert not ranking.answered
        ranking.answered = True
        self._admission.remove(ranking)
        self._residents.let_go(ranking)
        self._pins.release(ranking.task.request_key)
        self._answered.add(ranking.task.request_key)
        self.answers.append(Answer(ranking.rank, status, scores, detail, ranking.measured, retry_late))
