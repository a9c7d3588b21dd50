"""What `relaygr lanes` shows: the load of each lane, by its owner's statuses."""

from __future__ import annotations

import json

import msgspec

from relaygr_stream.ops.status.lanes import lanes_as_json, render_lanes
from relaygr_stream.ops.status.overview import Overview
from relaygr_stream.telemetry.printable import render_plain
from relaygr_stream.wire.messages import WorkerStatus
from tests.statuses import lane_statuses
from tests.unit.status.test_overview import overview, worker

MIB = 1 << 20


def later(status: WorkerStatus, seconds: int, rankings: int, signals: int) -> WorkerStatus:
    """The worker's status so much later, after each lane n had so many rankings and signals, n + 1 times."""
    lanes = tuple(
        msgspec.structs.replace(
            each, ranking_offset=100 + rankings * (each.lane + 1), pre_infer_offset=7 + signals * (each.lane + 1)
        )
        for each in status.lanes
    )
    return msgspec.structs.replace(status, sent_ms=status.sent_ms + seconds * 1000, lanes=lanes)


def seen() -> Overview:
    """Lanes 0 and 1 have a worker that serves, lane 2 one that was first heard now, lane 3 none."""
    first = worker("w1", lanes=range(2), sent_ms=1000)
    first = msgspec.structs.replace(
        first, lanes=lane_statuses(range(2), ranking_offset=100, pre_infer_offset=7, budget_bytes=8 * MIB)
    )
    away = worker("w3", lanes=range(3, 4), state="draining")
    return overview(first, later(first, 10, rankings=50, signals=20), worker("w2", lanes=range(2, 3)), away)


def test_the_lanes_are_told_with_their_rates_and_bytes() -> None:
    lanes = json.loads(lanes_as_json(seen()))["lanes"]
    assert [(each["lane"], each["owner"], each["rankings"], each["signals"]) for each in lanes] == [
        (0, "w1", 5.0, 2.0),
        (1, "w1", 10.0, 4.0),
        (2, "w2", None, None),
        (3, None, None, None),
    ]
    assert lanes[0]["budget_bytes"] == 8 * MIB


def test_the_table_names_the_busiest_lane_and_those_without_a_worker() -> None:
    text = render_plain(render_lanes(seen()))
    assert "4 lanes, 1 without a worker; lane 1 has 67% of the rankings, 2.7 times the mean" in text
    assert ["1", "w1", "10.0", "4.0", "0.0", "8.0"] in [line.split() for line in text.splitlines()]
