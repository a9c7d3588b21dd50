"""Placement: what prefix KV a ranking is scored against, and what it waits for until they are there.

    acquire ─► ready: score | computed, or begun now: join | loaded: wait | nothing to hold: infer in the scratch region

A ranking that was cut to its newest behaviours (Admission.truncate) is always inferred in scratch: they are not a
prefix of the user's history.
"""

from __future__ import annotations

from typing import Final

from relaygr_stream.cache.entry import Found
from relaygr_stream.engine.audit import Auditor
from relaygr_stream.engine.executor import Executor
from relaygr_stream.engine.queue import TimerHeap, Waiters, WorkQueue
from relaygr_stream.engine.ranking import PrefillJob, Ranking
from relaygr_stream.engine.residents import Residents
from relaygr_stream.models.api import takes_suffix
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.wire.messages import Outcome


class Placement:
    """Finds prefix KV for rankings. One that has them is pushed to the queue of those that are ready to be scored; any
    other holds what it waits for, a prefill job, a load or the scratch region, and is placed again when that is over.
    """

    def __init__(
        self,
        executor: Executor,
        residents: Residents,
        queue: WorkQueue,
        waiters: Waiters,
        auditor: Auditor,
    ) -> None:
        self.executor: Final = executor
        self.residents: Final = residents
        self.queue: Final = queue
        self.auditor: Final = auditor
        self._cache, self._jobs = residents.cache, residents.jobs
        self._waiters = waiters
        self._scratch_wanted: TimerHeap[Ranking] = TimerHeap(lambda ranking: ranking.answered)
        self._in_scratch: Ranking | None = None  # the last one there
        self._takes_suffix = takes_suffix(executor.model)
        self._empty = KVRegion.new(executor.model.layout, 0, device=executor.device)

    def find(self, ranking: Ranking) -> Found:
        """What there is for this ranking."""
        return self.residents.find(ranking.task.user_key, ranking.tokens, ranking.task.request_key)

    def place(self, ranking: Ranking, found: Found) -> None:
        """Have it scored against what was found, or wait for what lacks; the ranking holds nothing yet."""
        tokens, measured = ranking.tokens, ranking.measured
        if len(tokens) == 0 and (len(ranking.suffix) == 0 or self._takes_suffix):
            self.ready(ranking, self._empty, "full")
            return
        if ranking.full or (len(ranking.suffix) and not self._takes_suffix):
            self._infer_in_scratch(ranking)
            return
        task = ranking.task
        got = self.residents.acquire(found, task.user_key, tokens, ranking.due, task.request_key)
        if (entry := got.entry) is None:
            self._infer_in_scratch(ranking)
            return
        self._cache.pin(entry)
        ranking.held.entry = entry
        if got.way == "ready":
            assert entry.region is not None
            self.ready(ranking, _first(entry.region, len(tokens)), "hbm")
        elif got.way in ("dram", "loading"):
            measured.outcome = measured.outcome or "dram"
            self._waiters.add(entry, ranking)
        else:
            measured.computed_tokens = got.missing or measured.computed_tokens
            # What is shorter counts as joined: it is not ready, what it lacks is computed first.
            measured.outcome = "full" if got.way == "nothing" else measured.outcome or "joined"
            self._jobs.join(ranking, entry)

    def again(self, ranking: Ranking) -> None:
        """What the ranking waited for is over: place it anew. One that is answered by now stays so."""
        if ranking.answered:
            return
        held = ranking.held.entry
        if held is not None and held.region is not None and held.ready and self.residents.serves(held, ranking.tokens):
            # Even if the user's entry is another by now: else two sequences of one user displace each other for ever.
            self.ready(ranking, _first(held.region, len(ranking.tokens)), "hbm")
        else:
            self.let_go(ranking)
            self.place(ranking, self.find(ranking))

    def ready(self, ranking: Ranking, region: KVRegion, outcome: Outcome) -> None:
        """The ranking is to be scored against this region. outcome: kept only where an earlier placement gave none."""
        ranking.measured.outcome = ranking.measured.outcome or outcome
        ranking.held.region = region
        self.queue.add(ranking)

    def lend_scratch(self) -> None:
        """Start the full inference that is due first of those that need the scratch region, if it is free."""
        while (first := self._scratch_wanted.first()) is not None:
            due, ranking = first
            if ranking.due > due:  # it has become late
                self._scratch_wanted.add(ranking.due, self._scratch_wanted.pop())
                continue
            if not self._scratch_free():
                return
            self._scratch_wanted.pop()
            # _score_input scores it without the suffix then, since that is there.
            tokens = ranking.tokens if self._takes_suffix else ranking.tokens.followed_by(ranking.suffix)
            ranking.measured.computed_tokens = len(tokens)
            self._in_scratch = ranking
            self._jobs.start_in_scratch(ranking, tokens)

    def let_go(self, ranking: Ranking) -> None:
        """Unpin its entry, or give the scratch region back: before it is placed again, or answered."""
        if ranking.held.entry is not None:
            self._cache.unpin(ranking.held.entry)
            ranking.held.entry = None
        if ranking.held.borrowed and ranking.held.region is not None:  # before it completes, the job has the scratch
            self._cache.scratch.give_back(ranking.held.region)
            ranking.held.borrowed = False
        ranking.held.region = None

    # ---- inside ----

    def _infer_in_scratch(self, ranking: Ranking) -> None:
        """Infer the whole sequence for this ranking alone."""
        ranking.measured.outcome = "truncated" if ranking.measured.truncated_to else "full"
        self._scratch_wanted.add(ranking.due, ranking)
        self.lend_scratch()  # to this one, unless another that waits is due before it

    def in_the_way(self) -> Ranking | PrefillJob | None:
        """What has the scratch region while a ranking that is in time waits for it, and is late itself, or over."""
        first = self._scratch_wanted.first()
        if first is None or first[1].late:
            return None
        holder, job = self._in_scratch, self._jobs.in_scratch
        if job is not None and not job.over:
            return job
        return holder if holder is not None and holder.held.borrowed and not holder.answered else None

    def moved(self, ranking: Ranking) -> None:
        """The ranking is late by now: it has another place in the queue."""
        if ranking.held.region is not None:
            self.queue.add(ranking)
        else:
            self._jobs.moved(ranking)

    def _scratch_free(self) -> bool:
        return self._cache.scratch.free or self.auditor.give_up_scratch(self._cache.scratch)


def _first(region: KVRegion, tokens: int) -> KVRegion:
    """The region as a request with so many prefix tokens sees it, even if the entry is extended meanwhile."""
    return KVRegion(region.layout, region.storage, region.capacity, min(tokens, region.length))
