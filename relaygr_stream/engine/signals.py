"""Signals: admitted requests on their way to prefix KV that stay pinned until their rankings come.

    find ─► within its tenant's bytes, and its lanes'? ─► acquire (residents.py) ─► pin

A signal that waits for the beginning of its sequence pins what there is. It lives as long as that pin.

Signals on other workers' behalf have bytes of their own, and take no room from the lanes' users. Of several scenarios
the one that holds most of either makes room for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from relaygr_stream.cache.entry import Coverage, Entry
from relaygr_stream.engine.commands import DELEGATED_LANE, Placed, PrefillTask
from relaygr_stream.engine.queue import RecentIds
from relaygr_stream.engine.residents import Residents, Way
from relaygr_stream.telemetry.limiter import LogLimiter

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: What becomes of a signal, by what there is for it.
RESULTS: Final[dict[Way, str]] = {
    "ready": "hbm", "computing": "joined", "loading": "joined", "dram": "dram", "shorter": "extended",
    "nothing": "computed",
}  # fmt: skip
#: Results of signals that a prefill job computes, or that wait for a copy and are placed again.
COMPUTED: Final = ("computed", "extended")


@dataclass
class SignalCounters:
    """Running totals of signals by what became of them. One that had to wait counts again where it then goes."""

    signals: int = 0
    signal_computed: int = 0
    signal_extended: int = 0
    signal_hbm: int = 0
    signal_dram: int = 0
    signal_joined: int = 0
    signal_duplicate: int = 0
    signal_expired: int = 0
    signal_ranked: int = 0  # its ranking had been answered, or it had been cancelled, before it came
    signal_cancelled: int = 0  # its client cancelled it while it was pinned
    signal_over_footprint: int = 0  # that, or it made room for another scenario's
    signal_no_room: int = 0
    signal_outranked: int = 0  # a delegated one, while a signal of the user's lane asked for another sequence
    signal_delegated: int = 0  # of the pinned ones, those on another worker's behalf
    signal_over_delegated: int = 0  # beyond the bytes for those
    signal_over_quota: int = 0  # beyond those of its tenant


class Signals:
    """Places signals: finds, loads or computes their prefix KV, and pins it.

    footprint: bytes that may be held when a signal pins more, those of waiting rankings included. delegated: beside
    these, for signals on other workers' behalf. of_tenant: of either, for one tenant's, by scenario; 0, or none: no
    bound of its own.
    """

    def __init__(
        self,
        residents: Residents,
        answered: RecentIds,
        footprint: int,
        delegated: int = 0,
        of_tenant: Mapping[str, int] | None = None,
    ) -> None:
        self._residents = residents
        self._cache, self._jobs, self._pins = residents.cache, residents.jobs, residents.pins
        self._answered = answered
        self._footprint = footprint
        self._delegated = delegated
        self._of_tenant = of_tenant or {}
        self.counters = SignalCounters()

    def enqueue(self, task: PrefillTask, now: float) -> None:
        """Place a signal that came, unless it is a duplicate, expired, or behind its ranking or its cancel."""
        self.counters.signals += 1
        if task.request_key in self._pins:
            self._count("duplicate", task)
        elif task.request_key in self._answered:
            self._refuse("ranked", task)
        elif task.expires <= now:
            self._count("expired", task)
        else:
            self._place(task, now)

    def cancel(self, request_key: str) -> None:
        """End the request's pin, and drop its signal if that is still to come."""
        self._answered.add(request_key)
        if self._pins.release(request_key):
            self.counters.signal_cancelled += 1

    def end_unwanted(self, now: float, *, cancelled: bool = False) -> None:
        """End jobs whose last pin has ended: under load they would hold their HBM until the device is idle."""
        while self._pins.unheld:
            entry = self._pins.unheld.pop()
            job = self._jobs.job_of(entry)
            if job is not None and self._jobs.end_unwanted(job, now, cancelled=cancelled):
                self.wake(entry, now)

    def wake(self, entry: Entry, now: float) -> None:
        """The entry's copy or prefill has ended, well or not: place the tasks that wait for it again."""
        for task in self._residents.waiters.pop(entry):
            if isinstance(task, PrefillTask):
                self._place_again(task, now)
            else:
                self._residents.place_again(task)
        if entry.failed:
            self._pins.release_entry(entry)

    def _place_again(self, task: PrefillTask, now: float) -> None:
        """Place a signal whose wait is over. If its pin is gone (expired, ranked, cancelled, lane lost), so is it."""
        if self._pins.release(task.request_key):
            self._place(task, now)
        else:
            self._tell(task, "unpinned")

    def _place(self, task: PrefillTask, now: float) -> None:
        while True:
            found = entry, coverage = self._residents.find(task)
            pinned = entry if coverage is Coverage.COVERS else None  # one that is extended may stay beside the new one
            most = self._of_tenant.get(task.scenario, 0)
            if most and self._is_over_quota(task, entry if coverage is not Coverage.NONE else None, pinned, most):
                self._refuse("over_quota", task)
                limited(log.warning, "over_quota")(
                    "a tenant's announced requests have pinned its max_pinned_bytes: this one pins nothing",
                    tenant=task.tenant, bytes=self._pins.tenants.bytes_of(task.charged), most=most,
                )  # fmt: skip
                return
            if self._has_room(task, entry, coverage, pinned):
                break
            if not self._makes_room(task, now):
                self._refuse("over_delegated" if task.lane == DELEGATED_LANE else "over_footprint", task)
                return
        got = self._residents.acquire(task, found)
        if got.entry is None:
            self._refuse("no_room" if got.way == "no_room" else "outranked", task)
            return
        self._count(RESULTS[got.way] if got.whole else "extended", task)
        self._pin(task, got.entry)
        if got.way in ("computing", "loading"):
            self._jobs.hurry(got.entry, task.due)
        if not got.whole:
            self._residents.waiters.add(got.entry, task)

    def _has_room(self, task: PrefillTask, entry: Entry | None, coverage: Coverage, pinned: Entry | None) -> bool:
        delegated = self._pins.lane_bytes(DELEGATED_LANE)
        if task.lane == DELEGATED_LANE:
            nbytes = self._cache.nbytes(len(task.tokens))
            return delegated + self._pins.delegated.more(DELEGATED_LANE, pinned, nbytes) <= self._delegated
        return self._cache.pinned_bytes + self._more(task, entry, coverage) <= self._footprint + delegated

    def _makes_room(self, task: PrefillTask, now: float) -> bool:
        """Whether another scenario, which holds more, has lost the pin of its latest request to this one."""
        nbytes, delegated = self._cache.nbytes(len(task.tokens)), task.lane == DELEGATED_LANE
        loser = self._pins.latest_of_heavier(task.scenario, nbytes, delegated=delegated) if task.scenario else None
        if loser is None:
            return False
        self._pins.release(loser)
        self.counters.signal_over_footprint += 1
        self.end_unwanted(now)  # what was computed for it
        return True

    def _is_over_quota(self, task: PrefillTask, entry: Entry | None, pinned: Entry | None, most: int) -> bool:
        """entry: what there is of its prefix. pinned: the same, where it has all."""
        nbytes = self._pins.tenant_bytes(entry, self._cache.nbytes(len(task.tokens)))
        held = self._pins.tenants
        return held.bytes_of(task.charged) + held.more(task.charged, pinned, nbytes) > most

    def _count(self, result: str, task: PrefillTask) -> None:
        name = f"signal_{result}"
        setattr(self.counters, name, getattr(self.counters, name) + 1)
        if result not in COMPUTED:  # of those, their job tells
            self._tell(task, result)

    def _refuse(self, result: str, task: PrefillTask) -> None:
        """It gets nothing: its ranking, or its user's next one, begins what it asks for."""
        self._residents.contradict(task)
        self._count(result, task)

    def _tell(self, task: PrefillTask, result: str) -> None:
        if task.origin is not None:
            self._jobs.placed.append(Placed(task, result))

    def _pin(self, task: PrefillTask, entry: Entry) -> None:
        if task.lane == DELEGATED_LANE:
            self.counters.signal_delegated += 1
        nbytes = self._cache.nbytes(len(task.tokens))
        self._pins.add(
            task.request_key, task.lane, entry, task.expires, nbytes, task.arrived, task.charged, task.scenario
        )

    def _more(self, task: PrefillTask, entry: Entry | None, coverage: Coverage) -> int:
        """HBM bytes that pinning this signal's prefix would add to what is held."""
        fresh = self._cache.nbytes(len(task.tokens))
        if entry is None or coverage is Coverage.NONE:
            return fresh
        there = self._cache.entry_bytes(entry)
        if coverage is Coverage.COVERS or fresh <= there:
            return 0 if entry.held else there
        return fresh
