"""Placement: what prefix KV a ranking is scored against, and what it waits for until they are there.

    find ─► HBM: ready | computing: join | DRAM: load | shorter: prefill the rest, join | nothing: infer in full, join

Full inference goes into the cache where it may stay, else into the scratch region. A ranking that was cut to its newest
behaviours (Admission.truncate) is always inferred in scratch: they are not a prefix of the user's history.
"""

from __future__ import annotations

from relaygr_stream.cache.entry import Coverage, Entry, Found
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.engine.audit import Auditor
from relaygr_stream.engine.commands import RankTask
from relaygr_stream.engine.executor import Executor
from relaygr_stream.engine.pins import PinTable
from relaygr_stream.engine.prefill import PrefillJobs
from relaygr_stream.engine.queue import TimerHeap, Waiters, WorkQueue
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
        cache: PrefixCache,
        queue: WorkQueue,
        jobs: PrefillJobs,
        waiters: Waiters,
        auditor: Auditor,
        pins: PinTable,
    ) -> None:
        self._cache = cache
        self._queue = queue
        self._jobs = jobs
        self._waiters = waiters
        self._auditor = auditor
        self._pins = pins
        self._scratch_wanted: TimerHeap[RankTask] = TimerHeap(lambda task: task.answered)
        self._takes_suffix = takes_suffix(executor.model)
        self._empty = KVRegion.new(executor.model.layout, 0, device=executor.device)

    def find(self, task: RankTask) -> Found:
        """The user's entry and its coverage. If it is of no use, what the request's own signal pinned: a newer sequence
        of the user may have replaced that."""
        entry, coverage = self._cache.find(task.user_key, task.tokens)
        if coverage is Coverage.NONE:
            pinned = self._pins.entry(task.request_key)
            if pinned is not None and self._serves(pinned, task):
                return pinned, Coverage.COVERS
        return entry, coverage

    def is_here(self, task: RankTask, found: Found) -> bool:
        """Whether a ranking whose prefix KV a delegate has can do without it. While they are computed here, for a later
        request, it would wait for what the delegate has ready."""
        entry, coverage = found
        if entry is None or coverage is not Coverage.COVERS:
            return False
        return not entry.computing or self._cache.serves(entry, task.tokens)

    def place(self, task: RankTask, found: Found) -> None:
        """Have it scored against what was found, or wait for what lacks; the ranking holds nothing yet."""
        if len(task.tokens) == 0 and (len(task.suffix) == 0 or self._takes_suffix):
            self.ready(task, self._empty, "full")
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
            self.ready(task, _first(entry.region, len(task.tokens)), "hbm")
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
            assert grown.region is not None
            task.computed_tokens = len(task.tokens) - grown.region.length
            self._jobs.start(grown, task.deadline)
            self._join(task, grown)
        else:
            self._full(task, in_cache=True)

    def again(self, task: RankTask) -> None:
        """What the ranking waited for is over: place it anew. One that is answered by now stays so."""
        if task.answered:
            return
        held = task.entry
        if held is not None and held.region is not None and held.ready and self._serves(held, task):
            # Even if the user's entry is another by now: else two sequences of one user displace each other for ever.
            self.ready(task, _first(held.region, len(task.tokens)), "hbm")
        else:
            self.let_go(task)
            self.place(task, self.find(task))

    def ready(self, task: RankTask, region: KVRegion, outcome: Outcome) -> None:
        """The ranking is to be scored against this region. outcome: kept only where an earlier placement gave none."""
        task.outcome = task.outcome or outcome
        task.region = region
        self._queue.add_ready(task)

    def lend_scratch(self) -> None:
        """Start the full inference that is due first of those that need the scratch region, if it is free."""
        while self._scratch_wanted.first() is not None and self._scratch_free():
            task = self._scratch_wanted.pop()
            # _score_input scores it without the suffix then, since that is there.
            tokens = task.tokens if self._takes_suffix else task.tokens.followed_by(task.suffix)
            task.computed_tokens = len(tokens)
            self._jobs.start_in_scratch(task, tokens)

    def let_go(self, task: RankTask) -> None:
        """Unpin its entry, or give the scratch region back: before it is placed again, or answered."""
        if task.entry is not None:
            self._cache.unpin(task.entry)
            task.entry = None
        if task.borrowed and task.region is not None:  # before it completes, the job has the scratch
            self._cache.scratch.give_back(task.region)
            task.borrowed = False
        task.region = None

    # ---- inside ----

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

    def _serves(self, entry: Entry, task: RankTask) -> bool:
        return not entry.failed and self._cache.coverage(entry, task.tokens) is Coverage.COVERS


def _first(region: KVRegion, tokens: int) -> KVRegion:
    """The region as a request with so many prefix tokens sees it, even if the entry is extended meanwhile."""
    return KVRegion(region.layout, region.storage, region.capacity, min(tokens, region.length))
