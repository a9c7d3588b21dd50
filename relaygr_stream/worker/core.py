"""The worker's inside: what becomes of each signal and each ranking, one step at a time.

    signal ─► find ─► pin | load | extend | compute          step: take the most urgent work, run it, deliver
    ranking ─► find ─► score | join | load | extend | full

Everything here runs on the device thread and takes the time as an argument; knows nothing of Kafka or of clocks.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from itertools import count

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.cache.entry import Coverage, Entry
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.messages import Outcome, Status
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.protocol import ScoreInput
from relaygr_stream.models.tokens import Tokens
from relaygr_stream.worker.audit import Auditor
from relaygr_stream.worker.engine import Engine
from relaygr_stream.worker.pins import PinTable
from relaygr_stream.worker.queue import WorkQueue
from relaygr_stream.worker.recent import RecentIds
from relaygr_stream.worker.tasks import Answer, Flight, PreInferTask, RankTask

NO_TOKENS = Tokens(np.zeros((3, 0), np.int64))


@dataclass
class CoreCounters:
    """Running totals of what became of signals, and of device time by kind of work."""

    signals: int = 0
    signal_computed: int = 0
    signal_extended: int = 0
    signal_hbm: int = 0
    signal_dram: int = 0
    signal_joined: int = 0
    signal_duplicate: int = 0
    signal_expired: int = 0
    signal_ranked: int = 0  # its ranking had been answered before it came
    signal_over_footprint: int = 0
    signal_no_room: int = 0
    device_failures: int = 0
    pre_infer_ms: float = 0.0
    ranking_ms: float = 0.0
    full_ms: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Name → total."""
        return {item.name: float(getattr(self, item.name)) for item in fields(self)}


@dataclass(frozen=True)
class Limits:
    """What the settings allow the core."""

    pinned_bytes: int
    max_ranking_delay_ms: float
    batch: int
    queue_limit: int


