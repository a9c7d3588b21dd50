"""Metrics of the scheduler: each has a source, and each of the engine's counters is exported, or stated only."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry

from relaygr_stream.engine.commands import Query
from relaygr_stream.engine.scheduler import Snapshot
from relaygr_stream.worker.metrics import WorkerMetrics
from tests.unit.engine.worlds import world

#: Of `worker-status` alone: numbers that only a reader of statuses calculates with.
STATED_ONLY = {
    "prefix_ms2",
    "ranking_ms2",
    *("signals", "device_failures", "out_of_memory", "audits", "audits_waiting", "audit_deviation"),
}


def snapshot() -> Snapshot:
    with world() as w:
        found = w.scheduler.handle(Query((0,)), w.now)
    assert isinstance(found, Snapshot)
    return found


def test_every_total_of_the_engine_is_exported_or_only_stated() -> None:
    metrics = WorkerMetrics(CollectorRegistry())
    assert metrics._counted.keys() | STATED_ONLY == snapshot().totals.keys()
    assert metrics._levels.keys() <= set(Snapshot.__struct_fields__)


def test_totals_are_brought_up_to_and_levels_are_set() -> None:
    registry, first = CollectorRegistry(), snapshot()
    metrics = WorkerMetrics(registry)
    totals = first.totals | {"signal_hbm": 3.0, "job_late": 2.0, "ranking_ms": 1500.0, "unknown_items": 4.0}
    now = msgspec.structs.replace(first, totals=totals, hbm_used=7, queue_ms=250.0, pins_expired=5)
    for _ in range(2):  # the same totals count once
        metrics.export(now)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"relaygr_{name}", labels)

    assert value("signals_total", result="hbm") == 3
    assert value("signals_total", result="dram") is None, "a counter appears with its first event"
    assert value("pre_infer_jobs_total", result="late") == 2
    assert value("device_seconds_total", work="ranking") == 1.5
    assert (value("unknown_items_total"), value("pins_expired_total")) == (4, 5)
    assert (value("hbm_bytes", kind="used"), value("queue_seconds")) == (7, 0.25)
