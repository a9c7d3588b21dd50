"""Rankings: takes each ranking request or refuses it, scores those that are ready, and gives each its one answer.

Placement finds the prefix KV that a ranking is scored against.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Set

import numpy as np
import numpy.typing as npt

from relaygr_stream.cache.entry import Entry
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.engine.admission import GAVE_WAY, Admission
from relaygr_stream.engine.audit import Auditor
from relaygr_stream.engine.commands import Answer, PrefillJob, RankTask
from relaygr_stream.engine.executor import SLICE_SHARE, Executor, describe
from relaygr_stream.engine.forecast import ALWAYS_TOGETHER, Batching, Full
from relaygr_stream.engine.pins import PinTable
from relaygr_stream.engine.placement import Placement
from relaygr_stream.engine.queue import RecentIds, TimerHeap, WorkQueue
from relaygr_stream.models.api import ScoreInput
from relaygr_stream.wire.messages import Status


class Rankings:
    """Ranking requests that wait for an answer; `answers` gets one for each, once it holds nothing any more."""

    def __init__(
        self,
        executor: Executor,
        cache: PrefixCache,
        queue: WorkQueue,
        placement: Placement,
        auditor: Auditor,
        admission: Admission,
        pins: PinTable,
        answered: RecentIds,
        *,
        most: int,
        max_delay_ms: float,
    ) -> None:
        self._executor = executor
        self._cache = cache
        self._queue = queue
        self._placement = placement
        self._auditor = auditor
        self._admission = admission
        self._pins = pins
        self._answered = answered
        self._most = most  # rankings scored together
        self._max_delay_ms = max_delay_ms
        self.answers: list[Answer] = []
        self._deadlines: TimerHeap[RankTask] = TimerHeap(lambda task: task.answered)
        self._delays = (0.0, 0)  # seconds and number of delays until the device took a ranking
        self._batching = Batching()

    def __len__(self) -> int:
        """Rankings without an answer."""
        return len(self._admission.waiting)

    @property
    def next_deadline(self) -> float | None:
        """When the next one expires."""
        first = self._deadlines.first()
        return None if first is None else first[0]

    def enqueue(self, task: RankTask, now: float) -> None:
        """A ranking request came; it gets exactly one answer."""
        if task.deadline <= now:
            self._answer(task, "deadline_exceeded", "the deadline passed before the worker read the request")
            return
        self._pins.ranked(task.request_key, task.arrived)
        found = self._placement.find(task)
        if task.pass_to is not None and not self._placement.is_here(task, found):
            self._answer(task, "overloaded", "its prefix KV are with another worker")  # and go there (replies.py)
            return
        self._admission.book(task, found)
        self._admission.truncate(task, found, now)
        lost: list[tuple[RankTask, Full]] = []
        while (full := self._admission.full(task, now)) is not None:
            loser = self._admission.loser(task, full)
            if loser is None:
                if not lost and self._admission.tries(task, full, now):
                    break
                for each, _ in lost:  # it does not fit even so: nobody has lost a place for it
                    self._admission.add(each)
                self._answer(task, "overloaded", full.reason)
                return
            self._admission.remove(loser)
            lost.append((loser, full))
        for loser, full in lost:
            self._answer(loser, "overloaded", f"{full.reason}; {GAVE_WAY[full.measure]}")
        self._admission.add(task)
        self._deadlines.add(task.deadline, task)
        self._placement.place(task, self._placement.find(task))

    def expire(self, now: float) -> None:
        """Answer those whose deadline has passed."""
        while (first := self._deadlines.first()) is not None and first[0] <= now:
            waited = (now - first[1].arrived) * 1e3
            self._answer(first[1], "deadline_exceeded", f"the deadline passed after {waited:.0f} ms on the worker")

    def started(self, tasks: Iterable[RankTask], now: float) -> None:
        """The device works for these from now on, if it did not before."""
        for task in tasks:
            if not task.started:
                task.started = now
                self._delays = (self._delays[0] + now - task.arrived - task.waited_s, self._delays[1] + 1)

    def job_over(self, job: PrefillJob) -> None:
        """The job is over: its waiters are scored, look again, or learn of its error."""
        waiters, job.waiters = job.waiters, []
        for task in waiters:
            if job.error is not None:
                self._answer(task, "failed", job.error)
            elif job.entry is None:
                self._placement.ready(task, job.run.region, "full")
            else:
                self._placement.again(task)

    def score(self, now: float) -> float:
        """Score the next rankings, which are ready, and answer them; returns the milliseconds it took.

        Together go as many as there are where batches pay, else so few that they take no longer than a chunk may, or
        two. Where a batch fails, each ranking is scored alone: a bad one must not take others along.
        """
        admission, batching = self._admission, self._batching
        factor, within_ms = (
            admission.calibration.factor,
            math.inf if batching.pays else SLICE_SHARE * self._max_delay_ms,
        )
        batches = [
            self._queue.pop_ready(
                self._most, lambda task: factor * admission.score_ms(task), within_ms, least=ALWAYS_TOGETHER
            )
        ]
        spent_ms, failed = 0.0, self._executor.failed_in_a_row
        while batches:
            batch = batches.pop()
            self.started(batch, now)
            try:
                scores, ms = self._executor.score([_score_input(task) for task in batch])
            except Exception as error:  # a user's model or the device may raise anything; the requests must be answered
                ms = self._executor.failed_ms
                spent_ms += ms
                for task in batch:
                    admission.charge(task, ms / len(batch))
                if len(batch) > 1:
                    batches.extend([task] for task in reversed(batch))
                else:
                    self._answer(batch[0], "failed", describe(error))
                continue
            spent_ms += ms
            predicted_ms = sum(admission.score_ms(task) for task in batch)
            admission.calibration.add(predicted_ms, ms)
            batching.add(predicted_ms, len(batch), ms)
            for task, rows in zip(batch, scores, strict=True):
                if task.entry is not None and task.entry.failed:
                    # Another ranking's scores from these prefix KV were not finite: it was no hit, and is placed anew.
                    task.outcome = None
                    self._placement.again(task)
                else:
                    self._answer_scored(task, rows, ms, len(batch))
        # A batch and its rankings alone are one failure: else some bad rankings that come together end the worker.
        self._executor.failed_in_a_row = min(self._executor.failed_in_a_row, failed + 1)
        return spent_ms

    def _answer_scored(self, task: RankTask, scores: npt.NDArray[np.float32], batch_ms: float, batch: int) -> None:
        task.score_ms = batch_ms
        self._admission.charge(task, batch_ms / batch)
        if np.isfinite(scores).all():
            task.approximate = task.entry is not None and task.entry.approximate
            self._auditor.consider(task, scores)
            self._answer(task, "ok", scores=scores)
        else:
            self._answer_not_finite(task, scores)

    def _answer_not_finite(self, task: RankTask, scores: npt.NDArray[np.float32]) -> None:
        """NaN or infinite scores: answer `failed`, and evict the entry, which may have caused them."""
        if task.entry is not None:
            self._cache.evict(task.entry)
            self._pins.release_entry(task.entry)
        bad = int((~np.isfinite(scores)).sum())
        self._answer(task, "failed", f"{bad} of {scores.size} scores are NaN or infinite")

    def take_queue_ms(self, now: float) -> float:
        """Delay until the device takes a ranking: the mean since the last call, or the longest wait if that is more."""
        total, number = self._delays
        self._delays = (0.0, 0)
        oldest = next((task for task in self._admission.waiting if not task.started), None)
        waited = 0.0 if oldest is None else now - oldest.arrived - oldest.waited_s
        return max(total / number if number else 0.0, waited) * 1e3

    def holds(self) -> Counter[Entry]:
        """How often each entry is pinned from here."""
        return Counter(task.entry for task in self._admission.waiting if task.entry is not None)

    def users(self) -> set[str]:
        """The users whose rankings wait for an answer."""
        return {task.user_key for task in self._admission.waiting}

    def leave_nothing(self, users: Set[str]) -> None:
        """These users were erased: rankings that look again, after a reload, would bring entries of theirs back."""
        for task in self._admission.waiting:
            task.full = task.full or task.user_key in users

    # ---- answering ----

    def _answer(
        self, task: RankTask, status: Status, detail: str = "", scores: npt.NDArray[np.float32] | None = None
    ) -> None:
        """The one answer: release what the request held, then say so."""
        assert not task.answered
        task.answered = True
        self._admission.remove(task)
        self._placement.let_go(task)
        self._pins.release(task.request_key)
        self._answered.add(task.request_key)
        self.answers.append(Answer(task, status, scores, detail))


def _score_input(task: RankTask) -> ScoreInput:
    """What the region lacks of the whole sequence: perhaps the end of the prefix (worker.max_stale_tokens), the suffix
    unless it was inferred with the prefix."""
    assert task.region is not None
    suffix, there, prefix = task.suffix, task.region.length, len(task.tokens)
    if there < prefix:
        suffix = task.tokens.slice(there, prefix).followed_by(suffix)
    elif there > prefix:
        suffix = suffix.slice(there - prefix, len(suffix))
    return ScoreInput(task.region, suffix, task.candidates, task.features)
