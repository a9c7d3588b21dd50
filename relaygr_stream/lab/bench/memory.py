"""What the workers of a pipeline held over time, from what they stated."""

from __future__ import annotations

from relaygr_stream.lab.bench.pipeline import Pipeline
from relaygr_stream.lab.bench.results import Memory


def memory_over_time(pipeline: Pipeline, started_s: float) -> list[Memory]:
    """All workers together, at each statement of one; times count from started_s (monotonic)."""
    found: list[Memory] = []
    latest: dict[str, tuple[int, int, int]] = {}
    for at, status in pipeline.history:
        pinned = sum(lane.pinned_bytes for lane in status.lanes)
        latest[status.name] = status.hbm_used_bytes, pinned, status.dram_used_bytes
        found.append(Memory(at - started_s, pipeline.name, *map(sum, zip(*latest.values(), strict=True))))
    return found
