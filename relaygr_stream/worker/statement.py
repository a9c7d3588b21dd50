"""What a worker says of itself, from a snapshot of its core: lanes, budgets, costs, load. Knows no bus and no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.messages import LaneStatus, State, WorkerStatus
from relaygr_stream.worker.budgets import BusyShare, LaneBudgets, LaneShares, LoadSplit
from relaygr_stream.worker.build import Inside
from relaygr_stream.worker.executor import SHARE
from relaygr_stream.worker.scheduler import RelayCore

# The core's numbers at one moment, taken on the device thread, for the loop to publish.


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


#: Ranking has the device all to itself only for moments; a share below this is not told from none by the average.
LEAST_FREE: Final = 0.02


@dataclass(frozen=True)
class Identity:
    """Which worker speaks."""

    name: str
    incarnation: int
    host: str
    pid: int
    handover: str = ""  # HOST:PORT of its hand-over, if there is one


class Statements:
    """One statement after the other; each follows what happened since the last. now: seconds of a monotonic clock."""

    def __init__(self, settings: Settings, inside: Inside, now: float) -> None:
        worker = settings.worker
        self._worker = worker
        self._inside = inside
        self._shares = LaneShares()
        self._shared_at = now
        hold_s = (settings.trigger.silence_ms + worker.status_ms) / 1e3
        self._budgets = LaneBudgets(
            int(worker.pinned_share * worker.hbm_bytes), hold_s, turn_s=hold_s + settings.relay.life_window_ms / 1e3
        )
        self._split = LoadSplit(worker.pre_infer_share)
        self._busy = BusyShare()

    def status(
        self,
        identity: Identity,
        state: State,
        snapshot: Snapshot,
        positions: Mapping[int, int],
        now: float,
        sent_ms: int,
    ) -> WorkerStatus:
        """positions: lane → the next pre-infer offset it will read, as of the snapshot or before it."""
        worker, inside = self._worker, self._inside
        seconds = max(1e-3, now - self._shared_at)
        self._shared_at = now
        shares = self._shares.update(positions, snapshot.demand, seconds)
        ranking_ms = snapshot.totals["ranking_ms"] + snapshot.totals["full_ms"]
        tokens_asked, tokens_computed = snapshot.totals["tokens_asked"], snapshot.totals["tokens_computed"]
        free_ms = self._split.update(ranking_ms, tokens_asked, tokens_computed, seconds)
        asked = [lane for lane in positions if self._shares.asked(lane, snapshot.largest[lane])]
        budgets = self._budgets.update(shares, snapshot.largest, asked, snapshot.lane_bytes, now)
        return WorkerStatus(
            name=identity.name,
            incarnation=identity.incarnation,
            host=identity.host,
            pid=identity.pid,
            sent_ms=sent_ms,
            state=state,
            lanes=tuple(
                LaneStatus(
                    lane=lane,
                    budget_bytes=budgets[lane],
                    pinned_bytes=snapshot.lane_bytes[lane],
                    pre_infer_offset=position,
                    device_ms_per_s=free_ms * shares[lane],
                )
                for lane, position in sorted(positions.items())
            ),
            costs=inside.engine.costs.model(self._chunk_ms()),
            bytes_per_token=inside.bytes_per_token,
            alloc_bytes=inside.alloc_bytes,
            queue_ms=snapshot.queue_ms,
            pre_infer_wait_ms=snapshot.pre_infer_waiting_ms / max(LEAST_FREE, 1.0 - self._split.ranking_share),
            computed_share=self._split.computed_share,
            model_version=inside.model.version,
            model_note=inside.model.note,
            busy_share=self._busy.update(ranking_ms + snapshot.totals["pre_infer_ms"], seconds),
            device=str(inside.device),
            handover=identity.handover,
            hbm_used_bytes=snapshot.hbm_used,
            hbm_bytes=worker.hbm_bytes,
            dram_used_bytes=snapshot.dram_used,
            dram_bytes=worker.dram_bytes,
            counters={**snapshot.totals, **{f"cache_{name}": float(total) for name, total in snapshot.cache.items()}},
        )

    def _chunk_ms(self) -> float | None:
        """How long the chunks of a prefix take; None where the model takes it whole."""
        inside = self._inside
        if not inside.model.incremental:
            return None
        return inside.engine.chunk_ms(SHARE * self._worker.max_ranking_delay_ms)
