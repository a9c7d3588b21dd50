"""The worker's inside, one step at a time: take the most urgent work, run it, deliver.

    signal  ─► signals.py  ─┐
    ranking ─► rankings.py ─┴─► flights.py (computing), cache (holding) ─► answers

Everything here runs on the device thread and takes the time as an argument; knows nothing of Kafka or of clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from relaygr_stream.cache.entry import Entry
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.errors import CacheCorruption, DeviceError
from relaygr_stream.worker.admission import Admission
from relaygr_stream.worker.audit import Auditor
from relaygr_stream.worker.budgets import Demand
from relaygr_stream.worker.clients import SLACK_SLICES, Clients
from relaygr_stream.worker.executor import Engine
from relaygr_stream.worker.prefill import Flights, PinTable, Signals
from relaygr_stream.worker.queue import Parked, RecentIds, WorkQueue
from relaygr_stream.worker.rankings import Rankings
from relaygr_stream.worker.tasks import Answer, Flight, PreInferTask, RankTask
from relaygr_stream.worker.warmup import WarmUp

#: Answered requests remembered, so that a signal behind its ranking is not computed: some seconds of traffic.
ANSWERED: Final = 4096
#: Operations of the device that fail with none succeeding in between, at which it is given up. One ranking that the
#: model cannot take fails twice, in a batch and alone: these are four such rankings in a row and nothing else, or a
#: device that fails whatever it is given, which at 100 operations a second shows within 0.1 s.
GIVE_UP_AFTER: Final = 8


@dataclass(frozen=True)
class Limits:
    """What the settings allow the core."""

    pinned_bytes: int
    max_ranking_delay_ms: float
    batch: int
    queue_limit: int
    waiting_bytes: int = 1 << 62  # of rankings that wait for an answer
    warm_up: bool = False


@dataclass
class DeviceTime:
    """Milliseconds of device time by kind of work, running totals."""

    pre_infer_ms: float = 0.0
    ranking_ms: float = 0.0
    full_ms: float = 0.0


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
        auditor.evict = self._evict
        self._deliver = deliver
        clients = Clients(SLACK_SLICES * limits.max_ranking_delay_ms)
        self._queue = WorkQueue(clients)
        self._parked = Parked()
        self._answered = RecentIds(ANSWERED)
        self._flights = Flights(engine, cache, self._queue, limits.max_ranking_delay_ms)
        self.time = DeviceTime()
        self.demand = Demand()
        self.warm_up = WarmUp(cache, enabled=limits.warm_up)
        self.pins = PinTable(cache)
        self.signals = Signals(
            cache, self._flights, self._parked, self.pins, self._answered, footprint=limits.pinned_bytes
        )
        self.admission = Admission(engine, self._flights, clients, limits.queue_limit, limits.waiting_bytes)
        self.rankings = Rankings(
            engine, cache, self._queue, self._flights, self._parked, auditor, self.admission, self._done
        )

    # ---- what comes in ----

    def signal(self, task: PreInferTask, now: float) -> None:
        """Take an admitted request."""
        self.warm_up.asked(task.user_key)
        self.signals.take(task, now)

    def rank(self, task: RankTask, now: float) -> None:
        """Take a ranking request; it gets exactly one answer."""
        self.demand.ask(task.lane, self.cache.nbytes(len(task.tokens)), now)
        self.warm_up.asked(task.user_key)
        self.warm_up.seen(task.user_key, now)
        self.rankings.take(task, now)

    def lanes_lost(self, lanes: Iterable[int]) -> None:
        """Other workers own these lanes now."""
        lost = set(lanes)
        self.pins.release_lanes(lost)
        self.demand.lanes_lost(lost)

    # ---- one step ----

    def step(self, now: float) -> bool:
        """Take the most urgent work, run it, deliver. False: there was nothing to do.

        Raises DeviceError when the device fails whatever it is given; what was being worked on has its answer.
        """
        self.pins.expire(now)
        self.rankings.expire(now)
        for entry in self.cache.poll():
            self._wake(entry)
        self.rankings.feed_starved()
        work = self._queue.urgent()
        if isinstance(work, RankTask):
            batch = self.rankings.take_batch(self._limits.batch, self._limits.max_ranking_delay_ms)
            self.time.ranking_ms += self.rankings.score(batch, now)
        elif work is not None:
            self._advance(work, now)
        elif (flight := self._queue.background()) is not None:
            self._advance(flight, now)
        elif not self.auditor.step(self._engine, self.cache.scratch, self._limits.max_ranking_delay_ms):
            return self.warm_up.step(now)
        if self._engine.failed_in_a_row >= GIVE_UP_AFTER:
            raise DeviceError(
                f"{self._engine.device} failed {GIVE_UP_AFTER} times in a row, at last with {self._engine.last_error}; "
                f"the worker gives it up"
            )
        return True

    def next_timer(self) -> float | None:
        """When something will have to be done even if nothing comes in."""
        end, deadline = self.pins.next_end, self.rankings.next_deadline
        return deadline if end is None or (deadline is not None and deadline < end) else end

    # ---- what is to be seen ----

    @property
    def copying(self) -> bool:
        """Copies between the tiers are under way; their end needs a step."""
        return self.cache.copying

    @property
    def idle(self) -> bool:
        """No ranking waits for an answer."""
        return len(self.rankings) == 0

    @property
    def background_depth(self) -> int:
        """Pre-inferences not finished."""
        return self._queue.background_depth

    @property
    def pre_infer_waiting_ms(self) -> float:
        """Predicted device time of the pre-inferences not finished."""
        return self._flights.waiting_ms()

    def pre_infer_late_s(self, now: float) -> float:
        """How overdue the most overdue pre-inference not finished is."""
        return self._flights.late_s(now)

    def totals(self) -> dict[str, float]:
        """Running totals by name: signals by what became of them, device time by kind of work, failures, audits."""
        return {
            **{name: float(total) for name, total in vars(self.signals.counters).items()},
            **{name: float(total) for name, total in vars(self._flights.counters).items()},
            **vars(self.time),
            **{f"warm_{name}": float(total) for name, total in vars(self.warm_up.counters).items()},
            "device_failures": float(self._engine.failures),
            "out_of_memory": float(self._engine.out_of_memory),
            "audits": float(self.auditor.done),
            "audit_deviation": self.auditor.worst,
            "audit_deviation_int8": self.auditor.worst_rounded,
        }

    def check_integrity(self) -> None:
        """Raise CacheCorruption where cache, pins and requests disagree. Takes time in proportion to the entries."""
        self.cache.check_integrity()
        self.admission.clients.check(list(self.admission.waiting))
        holds = self.pins.holds() + self.rankings.holds()
        for entry, pins in self.cache.pins().items():
            if holds.pop(entry, 0) != pins:
                raise CacheCorruption(f"{entry} has {pins} pins, requests know of others")
        if holds:
            raise CacheCorruption(f"requests hold what is gone: {', '.join(map(str, holds))}")

    def close(self) -> None:
        """The end: finish copies under way, and check the books once more."""
        self.cache.close()
        self.check_integrity()

    # ---- inside ----

    def _advance(self, flight: Flight, now: float) -> None:
        """Give a flight a slice of device time, and do what follows if it was the last."""
        if flight.waiters:
            self.rankings.started((task for task in flight.waiters if not task.answered), now)
        ms = self._flights.advance(flight, now)
        full = False
        for task in flight.waiters:
            task.device_ms += ms
            task.account.served_ms += ms / len(flight.waiters)
            full = full or task.outcome == "full"
        if full:
            self.time.full_ms += ms
        else:
            self.time.pre_infer_ms += ms
        if flight.over:
            self.rankings.landed(flight)
            if flight.entry is not None:
                self._wake(flight.entry)

    def _wake(self, entry: Entry) -> None:
        """The entry came, or will not come: everyone parked at it looks again."""
        for task in self._parked.take(entry):
            if isinstance(task, PreInferTask):
                self.signals.again(task)
            else:
                self.rankings.again(task)
        if entry.failed:
            self.pins.release_entry(entry)

    def _evict(self, user_id: str) -> None:
        """What an audit found to deviate serves nobody any more: its admitted rankings will run in full."""
        entry = self.cache.evict_user(user_id)
        if entry is not None:
            self.pins.release_entry(entry)

    def _done(self, answer: Answer) -> None:
        request = answer.task.request_key
        self.pins.release(request)
        self._answered.add(request)
        self._deliver(answer)
