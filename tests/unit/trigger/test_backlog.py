"""What a lane's queue holds in memory is counted."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

from relaygr_stream.bus.ages import SenderLag
from relaygr_stream.trigger.lane import LaneTrigger
from relaygr_stream.wire.records import Record


def test_keys_headers_and_objects_of_waiting_events_count() -> None:
    policy, unknown_kind = SimpleNamespace(stale_ms=0.0), ("relaygr-kind", b"later")
    metrics = SimpleNamespace(records_skipped=SimpleNamespace(inc=lambda: None))
    shared: Any = SimpleNamespace(
        lag=SenderLag(), policy=policy, metrics=metrics, topics=None, done=lambda record: None
    )
    lane = LaneTrigger(0, cast(Any, shared))
    for offset in range(10):
        lane.put(Record("retrieval", 0, offset, 0, b"k" * 1000, b"v" * 1000, (unknown_kind, *[("", b"")] * 50)))
    assert lane.backlog_bytes >= 10 * (1000 + 1000 + 50 * 100)
    lane.skip_stale(time.monotonic() + 1.0)
    assert (lane.backlog, lane.backlog_bytes) == (0, 0)
