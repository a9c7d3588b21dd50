from __future__ import annotations

import time

from prometheus_client import CollectorRegistry

from relaygr_stream.telemetry.loopwatch import LoopWatch
from tests.waiting import until


async def test_a_running_loop_is_alive_and_its_beats_are_counted() -> None:
    registry = CollectorRegistry()
    watch = LoopWatch(registry, stall_s=30)
    watch.start()
    try:
        await until(lambda: (registry.get_sample_value("relaygr_loop_lag_seconds_count") or 0) >= 3)
        assert watch.stalled() is None
    finally:
        watch.stop()


async def test_a_stuck_loop_is_reported_and_recovers() -> None:
    registry = CollectorRegistry()
    watch = LoopWatch(registry, stall_s=0.3)
    watch.start()
    try:
        time.sleep(0.5)  # noqa: ASYNC251  (the loop is to be stuck)
        reason = watch.stalled()
        assert reason is not None
        assert reason.startswith("the event loop has not run for ")
        assert (registry.get_sample_value("relaygr_loop_silence_seconds") or 0) >= 0.3
        await until(lambda: watch.stalled() is None)
        late = registry.get_sample_value("relaygr_loop_lag_seconds_bucket", {"le": "0.25"})
        assert registry.get_sample_value("relaygr_loop_lag_seconds_count") != late, "the late beat counts as late"
    finally:
        watch.stop()
