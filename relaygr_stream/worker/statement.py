"""Makes the worker's status from snapshots of its scheduler: lanes, budgets, costs, load."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from msgspec import UNSET

from relaygr_stream.engine.budgets import BusyShare, equal_parts
from relaygr_stream.engine.build import WorkerRuntime
from relaygr_stream.engine.executor import SLICE_SHARE
from relaygr_stream.engine.scheduler import Snapshot
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.messages import LaneStatus, State, WorkerStatus
from relaygr_stream.wire.worker_status import DELEGATED_PINNED, MAX_MS

#: The smallest free share assumed: an average over a second does not tell less from none.
LEAST_FREE: Final = 0.02


@dataclass(frozen=True)
class Identity:
    """The worker that a status is about."""

    name: str
    incarnation: int
    host: str
    pid: int
    handover: str = ""  # HOST:PORT of its hand-over, if there is one


class Statements:
    """Makes one status after the other, each from what happened since the last. now: seconds of a monotonic clock."""

    def __init__(self, settings: Settings, runtime: WorkerRuntime, now: float) -> None:
        worker = settings.worker
        self._worker = worker
        self._runtime = runtime
        self._shared_at = now
        self._pinned_bytes = int(worker.pinned_share * worker.hbm_bytes)
        self._ranking, self._busy = BusyShare(), BusyShare()

    def status(
        self,
        identity: Identity,
        state: State,
        snapshot: Snapshot,
        positions: Mapping[int, int],
        now: float,
        sent_ms: int,
        ranking: Mapping[int, int] | None = None,
    ) -> WorkerStatus:
        """positions: lane → the next pre-infer offset it will read, as of the snapshot or before it; ranking: those of
        `ranking`."""
        worker, runtime = self._worker, self._runtime
        seconds = max(1e-3, now - self._shared_at)
        self._shared_at = now
        ranking_ms = snapshot.totals["ranking_ms"] + snapshot.totals["full_ms"]
        ranking_share = self._ranking.update(ranking_ms, seconds)
        budgets = equal_parts(self._pinned_bytes, positions)
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
                    ranking_offset=UNSET if ranking is None else ranking[lane],
                )
                for lane, position in sorted(positions.items())
            ),
            costs=runtime.executor.costs.model(self._chunk_ms()),
            bytes_per_token=runtime.bytes_per_token,
            alloc_bytes=runtime.alloc_bytes,
            queue_ms=snapshot.queue_ms,
            pre_infer_wait_ms=min(MAX_MS, snapshot.pre_infer_waiting_ms / max(LEAST_FREE, 1.0 - ranking_share)),
            head_start_ms=min(MAX_MS, snapshot.head_start_ms),
            model_version=runtime.model.version,
            model_note=runtime.model.note,
            busy_share=self._busy.update(ranking_ms + snapshot.totals["pre_infer_ms"], seconds),
            device=str(runtime.device),
            handover=identity.handover,
            hbm_used_bytes=snapshot.hbm_used,
            hbm_bytes=worker.hbm_bytes,
            dram_used_bytes=snapshot.dram_used,
            dram_bytes=worker.dram_bytes,
            delegated_bytes=max(0, runtime.delegated_bytes - snapshot.delegated_bytes),
            counters={
                # An audit's deviation may be infinite, and readers refuse what is not finite.
                **{name: min(total, sys.float_info.max) for name, total in snapshot.totals.items()},
                **{f"cache_{name}": float(total) for name, total in snapshot.cache.items()},
                DELEGATED_PINNED: float(snapshot.delegated_bytes),
            },
        )

    def _chunk_ms(self) -> float | None:
        """Milliseconds of a chunk of a prefix; None where the model takes a prefix whole."""
        runtime = self._runtime
        if not runtime.model.incremental:
            return None
        return runtime.executor.chunk_ms(SLICE_SHARE * runtime.scheduler.delay_ms)
