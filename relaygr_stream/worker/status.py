"""What a worker says of itself, several times a second: lanes, budgets, costs, load. And whether it is still the one
of its name."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Self

import structlog

from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.records import Record
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.errors import BrokerError, DecodeError, Superseded
from relaygr_stream.messages import LaneStatus, WorkerStatus, decode, encode
from relaygr_stream.settings import Settings
from relaygr_stream.topics import TopicSet
from relaygr_stream.worker.budgets import LaneShares
from relaygr_stream.worker.build import Inside
from relaygr_stream.worker.core import RelayCore
from relaygr_stream.worker.device import DeviceThread
from relaygr_stream.worker.metrics import WorkerMetrics

log = structlog.get_logger(__name__)

#: A hung device must not hold the status task for ever; it is silent meanwhile, and triggers stop admitting.
SNAPSHOT_S: Final = 1.0

State = Literal["starting", "serving", "draining", "stopped"]


@dataclass
class Snapshot:
    """The core's numbers at one moment, taken on the device thread."""

    lane_bytes: dict[int, int]
    accounted: dict[int, int]
    demand: dict[int, int]
    counters: dict[str, float]
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


def _snapshot(core: RelayCore, lanes: frozenset[int]) -> Snapshot:
    cache = core.cache
    return Snapshot(
        lane_bytes={lane: core.pins.lane_bytes(lane) for lane in lanes},
        accounted=dict(core.accounted),
        demand=dict(core.demand),
        counters={**core.counters.as_dict(), "audits": core.auditor.done, "audit_deviation": core.auditor.worst},
        cache=cache.counters.as_dict(),
        hbm_used=cache.hbm_used,
        dram_used=cache.dram_used,
        pinned_bytes=cache.pinned_bytes,
        entries=cache.entries,
        pins=len(core.pins),
        pins_expired=core.pins.expired,
        waiting=core.waiting,
        backlog=core.background_depth,
        queue_ms=core.take_queue_ms(),
    )


