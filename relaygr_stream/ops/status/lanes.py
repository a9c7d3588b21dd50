"""The load of each lane, as its owner states it: for `relaygr lanes`, and the fleet's page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from rich.console import Group, RenderableType

from relaygr_stream.ops.status.overview import Overview
from relaygr_stream.telemetry.printable import listing, printable, printable_json

MIB = 1 << 20


@dataclass(frozen=True)
class LaneLoad:
    """One lane. owner: None if no serving worker states it. Rates a second are lately; None: unknown."""

    lane: int
    owner: str | None = None
    rankings: float | None = None  # records read of `ranking`: forwards, copies and cancels, too
    signals: float | None = None
    pinned_bytes: int = 0
    budget_bytes: int = 0


def lane_loads(view: Overview) -> list[LaneLoad]:
    """Every lane, in order."""
    owned: dict[int, LaneLoad] = {}
    for name in sorted(view.living_workers()):
        seen = view.workers[name]
        if seen.last.state != "serving":
            continue
        before = {lane.lane: lane for lane in seen.since.lanes}
        seconds = (seen.last.sent_ms - seen.since.sent_ms) / 1e3
        for lane in seen.last.lanes:
            rankings = signals = None
            if (was := before.get(lane.lane)) is not None and seconds > 0:
                if lane.ranking_offset is not UNSET and was.ranking_offset is not UNSET:
                    rankings = max(0.0, (lane.ranking_offset - was.ranking_offset) / seconds)
                signals = max(0.0, (lane.pre_infer_offset - was.pre_infer_offset) / seconds)
            owned[lane.lane] = LaneLoad(lane.lane, name, rankings, signals, lane.pinned_bytes, lane.budget_bytes)
    return [owned.get(number) or LaneLoad(number) for number in range(view.topics.lanes)]


def render_lanes(view: Overview) -> RenderableType:
    """One row a lane, and how uneven their load is."""
    loads = lane_loads(view)
    numbers = ("rankings/s", "signals/s", "pinned MiB", "granted MiB")
    table = listing(("lane", "worker", *numbers), numbers=("lane", *numbers))
    for load in loads:
        table.add_row(
            str(load.lane), "none" if load.owner is None else printable(load.owner), _rate(load.rankings),
            _rate(load.signals), f"{load.pinned_bytes / MIB:.1f}", f"{load.budget_bytes / MIB:.1f}",
        )  # fmt: skip
    rates = [load.rankings or 0.0 for load in loads]
    head = f"{len(loads)} lanes, {sum(load.owner is None for load in loads)} without a worker"
    if whole := sum(rates):
        most = max(loads, key=lambda load: load.rankings or 0.0)
        share = max(rates) / whole
        head += f"; lane {most.lane} has {share:.0%} of the rankings, {share * len(rates):.1f} times the mean"
    return Group(head, table)


def lanes_as_json(view: Overview) -> str:
    """The lanes as one JSON object, on one line."""
    lanes: list[dict[str, Any]] = [msgspec.to_builtins(load) for load in lane_loads(view)]
    return printable_json(msgspec.json.encode({"lanes": lanes}).decode())


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
