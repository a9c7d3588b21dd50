"""What the page shows, as numbers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from relaygr_stream.ops.dashboard.history import Slot
from relaygr_stream.ops.status.lanes import lane_loads
from relaygr_stream.ops.status.odd import Oddity, findings
from relaygr_stream.ops.status.overview import Overview
from relaygr_stream.ops.status.tally import RELAY, Tally, lately
from relaygr_stream.wire.messages import WorkerStatus

#: Workers and cells of lanes on a page at most; of more lanes, several share a cell, which shows the busiest.
MAX_WORKERS: Final = 100
MAX_CELLS: Final = 1024


@dataclass(frozen=True)
class WorkerRow:
    """One worker, and what it answered lately."""

    status: WorkerStatus
    rate: float  # answers a second
    p99_ms: float | None  # of rankings that found prefix KV
    hit_rate: float | None


@dataclass(frozen=True)
class Lane:
    """One lane, as its owner states it, or the busiest of several."""

    number: int
    owner: str | None
    per_s: float | None  # signals a second lately; None: unknown
    pinned: float | None  # share of its budget


@dataclass(frozen=True)
class Picture:
    """A fleet at one time."""

    wall_s: float
    fleet: str
    slo_ms: float
    slo: str
    odd: list[Oddity]
    triggers: int
    workers: list[WorkerRow]  # MAX_WORKERS of them, by name
    all_workers: int
    queue_ms: float  # now, the longest
    busy: float | None  # now, mean share
    lanes: list[Lane]
    all_lanes: int
    slots: list[Slot | None]  # the last one is not over
    whole: Slot  # all of them together
    now: Tally  # lately
    rate: float


def take(view: Overview, slots: list[Slot | None]) -> Picture:
    """The picture of a moment: a snapshot of the fleet, and the slots until then."""
    workers, whole = view.living_workers(), Slot()
    for slot in slots:
        if slot is not None:
            whole.add(slot)
    names = sorted(workers)
    now, rate = lately(view.workers[name] for name in names)
    statuses = [workers[name] for name in names]
    return Picture(
        wall_s=time.time(),
        fleet=f"{view.settings.kafka.bootstrap}, prefix {view.settings.kafka.prefix!r}",
        slo_ms=view.settings.relay.slo_ms,
        slo=view.slo_in_words,
        odd=findings(view),
        triggers=len(view.living_triggers()),
        workers=[_row(view, name) for name in names[:MAX_WORKERS]],
        all_workers=len(names),
        queue_ms=max((status.queue_ms for status in statuses), default=0.0),
        busy=sum(status.busy_share for status in statuses) / len(statuses) if statuses else None,
        lanes=_lanes(view),
        all_lanes=view.topics.lanes,
        slots=slots,
        whole=whole,
        now=now,
        rate=rate,
    )


def _row(view: Overview, name: str) -> WorkerRow:
    seen = view.workers[name]
    tally, rate = lately([seen])
    return WorkerRow(seen.last, rate, tally.quantile_ms(0.99, RELAY), tally.hit_rate())


def _lanes(view: Overview) -> list[Lane]:
    every = [
        Lane(each.lane, each.owner, each.signals, each.pinned_bytes / each.budget_bytes if each.budget_bytes else None)
        for each in lane_loads(view)
    ]
    step = -(-len(every) // MAX_CELLS)
    return [max(every[start : start + step], key=_heat) for start in range(0, len(every), step)]


def _heat(lane: Lane) -> float:
    """What a cell shows of several lanes: one without an owner before all, then the busiest."""
    return float("inf") if lane.owner is None else lane.per_s or 0.0