class StatusReporter:
    """Publishes WorkerStatus and keeps the metrics current, as an async context; `failed` tells why it ended."""

    def __init__(
        self,
        settings: Settings,
        topics: TopicSet,
        name: str,
        incarnation: int,
        host: str,
        inside: Inside,
        device: DeviceThread,
        metrics: WorkerMetrics,
        producer: Producer,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._name = name
        self._incarnation = incarnation
        self._host = host
        self._inside = inside
        self._device = device
        self._metrics = metrics
        self._producer = producer
        self._consumer: LaneConsumer | None = None
        self._state: State = "starting"
        self._shares = LaneShares()
        self._shared_at = time.monotonic()
        self._last_ranking_ms = 0.0
        self._ranking_share = 0.0
        self._task: asyncio.Task[None] | None = None
        self._tail = TopicTail(settings.kafka, topics.worker_status.name, [0], "earliest", self._on_statuses)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        await self._tail.start()
        self._task = asyncio.create_task(self._run(), name="worker-status")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._tail.stop()
        if self.failed.done() and not self.failed.cancelled():
            self.failed.exception()  # looked at: the caller has raised it

    def serve(self, consumer: LaneConsumer) -> None:
        """From now on report these lanes."""
        self._consumer = consumer
        self._state = "serving"

    async def announce(self, state: State) -> None:
        """Say at once that the worker changes its state."""
        self._state = state
        try:
            await self._publish()
        except (BrokerError, TimeoutError) as error:
            log.warning("status not published", state=state, error=str(error))

    async def _run(self) -> None:
        """Publish for ever. A broker that is away only makes us silent; anything else is a defect and ends us."""
        pause = self._settings.worker.status_ms / 1e3
        try:
            while True:
                try:
                    await self._publish()
                except (BrokerError, TimeoutError) as error:
                    log.warning("status not published", error=str(error) or type(error).__name__)
                await asyncio.sleep(pause)
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)

    async def _publish(self) -> None:
        lanes = self._consumer.lanes if self._consumer else frozenset[int]()
        snapshot: list[Snapshot] = []
        self._metrics.device_stall_seconds.set(self._device.stalled_for)
        await asyncio.wait_for(self._device.ask(lambda core, _: snapshot.append(_snapshot(core, lanes))), SNAPSHOT_S)
        self._export(snapshot[0], len(lanes))
        status = self._status(snapshot[0], lanes)
        await self._producer.send_and_wait(self._topics.worker_status.name, encode(status), key=self._name.encode())

    def _status(self, now: Snapshot, lanes: frozenset[int]) -> WorkerStatus:
        worker, inside = self._settings.worker, self._inside
        seconds = max(1e-3, time.monotonic() - self._shared_at)
        self._shared_at = time.monotonic()
        shares = self._shares.update(lanes, now.demand, seconds)
        ranking_ms = now.counters["ranking_ms"] + now.counters["full_ms"]
        busy = min(1.0, (ranking_ms - self._last_ranking_ms) / (seconds * 1e3))
        self._last_ranking_ms = ranking_ms
        self._ranking_share += min(1.0, seconds) * (busy - self._ranking_share)  # averaged over about a second
        free_ms = 1e3 * max(0.0, min(worker.pre_infer_share, 1.0 - self._ranking_share))
        pinned_share = worker.pinned_share * worker.hbm_bytes
        assert self._consumer is not None or not lanes
        return WorkerStatus(
            name=self._name,
            incarnation=self._incarnation,
            host=self._host,
            pid=os.getpid(),
            sent_ms=int(time.time() * 1e3),
            state=self._state,
            lanes=tuple(
                LaneStatus(
                    lane=lane,
                    budget_bytes=int(pinned_share * shares[lane]),
                    pinned_bytes=now.lane_bytes[lane],
                    pre_infer_offset=self._accounted(lane, now),
                    device_ms_per_s=free_ms * shares[lane],
                )
                for lane in sorted(lanes)
            ),
            costs=inside.engine.costs.model(),
            bytes_per_token=inside.bytes_per_token,
            alloc_bytes=inside.alloc_bytes,
            queue_ms=now.queue_ms,
            model_version=inside.model.version,
            model_note=inside.model.note,
            device=str(inside.device),
            hbm_used_bytes=now.hbm_used,
            hbm_bytes=worker.hbm_bytes,
            dram_used_bytes=now.dram_used,
            dram_bytes=worker.dram_bytes,
            counters={**now.counters, **{f"cache_{name}": float(total) for name, total in now.cache.items()}},
        )

    def _accounted(self, lane: int, now: Snapshot) -> int:
        """All signals below this offset are in the books. Before the first one of a lane, that is where we read."""
        if lane in now.accounted or self._consumer is None:
            return now.accounted.get(lane, 0)
        return self._consumer.position(self._topics.pre_infer.name, lane)

    def _export(self, now: Snapshot, lanes: int) -> None:
        metrics = self._metrics
        for name, total in now.counters.items():
            if name.startswith("signal_"):
                metrics.advance(metrics.signals, name.removeprefix("signal_"), total)
            elif name.endswith("_ms"):
                metrics.advance(metrics.device_seconds, name.removesuffix("_ms"), total / 1e3)
        for name, total in now.cache.items():
            metrics.advance(metrics.cache_events, name, total)
        worker = self._settings.worker
        for gauge, kind, value in (
            (metrics.hbm_bytes, "used", now.hbm_used),
            (metrics.hbm_bytes, "pinned", now.pinned_bytes),
            (metrics.hbm_bytes, "budget", worker.hbm_bytes),
            (metrics.dram_bytes, "used", now.dram_used),
            (metrics.dram_bytes, "budget", worker.dram_bytes),
        ):
            gauge.labels(kind).set(value)
        metrics.entries.set(now.entries)
        metrics.pins.set(now.pins)
        metrics.advance(metrics.pins_expired, None, now.pins_expired)
        metrics.waiting.set(now.waiting)
        metrics.backlog.set(now.backlog)
        metrics.queue_seconds.set(now.queue_ms / 1e3)
        metrics.lanes.set(lanes)

    def _on_statuses(self, records: list[Record]) -> None:
        """Two processes of one name: the later incarnation serves, the earlier gives way (DESIGN §5)."""
        for record in records:
            if record.key != self._name.encode():
                continue
            try:
                other = decode(WorkerStatus, record.value)
            except DecodeError:
                continue  # not ours to judge; triggers count it
            if other.incarnation > self._incarnation and not self.failed.done():
                self.failed.set_exception(
                    Superseded(
                        f"another worker named {self._name!r} started later: host {other.host}, pid {other.pid}; "
                        f"this one ends. Give each worker its own worker.name"
                    )
                )
