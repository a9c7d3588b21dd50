"""The worker's core, a state machine: commands go in by `handle`, `step` runs the most urgent work, answers come out.

    Prefill ─► signals.py ──┐
    Rank    ─► rankings.py ─┴─► residents.py ─► prefill.py ─► queue.py ─► executor.py ─► take_results()
                                                  └─ prefix KV: cache/

Everything here runs on one thread and takes the time as an argument.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
import structlog

from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.engine.admission import Admission
from relaygr_stream.engine.audit import Auditor
from relaygr_stream.engine.clients import SLACK_SLICES, Clients
from relaygr_stream.engine.commands import (
    DELEGATED_LANE,
    Answer,
    Cancel,
    Command,
    EraseUser,
    LanesLost,
    Placed,
    Prefill,
    Query,
    Rank,
    Restore,
)
from relaygr_stream.engine.executor import Executor
from relaygr_stream.engine.prefill import PrefillJobs
from relaygr_stream.engine.queue import RecentIds, Waiters, WorkQueue
from relaygr_stream.engine.ranking import PrefillJob, Ranking
from relaygr_stream.engine.rankings import Rankings
from relaygr_stream.engine.residents import Residents
from relaygr_stream.engine.signals import Signals
from relaygr_stream.errors import CacheCorruption, DeviceError
from relaygr_stream.models.api import unknown_items
from relaygr_stream.wire.erase import Erase
from relaygr_stream.wire.messages import MISSES

log = structlog.get_logger(__name__)

#: Answered requests remembered, so that a signal behind its ranking is not computed: some seconds of traffic.
RECENT_ANSWERS: Final = 4096
#: Of a scenario in a snapshot: bytes that its announced requests pin.
PINNED_BYTES: Final = "pinned_bytes"
#: Operations of the device that fail with none succeeding in between, at which it is probed with input that it took at
#: the start, and given up if it fails; a batch and its rankings alone count once. A device that fails whatever it is
#: given shows within 0.1 s at 100 operations a second. Where the probe succeeds, the input was bad, of one user or of
#: many: the next probe is due at twice as many failures.
GIVE_UP_AFTER: Final = 8


@dataclass(frozen=True)
class Limits:
    """What the settings allow the scheduler."""

    pinned_bytes: int
    max_ranking_delay_ms: float
    batch: int
    queue_limit: int
    waiting_bytes: int = 1 << 62  # of rankings that wait for an answer
    delegated_bytes: int = 0  # pinned on other workers' behalf, beside pinned_bytes
    #: Of either, that one tenant's announced requests may pin, by scenario; 0, or none: no bound of their own.
    tenant_bytes: Mapping[str, int] = field(default_factory=dict)
    truncate_to: int = 0  # newest behaviours that a ranking is cut to which no worker has in time; 0: none is cut
    delay_by_costs: bool = False  # max_ranking_delay_ms is only a bound


@dataclass
class DeviceTime:
    """Milliseconds of device time by kind of work, running totals."""

    pre_infer_ms: float = 0.0
    ranking_ms: float = 0.0
    full_ms: float = 0.0


@dataclass
class DeviceSquares:
    """Running totals of the squares of the device time of one prefix, and of one ranking: what their variances need."""

    prefix_ms2: float = 0.0
    ranking_ms2: float = 0.0


class Snapshot(msgspec.Struct, frozen=True):  # made for every statement; a frozen dataclass takes a microsecond more
    """The scheduler's numbers at one moment.

    scenarios: of each that the worker serves, where it serves several: device time and what is pinned, by name.
    lane_bytes: pinned, of each lane asked for. delegated_bytes: pinned on other workers' behalf. totals, cache: running
    totals by name. queue_ms: delay until the device takes a ranking, since the last snapshot. head_start_ms: from a
    signal to its ranking, usually.
    """

    lane_bytes: dict[int, int]
    totals: dict[str, float]
    cache: dict[str, int]
    hbm_used: int
    dram_used: int
    pinned_bytes: int
    delegated_bytes: int
    entries: int
    pins: int
    pins_expired: int
    waiting: int
    backlog: int
    queue_ms: float
    pre_infer_waiting_ms: float
    pre_infer_late_s: float
    head_start_ms: float
    scenarios: dict[str, dict[str, float]] = {}


class Scheduler:
    """Commands in, answers out. Not thread-safe: one thread, or one test, calls it."""

    def __init__(self, executor: Executor, cache: PrefixCache, limits: Limits, auditor: Auditor) -> None:
        self._executor = executor
        self.cache = cache
        self._limits = limits
        self.delay_ms = limits.max_ranking_delay_ms
        self.auditor = auditor
        clients = Clients(SLACK_SLICES * limits.max_ranking_delay_ms)
        answered = RecentIds(RECENT_ANSWERS)
        self._queue = WorkQueue(clients)
        self._jobs = PrefillJobs(executor, cache, self._queue, limits.max_ranking_delay_ms)
        self._probe_after = GIVE_UP_AFTER
        self._erased_early: list[Erase] = []  # before the tier's file was read
        self.time = DeviceTime()
        self.squares = DeviceSquares()
        self.times: defaultdict[str, DeviceTime] = defaultdict(DeviceTime)  # by scenario, where there are several
        self._residents = residents = Residents(executor, cache, self._jobs, self._queue, Waiters(), auditor)
        self.pins = residents.pins
        self.signals = Signals(
            residents,
            answered,
            limits.pinned_bytes,
            limits.delegated_bytes,
            limits.tenant_bytes,
        )
        self.admission = Admission(
            executor, self._jobs, clients, limits.queue_limit, limits.waiting_bytes, limits.truncate_to
        )
        self.rankings = Rankings(
            residents, self.admission, answered, most=limits.batch, max_delay_ms=limits.max_ranking_delay_ms
        )

    def handle(self, command: Command, now: float) -> object:
        """Take a command. Returns what it asks for: a Snapshot for a Query, the number of entries for an EraseUser,
        what a Restore has found, for the cache's transit what Transit.handle says; None for the others. Rankings that
        are refused at once are answered here."""
        if isinstance(command, Rank):
            self.rankings.enqueue(command, now)
        elif isinstance(command, Prefill):
            self.signals.enqueue(command.task, now)
        elif isinstance(command, Cancel):
            self._cancel(command.request_key, now)
        elif isinstance(command, EraseUser):
            return self._erase(command)
        elif isinstance(command, Restore):
            return self.cache.restore([*command.erases, *self._erased_early], drop=command.drop)
        elif isinstance(command, LanesLost):
            self.pins.release_lanes(command.lanes)
        elif isinstance(command, Query):
            return self._snapshot(command.lanes, now)
        else:
            return self.cache.transit.handle(command)
        return None

    def take_results(self) -> tuple[list[Answer], list[Placed]]:
        """The answers since the last call, one to each ranking, and what became of signals whose task has an origin."""
        results = self.rankings.answers[:], self._jobs.placed[:]
        self.rankings.answers.clear()
        self._jobs.placed.clear()
        return results

    # ---- one step ----

    def step(self, now: float, *, rankings_only: bool = False) -> bool:
        """Run a slice of the most urgent work. False: there was nothing to do.

        Rankings come first, with what they wait for; then pre-inference by due time, and audits, but not with
        rankings_only: more commands wait, which may be rankings. Raises DeviceError when the device fails whatever it
        is given, also what it took at the start; what was being worked on has its answer.
        """
        self.pins.expire(now)
        self.rankings.expire(now)
        for entry in self.cache.poll():
            self.signals.wake(entry, now)
        if self.pins.unheld:
            self.signals.end_unwanted(now)
        self._residents.lend_scratch()
        found = first = True
        if (work := self._queue.in_time.first()) is not None:
            self._work(work, now)
        elif (work := self._residents.in_the_way()) is not None:
            self._work(work, now, alone=True)
        elif rankings_only:
            return False
        elif (job := self._queue.background()) is not None:
            self._advance(job, now)
        else:
            first = False
            if (work := self._queue.late.first()) is not None:
                self._work(work, now)
            elif self.auditor.step(self._executor, self.cache.scratch, self.delay_ms):
                self._evict_deviating()
            else:
                found = False
        self.admission.idle.works(now, first=first)
        if found:
            self._check_device()
        return found

    def next_timer(self) -> float | None:
        """When something will have to be done even if nothing comes in."""
        end, deadline = self.pins.next_end, self.rankings.next_timer
        return deadline if end is None or (deadline is not None and deadline < end) else end

    # ---- its state ----

    @property
    def backlog(self) -> int:
        """Prefill jobs that are not over, those that rankings wait for among them, without one in scratch."""
        return len(self._jobs)

    @property
    def works(self) -> bool:
        """Whether there are rankings without an answer, or prefill jobs. Any thread may ask."""
        return bool(len(self.rankings) or len(self._jobs))

    def totals(self) -> dict[str, float]:
        """Running totals by name: signals by what became of them, device time by kind of work, failures, audits."""
        return {
            **{name: float(total) for name, total in vars(self.signals.counters).items()},
            **{name: float(total) for name, total in vars(self._jobs.counters).items()},
            **vars(self.time),
            **vars(self.squares),
            "device_failures": float(self._executor.failures),
            "out_of_memory": float(self._executor.out_of_memory),
            "unknown_items": unknown_items(self._executor.model),
            "audits": float(self.auditor.done),
            "audits_waiting": float(self.auditor.waiting),
            "audit_deviation": self.auditor.worst,
        }

    def check_integrity(self) -> None:
        """Raise CacheCorruption where cache, pins and requests disagree. Takes time in proportion to the entries."""
        self.cache.check_integrity()
        self.admission.clients.check([each.booking for each in self.admission.waiting])
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

    def _check_device(self) -> None:
        """After many failures in a row, tell a bad device from bad input. Raises DeviceError where it is the device."""
        executor, scratch = self._executor, self.cache.scratch
        failed = executor.failed_in_a_row
        if failed < GIVE_UP_AFTER:
            self._probe_after = GIVE_UP_AFTER
        elif failed >= self._probe_after and (scratch.free or self.auditor.give_up_scratch(scratch)):
            region = scratch.borrow()
            works = executor.works(region)
            scratch.give_back(region)
            if not works:
                raise DeviceError(
                    f"{executor.device} failed {failed} times in a row, at last with {executor.last_error}, for input "
                    f"that it took when the worker started; the worker gives it up"
                )
            executor.failed_in_a_row = failed
            self._probe_after = 2 * failed
            log.warning("rankings fail one after the other on a device that works", failed=failed)

    def _cancel(self, request_key: str, now: float) -> None:
        self.signals.end_unwanted(now)  # what others left: it counts as starved
        self.signals.cancel(request_key)
        self.signals.end_unwanted(now, cancelled=True)

    def _follow_costs(self) -> None:
        """Let the device work in slices as long as what was learnt of its costs asks for."""
        self.delay_ms = self._executor.delay_ms(self._limits.max_ranking_delay_ms)
        self._jobs.bound_ms = self.rankings.max_delay_ms = self.delay_ms
        self.admission.clients.slack_ms = SLACK_SLICES * self.delay_ms

    def _snapshot(self, lanes: Collection[int], now: float) -> Snapshot:
        if self._limits.delay_by_costs:
            self._follow_costs()
        cache, pins = self.cache, self.pins
        return Snapshot(
            lane_bytes=dict(zip(lanes, map(pins.lane_bytes, lanes), strict=True)),
            totals=self.totals(),
            cache=cache.counters.as_dict(),
            hbm_used=cache.hbm_used,
            dram_used=cache.dram_used,
            pinned_bytes=cache.pinned_bytes,
            delegated_bytes=pins.lane_bytes(DELEGATED_LANE),
            entries=cache.entries,
            pins=len(pins),
            pins_expired=pins.expired,
            waiting=len(self.rankings),
            backlog=self.backlog,
            queue_ms=self.rankings.take_queue_ms(now),
            pre_infer_waiting_ms=self._jobs.waiting_ms(),
            pre_infer_late_s=self._jobs.late_s(now),
            head_start_ms=pins.head_start_ms,
            scenarios={
                name: {**vars(each), PINNED_BYTES: float(pins.scenario_bytes(name))}
                for name, each in self.times.items()
            },
        )

    def _work(self, work: Ranking | PrefillJob, now: float, *, alone: bool = False) -> None:
        """Advance a job, or score a ranking, with those behind it unless `alone`."""
        if not isinstance(work, Ranking):
            self._advance(work, now)
            return
        batch = [work] if alone else self.rankings.next_batch(work)
        ms = self.rankings.score(now, batch)
        self.time.ranking_ms += ms
        self.squares.ranking_ms2 += ms * ms / len(batch)
        for each in batch:
            if each.task.scenario:
                self.times[each.task.scenario].ranking_ms += ms / len(batch)

    def _advance(self, job: PrefillJob, now: float) -> None:
        """Give a job a slice of device time, and do what follows if it was the last."""
        if job.waiters:
            self.rankings.look_ahead(job, now)
            self.rankings.started((each for each in job.waiters if not each.answered), now)
        before = job.ms
        ms = self._jobs.advance(job, now)
        self.squares.prefix_ms2 += job.ms**2 - before**2
        full = any(ranking.measured.outcome in MISSES for ranking in job.waiters)
        for ranking in job.waiters:
            self.admission.charge(ranking, ms, of=len(job.waiters))
        if not job.waiters:
            job.account.serve(ms)
        scenario = job.scenario
        for time in (self.time, self.times[scenario]) if scenario else (self.time,):
            if full:
                time.full_ms += ms
            else:
                time.pre_infer_ms += ms
        if job.over:
            self.rankings.job_over(job)
            if job.entry is not None:
                self.signals.wake(job.entry, now)

    def _erase(self, erase: EraseUser) -> int:
        """Drop the users' entries and pins. Rankings in progress keep what they hold until they are answered, and leave
        nothing."""
        if self.cache.waits_for_restore:
            self._erased_early.append(erase.erase)
        known = {*self.cache.transit.users(), *self.rankings.users(), *self.auditor.users()}
        users = set(erase.among(known))
        self.rankings.leave_nothing(users)
        self.auditor.erase_users(users, self.cache.scratch)
        entries = self.cache.erase_users(users)
        for entry in entries:
            self.pins.release_entry(entry)
        return len(entries)

    def _evict_deviating(self) -> None:
        """What an audit found to deviate serves no one any more: its admitted rankings will run in full."""
        while self.auditor.deviating:
            entry = self.cache.evict_user(self.auditor.deviating.pop())
            if entry is not None:
                self.pins.release_entry(entry)
