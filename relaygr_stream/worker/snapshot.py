"""The core's numbers at one moment, taken on the device thread, for the loop to publish."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from relaygr_stream.worker.core import RelayCore


class Snapshot(msgspec.Struct, frozen=True):  # made for every statement; a frozen dataclass takes a microsecond more
    """Plain numbers; lane_bytes, largest: pinned, and of the largest prefix lately, for each lane asked for; demand,
    totals, cache: running totals by lane or name."""

    lane_bytes: dict[int, int]
    demand: dict[int, int]
    largest: dict[int, int]
    totals: dict[str, float]
    cache: dict[str, int]
    hbm_used: int
    dram_used: int
    pinned_bytes: int
    entries: int
    pins: int
    pins_expired: int
    waiting: int
    backlog: int
    queue_ms: float
    pre_infer_waiting_ms: float
    pre_infer_late_s: float


def snapshot(core: RelayCore, lanes: Collection[int], now: float) -> Snapshot:
    """The numbers now; the queue delay is that since the last snapshot."""
    cache = core.cache
    return Snapshot(
        lane_bytes=dict(zip(lanes, map(core.pins.lane_bytes, lanes), strict=True)),
        demand=dict(core.demand.totals),
        largest=dict(zip(lanes, map(core.demand.largest, lanes), strict=True)),
        totals=core.totals(),
        cache=cache.counters.as_dict(),
        hbm_used=cache.hbm_used,
        dram_used=cache.dram_used,
        pinned_bytes=cache.pinned_bytes,
        entries=cache.entries,
        pins=len(core.pins),
        pins_expired=core.pins.expired,
        waiting=len(core.rankings),
        backlog=core.background_depth,
        queue_ms=core.rankings.take_queue_ms(now),
        pre_infer_waiting_ms=core.pre_infer_waiting_ms,
        pre_infer_late_s=core.pre_infer_late_s(now),
    )
