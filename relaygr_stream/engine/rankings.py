"""Rankings: places each ranking request, scores it, and gives it its one answer.

    find ─► HBM: score | computing: join | DRAM: load | shorter: prefill the rest, join | nothing: infer in full, join

Full inference goes into the cache where it may stay, else into the scratch region. A ranking that was cut to its newest
behaviours (Admission.truncate) is always inferred in scratch: they are not a prefix of the user's history.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Set

import numpy as np
import numpy.typing as npt

from relaygr_stream.cache.entry import Coverage, Entry, Found
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.engine.admission import GAVE_WAY, Admission
from relaygr_stream.engine.audit import Auditor
from relaygr_stream.engine.commands import Answer, PrefillJob, RankTask
from relaygr_stream.engine.executor import SLICE_SHARE, Executor, describe
from relaygr_stream.engine.forecast import ALWAYS_TOGETHER, Batching, Full
from relaygr_stream.engine.prefill import PrefillJobs
from relaygr_stream.engine.queue import RecentIds, TimerHeap, Waiters, WorkQueue
from relaygr_stream.engine.signals import PinTable
from relaygr_stream.models.api import ScoreInput, takes_suffix
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.wire.messages import Outcome, Status


class Rankings:
    """Ranking requests that wait for an answer; `answers` gets one for each, once it holds nothing any more."""

    def __init__(
        self,
        executor: Executor,
        cache: PrefixCache,
        queue: WorkQueue,
        jobs: PrefillJobs,
        waiters: Waiters,
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
        self._jobs = jobs
        self._waiters = waiters
        self._auditor = auditor
        self._admission = admission
        self._pins = pins
        self._answered = answered
        self._most = most  # rankings scored together
        self._max_delay_ms = max_delay_ms
        self.answers: list[Answer] = []
        self._deadlines: TimerHeap[RankTask] = TimerHeap(lambda task: task.answered)
        self._scratch_wanted: TimerHeap[RankTask] = TimerHeap(lambda task: task.answered)
        self._delays = (0.0, 0)  # seconds and number of delays until the device took a ranking
        self._batching = Batching()
        self._takes_suffix = takes_suffix(executor.model)
        self._empty = KVRegion.new(executor.model.layout, 0, device=executor.device)

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
        found = self._find(task)
        if task.pass_to is not None and not self._is_here(task, found):
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
        self._place(task, self._find(task))

    def expire(self, now: float) -> None:
        """Answer those whose deadline has passed."""
        while (first := self._deadlines.first()) is not None and first[0] <= now:
            waited = (now - first[1].arrived) * 1e3
            self._answer(first[1], "deadline_exceeded", f"the deadline passed after {waited:.0f} ms on the worker")

    def lend_scratch(self) -> None:
        """Start the full inference that is due first of those that need the scratch region, if it is free."""
        while self._scratch_wanted.first() is not None and self._scratch_free():
            task = self._scratch_wanted.pop()
            tokens = task.tokens
            if not self._takes_suffix and len(task.suffix):
                tokens = task.tokens.followed_by(task.suffix)
                task.suffix = task.suffix.slice(0, 0)
            task.computed_tokens = len(tokens)
            self._jobs.start_in_scratch(task, tokens)

    def started(self, tasks: Iterable[RankTask], now: float) -> None:
        """The device works for these from now on, if it did not before."""
        for task in tasks:
            if not task.started:
                task.started = now
                self._delays = (self._delays[0] + now - task.arrived - task.store_s, self._delays[1] + 1)

    def job_over(self, job: PrefillJob) -> None:
        """The job is over: its waiters are scored, look again, or learn of its error."""
        waiters, job.waiters = job.waiters, []
        for task in waiters:
            if job.error is not None:
                self._answer(task, "failed", job.error)
            elif job.entry is None:
                self._set_ready(task, job.run.region, "full")
            else:
                self.again(task)

    def again(self, task: RankTask) -> None:
        """What the task waited for is over: look again."""
        if task.answered:
            return
        held = task.entry
        if held is not None and held.region is not None and held.ready and self._serves(held, task):
            # Even if the user's entry is another by now: else two sequences of one user displace each other for ever.
            self._set_ready(task, _first(held.region, len(task.tokens)), "hbm")
        else:
            self._let_go(task)
            self._place(task, self._find(task))

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
        spent_ms = 0.0
        while batches:
            batch = batches.pop()
            self.started(batch, now)
            try:
                scores, ms = self._executor.score([_score_input(task) for task in batch])
            except Exception as error:  # a user's model or the device may raise anything; the requests must be answered
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
                    self.again(task)
                else:
                    self._answer_scored(task, rows, ms, len(batch))
        return spent_ms

    def _answer_scored(self, task: RankTask, scores: npt.NDArray[np.float32], batch_ms: float, batch: int) -> None:
        task.score_ms = batch_ms
        task.device_ms += batch_ms / batch
        task.account.served_ms += batch_ms / batch
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
        waited = 0.0 if oldest is None else now - oldest.arrived - oldest.store_s
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

    # ---- placing ----

    def _find(self, task: RankTask) -> Found:
        """The user's entry and its coverage. If it is of no use, what the request's own signal pinned: a newer sequence
        of the user may have replaced that."""
        entry, coverage = self._cache.find(task.user_key, task.tokens)
        if coverage is Coverage.NONE:
            pinned = self._pins.entry(task.request_key)
            if pinned is not None and self._serves(pinned, task):
                return pinned, Coverage.COVERS
        return entry, coverage

    def _is_here(self, task: RankTask, found: Found) -> bool:
        """Whether a ranking whose prefix KV a delegate has can do without it. While they are computed here, for a later
        request, it would wait for what the delegate has ready."""
        entry, coverage = found
        if entry is None or coverage is not Coverage.COVERS:
            return False
        return not entry.computing or self._cache.serves(entry, task.tokens)

    def _place(self, task: RankTask, found: Found) -> None:
        """What this ranking can be scored against; may be called again when something it waited for is over."""
        if len(task.tokens) == 0 and (len(task.suffix) == 0 or self._takes_suffix):
            self._set_ready(task, self._empty, "full")
            return
        if task.full or (len(task.suffix) and not self._takes_suffix):
            self._full(task, in_cache=False)
            return
        entry, coverage = found
        if entry is None or coverage is Coverage.NONE:
            self._full(task, in_cache=True)
        elif coverage is Coverage.COVERS and entry.load is None and self._cache.serves(entry, task.tokens):
            assert entry.region is not None
            self._hold(task, entry)
            self._set_ready(task, _first(entry.region, len(task.tokens)), "hbm")
        elif entry.computing:
            task.outcome = task.outcome or "joined"
            self._join(task, entry)
        elif entry.load is not None or (entry.region is None and self._cache.load(entry)):
            task.outcome = task.outcome or "dram"
            self._hold(task, entry)
            self._waiters.add(entry, task)
        elif entry.region is None:
            self._full(task, in_cache=False)  # HBM is full of pinned entries: it cannot come back now
        elif (grown := self._cache.extend(entry, task.tokens)) is not None:
            task.outcome = task.outcome or "joined"  # not ready: what it lacks is computed first
            task.computed_tokens = len(task.tokens) - _computed(grown)
            self._jobs.start(grown, task.deadline)
            self._join(task, grown)
        else:
            self._full(task, in_cache=True)

    def _full(self, task: RankTask, *, in_cache: bool) -> None:
        """Infer the whole sequence for this ranking: into the cache where it may stay, else into scratch."""
        task.outcome = "truncated" if task.truncated_to else "full"
        if in_cache and (entry := self._cache.open(task.user_key, task.tokens)) is not None:
            task.computed_tokens = len(task.tokens)
            self._jobs.start(entry, task.deadline)
            self._join(task, entry)
            return
        self._scratch_wanted.add(task.deadline, task)
        self.lend_scratch()  # to this one, unless another that waits is due before it

    def _scratch_free(self) -> bool:
        return self._cache.scratch.free or self._auditor.give_up_scratch(self._cache.scratch)

    def _hold(self, task: RankTask, entry: Entry) -> None:
        self._cache.pin(entry)
        task.entry = entry

    def _join(self, task: RankTask, entry: Entry) -> None:
        self._hold(task, entry)
        self._jobs.join(task, entry)

    def _set_ready(self, task: RankTask, region: KVRegion, outcome: Outcome) -> None:
        task.outcome = task.outcome or outcome
        task.region = region
        self._queue.add_ready(task)

    def _serves(self, entry: Entry, task: RankTask) -> bool:
        return not entry.failed and self._cache.coverage(entry, task.tokens) is Coverage.COVERS

    # ---- answering ----

    def _answer(
        self, task: RankTask, status: Status, detail: str = "", scores: npt.NDArray[np.float32] | None = None
    ) -> None:
        """The one answer: release what the request held, then say so."""
        assert not task.answered
        task.answered = True
        self._admission.remove(task)
        self._let_go(task)
        self._pins.release(task.request_key)
        self._answered.add(task.request_key)
        self.answers.append(Answer(task, status, scores, detail))

    def _let_go(self, task: RankTask) -> None:
        if task.entry is not None:
            self._cache.unpin(task.entry)
            task.entry = None
        if task.borrowed and task.region is not None:  # before it completes, the job has the scratch
            self._cache.scratch.give_back(task.region)
            task.borrowed = False
        task.region = None


def _score_input(task: RankTask) -> ScoreInput:
    """What the region lacks of the prefix, a few behaviours (worker.max_stale_tokens), comes before the suffix."""
    assert task.region is not None
    suffix, there = task.suffix, task.region.length
    if there < len(task.tokens):
        suffix = task.tokens.slice(there, len(task.tokens)).followed_by(suffix)
    return ScoreInput(task.region, suffix, task.candidates, task.features)


def _computed(entry: Entry) -> int:
    return 0 if entry.region is None else entry.region.length


def _first(region: KVRegion, tokens: int) -> KVRegion:
    """The region as a request with so many prefix tokens sees it, even if the entry is extended meanwhile."""
    return KVRegion(region.layout, region.storage, region.capacity, min(tokens, region.length))
