"""Prefill jobs compute prefix KV, one job per entry, for all rankings and admitted requests that wait for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from relaygr_stream.cache.entry import Entry
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.engine.commands import Placed, PrefillTask
from relaygr_stream.engine.executor import Executor, describe
from relaygr_stream.engine.forecast import Calibration
from relaygr_stream.engine.queue import WorkQueue
from relaygr_stream.engine.ranking import PrefillJob, Ranking
from relaygr_stream.models.api import Tokens


@dataclass
class PrefillCounters:
    """Running totals of jobs for admitted requests, by how they ended; joined: a ranking came before that."""

    job_finished: int = 0  # before their ranking was expected
    job_late: int = 0  # after that
    job_starved: int = 0  # the life window, the ranking or the lane ended first
    job_cancelled: int = 0  # its client cancelled the only request that it was for
    job_failed: int = 0
    job_joined: int = 0


class PrefillJobs:
    """The running jobs. bound_ms: how long a slice may keep the device from a ranking that comes meanwhile."""

    def __init__(self, executor: Executor, cache: PrefixCache, queue: WorkQueue, bound_ms: float) -> None:
        self._executor = executor
        self._cache = cache
        self._queue = queue
        self.bound_ms = bound_ms
        self.placed: list[Placed] = []  # what became of signals whose origin is to be told
        self.counters = PrefillCounters()
        self.calibration = Calibration()
        self._by_entry: dict[Entry, PrefillJob] = {}
        self.in_scratch: PrefillJob | None = None  # the last one there

    def __len__(self) -> int:
        """Jobs that are not over, without one in scratch."""
        return len(self._by_entry)

    def start(self, entry: Entry, signal: PrefillTask | None = None) -> None:
        """Start computing what the entry lacks. signal: of the admitted request that it is for, by whose due time the
        queue orders it; None: it is for a ranking that has come, and joins it.
        """
        assert entry.region is not None
        run = self._executor.prefill(entry.region, entry.tokens)
        job = PrefillJob(run, math.inf if signal is None else signal.due, entry, signal)
        job.position = entry.region.length
        job.expected_ms = self._executor.costs.prefill_ms(job.position, len(entry.tokens) - job.position)
        self._by_entry[entry] = job
        if signal is not None:
            self._queue.add_background(job)

    def start_in_scratch(self, ranking: Ranking, tokens: Tokens) -> None:
        """Start computing `tokens` in the scratch region, which is free, for one ranking."""
        ranking.held.borrowed = True
        run = self._executor.prefill(self._cache.scratch.borrow(), tokens)
        job = PrefillJob(run, math.inf, waiters=[ranking], expected_ms=self._executor.costs_of_prefix(len(tokens)))
        self.in_scratch = job
        self._queue.add(ranking, job)

    def join(self, ranking: Ranking, entry: Entry) -> None:
        """Let the ranking wait for the entry's job."""
        job = self._by_entry[entry]
        if job.pre_infer and not job.joined:
            job.joined = True
            self.counters.job_joined += 1
        job.waiters.append(ranking)
        self._queue.add(ranking, job)

    def moved(self, ranking: Ranking) -> None:
        """The ranking has another place in the queue: so has the job that it waits for."""
        for job in (self.in_scratch, None if ranking.held.entry is None else self._by_entry.get(ranking.held.entry)):
            if job is not None and not job.over and ranking in job.waiters:
                self._queue.add(ranking, job)

    def hurry(self, entry: Entry, due: float) -> None:
        """Another request waits for the entry's job, and may be due before the one that it was started for."""
        job = self._by_entry.get(entry)
        if job is not None and due < job.due:
            job.due = due
            self._queue.add_background(job)

    def end_unwanted(self, job: PrefillJob, now: float, *, cancelled: bool = False) -> bool:
        """End the job if no ranking waits for it or will. What was computed stays. Waiters stay in it, without those
        that were answered meanwhile. cancelled: the client cancelled its request. Returns whether it ended.
        """
        if job.waiters:
            job.waiters = [each for each in job.waiters if not each.answered]
        if job.wanted:
            return False
        self._end(job, now, cancelled=cancelled)
        return True

    def job_of(self, entry: Entry) -> PrefillJob | None:
        """The job that computes this entry, if there is one."""
        return self._by_entry.get(entry)

    def remaining_ms(self, job: PrefillJob) -> float:
        """Predicted device time until it has completed."""
        done = job.run.region.length
        return job.run.rest_ms(self.prefill_ms(done, max(0, len(job.run.tokens) - done)))

    def prefill_ms(self, position: int, tokens: int) -> float:
        """Predicted device time of a job of so many tokens behind `position`."""
        return self._executor.costs.prefill_ms(position, tokens) * self.calibration.factor if tokens else 0.0

    def waiting_ms(self) -> float:
        """Predicted device time of all jobs for admitted requests."""
        return sum(self.remaining_ms(job) for job in self._queue.pre_inferences())

    def late_s(self, now: float) -> float:
        """Seconds since the ranking of the most overdue job for an admitted request was expected; 0: none is late."""
        return max([0.0, *(now - job.due for job in self._queue.pre_inferences())])

    def advance(self, job: PrefillJob, now: float) -> float:
        """Give it a slice of device time; returns the milliseconds. The job ends after its last slice, after a
        failure (`job.error`), or when no request waits for it any more (`end_unwanted`).
        """
        if self.end_unwanted(job, now):
            return 0.0
        job.started = job.started or now
        try:
            ms = job.run.advance(self.bound_ms)
        except Exception as error:  # a user's model or the device may raise anything; the request must be answered
            job.error = describe(error)
            self._end(job, now)
            return self._executor.failed_ms
        job.ms += ms
        if job.run.done:
            self.calibration.add(job.expected_ms, job.ms)
            self._end(job, now + ms / 1e3)
        return ms

    def _end(self, job: PrefillJob, now: float, *, cancelled: bool = False) -> None:
        job.over = True
        completed = job.run.done and job.error is None
        if job.entry is None:
            if not (completed and job.waiters):
                for ranking in job.waiters:
                    ranking.held.borrowed = False
                self._cache.scratch.give_back(job.run.region)
            return
        del self._by_entry[job.entry]
        if job.signal is not None:
            self._count(job, completed, cancelled, now)
            if job.signal.origin is not None:
                self.placed.append(_placed(job, job.signal, completed, now))
        if job.error is not None:
            self._cache.abort(job.entry)
        elif completed:
            self._cache.finish(job.entry)
        else:
            self._cache.cut_short(job.entry)

    def _count(self, job: PrefillJob, completed: bool, cancelled: bool, now: float) -> None:
        if job.error is not None:
            self.counters.job_failed += 1
        elif cancelled:
            self.counters.job_cancelled += 1
        elif not completed:
            self.counters.job_starved += 1
        elif now > job.due:
            self.counters.job_late += 1
        else:
            self.counters.job_finished += 1


def _placed(job: PrefillJob, task: PrefillTask, completed: bool, now: float) -> Placed:
    result = "extended" if job.position else "computed"
    return Placed(task, result, job.started, now, job.ms, job.run.region.length - job.position, completed)