class RelayCore:
    """Signals and rankings in, answers out through `deliver`."""

    def __init__(
        self,
        engine: Engine,
        cache: PrefixCache,
        limits: Limits,
        auditor: Auditor,
        deliver: Callable[[Answer], None],
    ) -> None:
        self._engine = engine
        self.cache = cache
        self._limits = limits
        self.auditor = auditor
        self._deliver = deliver
        self._queue = WorkQueue()
        self._flights: dict[Entry, Flight] = {}
        self._parked: defaultdict[Entry, list[RankTask | PreInferTask]] = defaultdict(list)
        self._starved: deque[RankTask] = deque()  # full inferences waiting for memory
        self._deadlines: list[tuple[float, int, RankTask]] = []
        self._order = count()
        self._waiting = 0
        self._queued = (0.0, 0)  # seconds and number of delays until the device took a ranking
        self._answered = RecentIds(4096)  # so that a signal behind its ranking is not computed
        layout = engine.model.layout
        self._empty = KVRegion(layout, torch.empty(0, dtype=layout.dtype, device=engine.device), 0)
        self.pins = PinTable(cache)
        self.counters = CoreCounters()
        self.accounted: dict[int, int] = {}  # lane → next pre-infer offset, all below are in the books
        self.demand: defaultdict[int, int] = defaultdict(int)  # lane → bytes asked for by signals

    # ---- what comes in ----

    def signal(self, task: PreInferTask, now: float) -> None:
        """Take an admitted request."""
        self.accounted[task.lane] = max(self.accounted.get(task.lane, 0), task.offset + 1)
        self.counters.signals += 1
        self.demand[task.lane] += self.cache.nbytes(len(task.tokens))
        if task.request_id in self.pins:
            self.counters.signal_duplicate += 1
        elif task.request_id in self._answered:
            self.counters.signal_ranked += 1
        elif task.expires <= now:
            self.counters.signal_expired += 1
        else:
            self._place_signal(task)

    def rank(self, task: RankTask, now: float) -> None:
        """Take a ranking request; it gets exactly one answer."""
        if task.deadline <= now:
            self._answer(task, "deadline_exceeded", "the deadline passed before the worker read the request")
        elif self._waiting >= self._limits.queue_limit:
            self._answer(task, "overloaded", f"{self._waiting} rankings are waiting (worker.queue_limit)")
        else:
            task.admitted = True
            self._waiting += 1
            heapq.heappush(self._deadlines, (task.deadline, next(self._order), task))
            self._place(task)

    def lanes_lost(self, lanes: Iterable[int]) -> None:
        """Other workers own these lanes now."""
        lost = set(lanes)
        self.pins.release_lanes(lost)
        for lane in lost:
            self.accounted.pop(lane, None)
            self.demand.pop(lane, None)

    # ---- one step ----

    def step(self, now: float) -> bool:
        """Take the most urgent work, run it, deliver. False: there was nothing to do."""
        self._expire(now)
        for entry in self.cache.poll():
            self._wake(entry)
        self._feed_starved()
        work = self._queue.urgent()
        if isinstance(work, RankTask):
            self._score(self._queue.take_ready(self._limits.batch), now)
        elif work is not None:
            self._advance(work, now)
        elif (flight := self._queue.background()) is not None:
            self._advance(flight, now)
        elif not self.auditor.step(self._engine, self.cache, self._limits.max_ranking_delay_ms):
            return False
        return True

    def next_timer(self) -> float | None:
        """When something will have to be done even if nothing comes in."""
        times = [end for end in (self.pins.next_end,) if end is not None]
        if self._deadlines:
            times.append(self._deadlines[0][0])
        return min(times, default=None)

    @property
    def copying(self) -> bool:
        """Copies between the tiers are under way; their end needs a step."""
        return self.cache.copying

    def take_queue_ms(self) -> float:
        """Mean delay of the rankings that the device took since the last call, 0 without any."""
        total, count = self._queued
        self._queued = (0.0, 0)
        return total / count * 1e3 if count else 0.0

    @property
    def idle(self) -> bool:
        """No ranking waits for an answer."""
        return self._waiting == 0

    @property
    def waiting(self) -> int:
        """Rankings without an answer."""
        return self._waiting

    @property
    def background_depth(self) -> int:
        """Pre-inferences not finished."""
        return self._queue.background_depth

    # ---- signals ----

    def _place_signal(self, task: PreInferTask) -> None:
        entry, coverage = self.cache.find(task.user_id, task.tokens)
        if not self._within_footprint(task, entry, coverage):
            self.counters.signal_over_footprint += 1
            return
        if entry is not None and coverage is Coverage.COVERS:
            if entry.ready:
                self.counters.signal_hbm += 1
            elif entry.computing or entry.load is not None:
                self.counters.signal_joined += 1
            elif self.cache.load(entry):
                self.counters.signal_dram += 1
            else:
                self.counters.signal_no_room += 1
                return
            self.pins.add(task.request_id, task.lane, entry, task.expires)
        elif entry is not None and coverage is Coverage.PREFIX and self._continue(entry, task):
            self.counters.signal_extended += 1
        elif (fresh := self.cache.open(task.user_id, task.tokens)) is not None:
            self.counters.signal_computed += 1
            self._start(fresh, task.due)
            self.pins.add(task.request_id, task.lane, fresh, task.expires)
        else:
            self.counters.signal_no_room += 1

    def _continue(self, entry: Entry, task: PreInferTask) -> bool:
        """The user's cached prefix grew: extend it now, or as soon as it is here."""
        if entry.ready:
            if not self.cache.extend(entry, task.tokens):
                return False
            self._start(entry, task.due)
            self.pins.add(task.request_id, task.lane, entry, task.expires)
            return True
        if entry.region is None and not self.cache.load(entry):
            return False
        self._parked[entry].append(task)
        return True

    def _within_footprint(self, task: PreInferTask, entry: Entry | None, coverage: Coverage) -> bool:
        """The last guard of the pinned share, behind the trigger's own."""
        if entry is not None and coverage is Coverage.COVERS and (entry.pins or entry.computing or entry.load):
            return True
        return self.cache.pinned_bytes + self.cache.nbytes(len(task.tokens)) <= self._limits.pinned_bytes

    # ---- rankings ----

    def _place(self, task: RankTask) -> None:
        """Find what this ranking can be scored against; may be called again when something it waited for is over."""
        if len(task.tokens) == 0 and (len(task.suffix) == 0 or self._engine.model.incremental):
            self._set_ready(task, self._empty, "full")
            return
        if task.full or (len(task.suffix) and not self._engine.model.incremental):
            self._full(task, in_cache=False)
            return
        entry, coverage = self.cache.find(task.user_id, task.tokens)
        if entry is None or coverage is Coverage.NONE:
            self._full(task, in_cache=True)
        elif coverage is Coverage.COVERS and entry.load is None and _computed(entry) >= len(task.tokens):
            assert entry.region is not None
            self._hold(task, entry)
            self._set_ready(task, _first(entry.region, len(task.tokens)), "hbm")
        elif entry.computing:
            task.outcome = task.outcome or "joined"
            self._join(task, entry)
        elif entry.load is not None or (entry.region is None and self.cache.load(entry)):
            task.outcome = task.outcome or "dram"
            self._park(task, entry)
        elif entry.region is None:
            self._full(task, in_cache=False)  # HBM is full of pinned entries: it cannot come back now
        elif self.cache.extend(entry, task.tokens):
            task.outcome = task.outcome or "hbm"
            task.computed_tokens = len(task.tokens) - entry.region.length
            self._start(entry, task.deadline)
            self._join(task, entry)
        else:
            self._full(task, in_cache=True)

    def _full(self, task: RankTask, *, in_cache: bool) -> None:
        """Infer the whole sequence for this ranking: into the cache where it may stay, else into scratch."""
        task.outcome = "full"
        if in_cache and (entry := self.cache.open(task.user_id, task.tokens)) is not None:
            task.computed_tokens = len(task.tokens)
            self._start(entry, task.deadline)
            self._join(task, entry)
            return
        if not (self.cache.scratch_free or self.auditor.give_up_scratch(self.cache)):
            self._starved.append(task)
            return
        region = self.cache.borrow()
        tokens = task.tokens
        if not self._engine.model.incremental and len(task.suffix):
            tokens = Tokens(np.concatenate([task.tokens.array, task.suffix.array], axis=1))
            task.suffix = NO_TOKENS
        task.computed_tokens = len(tokens)
        task.borrowed = True
        flight = Flight(region, tokens, task.deadline, waiters=[task])
        self._queue.urge(flight, task.deadline)

    def _hold(self, task: RankTask, entry: Entry) -> None:
        self.cache.pin(entry)
        task.entry = entry

    def _join(self, task: RankTask, entry: Entry) -> None:
        self._hold(task, entry)
        flight = self._flights[entry]
        flight.waiters.append(task)
        self._queue.urge(flight, task.deadline)

    def _park(self, task: RankTask, entry: Entry) -> None:
        self._hold(task, entry)
        self._parked[entry].append(task)

    def _set_ready(self, task: RankTask, region: KVRegion, outcome: Outcome) -> None:
        task.outcome = task.outcome or outcome
        task.region = region
        self._queue.ready(task)

    def _replace(self, task: RankTask | PreInferTask) -> None:
        """What the task waited for is over: look again."""
        if isinstance(task, PreInferTask):
            if task.request_id not in self.pins and task.request_id not in self._answered:
                self._place_signal(task)
        elif not task.answered:
            held = task.entry
            if held is not None and held.region is not None and held.ready and self._serves(held, task):
                # Even if the user's entry is another by now: else two sequences of one user displace each other for
                # ever.
                self._set_ready(task, _first(held.region, len(task.tokens)), "hbm")
            else:
                self._let_go(task)
                self._place(task)

    def _serves(self, entry: Entry, task: RankTask) -> bool:
        return not entry.failed and self.cache.coverage(entry, task.tokens) is Coverage.COVERS

    # ---- flights ----

    def _start(self, entry: Entry, due: float) -> None:
        assert entry.region is not None
        flight = Flight(entry.region, entry.tokens, due, entry)
        self._flights[entry] = flight
        self._queue.flight(flight)

    def _advance(self, flight: Flight, now: float) -> None:
        """Run one chunk of a flight; the last one lands it."""
        flight.waiters = [task for task in flight.waiters if not task.answered]
        if not flight.waiters and (flight.entry is None or not flight.entry.pins):
            self._abort(flight)  # everyone it was computed for is gone: no device time for it
            return
        region, tokens = flight.region, flight.tokens
        position, left = region.length, len(tokens) - region.length
        if self._engine.model.incremental:
            left = min(left, self._engine.costs.chunk(position, self._limits.max_ranking_delay_ms))
        for task in flight.waiters:
            self._mark_started(task, now)
        try:
            ms = self._engine.extend(region, tokens.slice(position, position + left))
        except Exception as error:  # a user's model or the device may raise anything; the request must be answered
            self._fail(flight, error)
            return
        for task in flight.waiters:
            task.device_ms += ms
        if any(task.outcome == "full" for task in flight.waiters):
            self.counters.full_ms += ms
        else:
            self.counters.pre_infer_ms += ms
        if region.length >= len(tokens):
            self._land(flight)

    def _land(self, flight: Flight) -> None:
        flight.over = True
        if flight.entry is None:
            for task in flight.waiters:
                self._set_ready(task, flight.region, "full")
            return
        self._flights.pop(flight.entry)
        self.cache.finish(flight.entry)
        for task in flight.waiters:
            self._replace(task)
        self._wake(flight.entry)

    def _wake(self, entry: Entry) -> None:
        """The entry came, or will not come: everyone parked at it looks again."""
        for task in self._parked.pop(entry, ()):
            self._replace(task)

    def _abort(self, flight: Flight) -> None:
        flight.over = True
        if flight.entry is None:
            self.cache.give_back(flight.region)
        else:
            self._flights.pop(flight.entry)
            self.cache.abort(flight.entry)
            self._wake(flight.entry)

    def _fail(self, flight: Flight, error: Exception) -> None:
        """The model or the device failed in this flight: those who waited get a typed answer, the entry goes."""
        self.counters.device_failures += 1
        waiters, flight.waiters = flight.waiters, []
        for task in waiters:
            task.borrowed = False  # the flight gives the scratch back
            self._answer(task, "failed", f"{type(error).__name__}: {error}")
        self._abort(flight)

    # ---- answers ----

    def _score(self, batch: list[RankTask], now: float) -> None:
        for task in batch:
            self._mark_started(task, now)
        try:
            scores, ms = self._engine.score([_score_input(task) for task in batch])
        except Exception as error:  # as in _advance
            self.counters.device_failures += 1
            if len(batch) > 1:  # one bad ranking must not take its neighbours along
                for task in batch:
                    self._score([task], now)
            else:
                self._answer(batch[0], "failed", f"{type(error).__name__}: {error}")
            return
        self.counters.ranking_ms += ms
        for task, rows in zip(batch, scores, strict=True):
            task.device_ms += ms / len(batch)
            self.auditor.consider(task, rows)
            self._answer(task, "ok", scores=rows)

    def _mark_started(self, task: RankTask, now: float) -> None:
        if not task.started:
            task.started = now
            self._queued = (self._queued[0] + now - task.arrived, self._queued[1] + 1)

    def _answer(
        self, task: RankTask, status: Status, detail: str = "", scores: npt.NDArray[np.float32] | None = None
    ) -> None:
        """The one answer: release what the request held, then deliver."""
        assert not task.answered
        task.answered = True
        if task.admitted:
            self._waiting -= 1
        self._let_go(task)
        self.pins.release(task.request_id)
        self._answered.add(task.request_id)
        self._deliver(Answer(task, status, scores, detail))

    def _let_go(self, task: RankTask) -> None:
        if task.entry is not None:
            self.cache.unpin(task.entry)
            task.entry = None
        if task.borrowed and task.region is not None:  # before landing, the flight has the scratch
            self.cache.give_back(task.region)
            task.borrowed = False
        task.region = None

    def _expire(self, now: float) -> None:
        self.pins.expire(now)
        while self._deadlines and self._deadlines[0][0] <= now:
            task = heapq.heappop(self._deadlines)[2]
            if not task.answered:
                waited = (now - task.arrived) * 1e3
                self._answer(task, "deadline_exceeded", f"the deadline passed after {waited:.0f} ms on the worker")

    def _feed_starved(self) -> None:
        """Full inferences that found no memory: the scratch region may be free now."""
        while self._starved and (self.cache.scratch_free or self.auditor.give_up_scratch(self.cache)):
            task = self._starved.popleft()
            if not task.answered:
                self._full(task, in_cache=False)


def _score_input(task: RankTask) -> ScoreInput:
    assert task.region is not None
    return ScoreInput(task.region, task.suffix, task.candidates)


def _computed(entry: Entry) -> int:
    return 0 if entry.region is None else entry.region.length


def _first(region: KVRegion, tokens: int) -> KVRegion:
    """The region as a request with so many prefix tokens sees it, even if the entry is extended meanwhile."""
    return KVRegion(region.layout, region.storage, region.capacity, tokens)
