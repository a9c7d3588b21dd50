"""What a worker says of itself, from a snapshot of its core: lanes, budgets, costs, load. Knows no bus and no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from relaygr_stream.messages import LaneStatus, WorkerStatus
from relaygr_stream.settings import Worker
from relaygr_stream.worker.budgets import LaneShares, lane_budgets
from relaygr_stream.worker.build import Inside
from relaygr_stream.worker.snapshot import Snapshot

State = Literal["starting", "serving", "draining", "stopped"]


@dataclass(frozen=True)
class Identity:
    """Which worker speaks."""

    name: str
    incarnation: int
    host: str
    pid: int


class Statements:
    """One statement after the other; each follows what happened since the last. now: seconds of a monotonic clock."""

    def __init__(self, worker: Worker, inside: Inside, now: float) -> None:
        self._worker = worker
        self._inside = inside
        self._shares = LaneShares()
        self._shared_at = now
        self._last_ranking_ms = 0.0
        self._ranking_share = 0.0

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
        busy = min(1.0, (ranking_ms - self._last_ranking_ms) / (seconds * 1e3))
        self._last_ranking_ms = ranking_ms
        self._ranking_share += min(1.0, seconds) * (busy - self._ranking_share)  # averaged over about a second
        free_ms = 1e3 * max(0.0, min(worker.pre_infer_share, 1.0 - self._ranking_share))
        budgets = lane_budgets(int(worker.pinned_share * worker.hbm_bytes), shares, snapshot.lane_bytes)
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
            costs=inside.engine.costs.model(),
            bytes_per_token=inside.bytes_per_token,
            alloc_bytes=inside.alloc_bytes,
            queue_ms=snapshot.queue_ms,
            model_version=inside.model.version,
            model_note=inside.model.note,
            device=str(inside.device),
            hbm_used_bytes=snapshot.hbm_used,
            hbm_bytes=worker.hbm_bytes,
            dram_used_bytes=snapshot.dram_used,
            dram_bytes=worker.dram_bytes,
            counters={**snapshot.totals, **{f"cache_{name}": float(total) for name, total in snapshot.cache.items()}},
        )
