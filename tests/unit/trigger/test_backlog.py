"""What a lane's queue holds in memory is counted."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from relaygr_stream.bus.ages import AgeBounds, SenderLag
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.trigger.core import TriggerCore
from relaygr_stream.trigger.intake import EventIntake
from relaygr_stream.trigger.lane import LaneTrigger
from relaygr_stream.trigger.metrics import TriggerTelemetry
from relaygr_stream.wire.records import Record
from tests.done import DoneRecords
from tests.unit.trigger.parts import POLICY


def test_keys_headers_and_objects_of_waiting_events_count() -> None:
    unknown_kind = ("relaygr-kind", b"later")
    metrics: Any = SimpleNamespace(records_skipped=SimpleNamespace(inc=lambda: None))
    nothing: Any = None
    core = TriggerCore(replace(POLICY, stale_ms=0.0), OwnerDirectory(3000.0))
    intake = EventIntake(nothing, nothing, metrics, DoneRecords())
    lane = LaneTrigger(0, core, intake, nothing, AgeBounds(SenderLag()), TriggerTelemetry(metrics))
    for offset in range(10):
        lane.put(Record("retrieval", 0, offset, 0, b"k" * 1000, b"v" * 1000, (unknown_kind, *[("", b"")] * 50)))
    assert lane.backlog_bytes >= 10 * (1000 + 1000 + 50 * 100)
    lane.skip_stale(time.monotonic() + 1.0)
    assert (lane.backlog, lane.backlog_bytes) == (0, 0)
