"""Publishes the worker's status several times a second, and notices a later worker of the same name."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Protocol, Self

import msgspec
import structlog

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.aiokafka_compat import end
from relaygr_stream.bus.erasures import Erasures
from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.tail import STATUS_PAUSE_S, TopicTail
from relaygr_stream.bus.throttling import throttled_ms
from relaygr_stream.cache.tier_file import Until
from relaygr_stream.engine.commands import DELEGATED_LANE, Query
from relaygr_stream.engine.scheduler import Snapshot
from relaygr_stream.errors import BrokerError, DecodeError, DeviceError, Superseded
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.telemetry.background import Background, periodically
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.printable import printable
from relaygr_stream.telemetry.process import version
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.erase import Erase
from relaygr_stream.wire.messages import ScenarioTotals, State, WorkerStatus
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.worker_status import (
    DELEGATED_PINNED,
    HEADER_INCARNATION,
    THROTTLED_MS,
    StatusReader,
    rising_ms,
)
from relaygr_stream.worker.context import WorkerConnections, WorkerContext
from relaygr_stream.worker.device import Device
from relaygr_stream.worker.metrics import Answered
from relaygr_stream.worker.statement import Identity, Statements

log = structlog.get_logger(__name__)
limited = LogLimiter().limited

VERSION: Final = version()
#: A hung device must not block the status task for ever; without a status, triggers stop admitting.
SNAPSHOT_S: Final = 1.0
#: A last status takes milliseconds; without a broker no one reads it, and stopping must not wait for one.
ANNOUNCE_S: Final = 1.0
#: Counters that a status states even where the worker withholds outcomes, beside those of answers by their status.
TOLD: Final = frozenset({"signals", DELEGATED_PINNED, THROTTLED_MS})


class StatedWorker(Protocol):
    """What a status tells beside the scheduler's snapshot, and who carries out what `worker-status` asks for."""

    @property
    def handover_address(self) -> str:
        """HOST:PORT of its hand-over, or empty."""

    def fetching_bytes(self, lane: int) -> int:
        """HBM bytes of signals that were read and wait for their history: a status counts them as pinned."""

    async def erase(self, erase: Erase) -> None:
        """Drop a user."""


class StatusReporter:
    """Publishes WorkerStatus and keeps the metrics current, as an async context.

    worker: whom it states. consumer: whose lanes are stated. peers: takes what the workers state from now on, ourselves
    included.
    """

    def __init__(
        self,
        context: WorkerContext,
        connections: WorkerConnections,
        device: Device,
        peers: OwnerDirectory,
        consumer: LaneConsumer,
        worker: StatedWorker,
    ) -> None:
        settings, topics, runtime = context.settings, connections.topics, device.runtime
        self._background = background = context.background
        self._settings = settings
        self._moves = context.moves
        self._peers = peers
        self._worker = worker
        self._topics = topics
        self._name = context.name
        self._incarnation = 0  # until the statuses that were there before us are read
        self._before_us = 0  # the latest incarnation among them
        self._sent_ms = 0
        self.lag: dict[str, int] = {}  # by topic: records of our lanes not yet read
        self.reader: Final = StatusReader.from_settings(settings, topics)
        self._metrics = metrics = context.metrics
        metrics.hbm_bytes.labels("budget").set(settings.worker.hbm_bytes)
        metrics.dram_bytes.labels("budget").set(settings.worker.dram_bytes)
        self._erasures = Erasures(self.reader, background, self, metrics.statuses_unsigned)
        self._erased: tuple[str, ...] = ()
        self._runtime = runtime
        self._host = socket.gethostname()
        self._device = device.thread
        self._producer = connections.others
        self._consumer = consumer
        self._state: State = "starting"
        self._told_of_unknown = bool(runtime.model.note)  # no warning for random weights: they know no item
        self._statements = Statements(settings, runtime, time.monotonic())
        self._publishing = Background()  # not the process's: it goes on while the worker drains and says farewell
        topic, take = topics.worker_status.name, self._on_statuses
        self._tail = TopicTail(settings.kafka, topic, [0], "recent", take, pause_s=STATUS_PAUSE_S)

    async def __aenter__(self) -> Self:
        await self.reader.prepare()
        await self._tail.start()
        # Without the tail we would not notice that we are superseded.
        self._background.watch(self._tail.failed, self._publishing.failed)
        # Beyond every incarnation of our name so far: by the clock alone, one that had run on a host whose clock is
        # ahead would keep its successor from starting.
        self._incarnation = max(time.time_ns(), self._before_us + 1)
        # A broker that is away, or a device thread that has ended, only makes the worker silent.
        skips = BrokerError, DeviceError, TimeoutError
        pause_s = self._settings.worker.status_interval_ms / 1e3
        self._publishing.start(periodically(pause_s, self._publish, "publish the status", skips), "worker-status")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._publishing.end()
        await end("the tail of worker-status", self._tail.stop, ANNOUNCE_S)

    def serve(self) -> None:
        """From now on the worker serves."""
        self._state = "serving"

    async def announce(self, state: State) -> None:
        """Say at once that the worker changes its state; not for longer than ANNOUNCE_S."""
        self._state = state
        try:
            async with asyncio.timeout(ANNOUNCE_S):
                await self._publish()
        except (BrokerError, DeviceError, TimeoutError) as error:
            log.warning("status not published", state=state, error=str(error) or type(error).__name__)

    async def publish_now(self) -> None:
        """Publish a status without waiting for the interval; where no broker takes it, the next one tells the same."""
        with suppress(BrokerError, DeviceError, TimeoutError):
            await self._publish()

    async def withdraw(self) -> None:
        """Remove our name from the topic after a clean stop. Takes ANNOUNCE_S at most."""
        await self._publishing.end()  # else a last status may come behind the tombstone
        try:
            async with asyncio.timeout(ANNOUNCE_S):
                await self._send(None, [(HEADER_INCARNATION, str(self._incarnation).encode())])
        except (BrokerError, TimeoutError) as error:
            log.warning("name not removed from worker-status", error=str(error) or type(error).__name__)

    async def erase(self, erase: Erase) -> None:
        """Drop a user (Eraser)."""
        await self._worker.erase(erase)

    async def on_erased(self, ids: tuple[str, ...]) -> None:
        """State the requests carried out, now."""
        self._erased = ids
        await self.publish_now()

    async def _publish(self) -> None:
        # Positions first: what was read up to them was handed to the device thread before the question below, so all
        # of it is in the books that the answer tells of. Positions asked for afterwards would claim more than that.
        consumer, topic = self._consumer, self._topics.pre_infer.name
        positions = {lane: consumer.position(topic, lane) for lane in consumer.lanes}
        fetching = {lane: self._worker.fetching_bytes(lane) for lane in (*positions, DELEGATED_LANE)}
        self._metrics.device_stall_seconds.set(self._device.stalled_for)
        async with asyncio.timeout(SNAPSHOT_S):
            now: Snapshot = await self._device.ask(Query(tuple(positions)))
        # A lane that was lost meanwhile may have been stated by its new owner: the later statement counts.
        positions = {lane: position for lane, position in positions.items() if lane in consumer.lanes}
        lane_bytes = {lane: nbytes + fetching[lane] for lane, nbytes in now.lane_bytes.items()}
        delegated_bytes = now.delegated_bytes + fetching[DELEGATED_LANE]
        now = msgspec.structs.replace(now, lane_bytes=lane_bytes, delegated_bytes=delegated_bytes)
        self._export(now, len(positions))
        status = self._status(now, positions)
        await self._send(encode(status))

    async def _send(self, value: bytes | None, headers: list[tuple[str, bytes]] | None = None) -> None:
        topic, key = self._topics.worker_status.name, self._name.encode()
        headers = self.reader.signed(topic, key, value, headers or ())
        await self._producer.send_and_wait(topic, value, key=key, headers=headers)

    def _status(self, now: Snapshot, positions: dict[int, int]) -> WorkerStatus:
        identity = Identity(self._name, self._incarnation, self._host, os.getpid(), self._worker.handover_address)
        self._sent_ms = rising_ms(self._sent_ms, now_ms())
        ranking = {lane: self._consumer.position(self._topics.ranking.name, lane) for lane in positions}
        told = (identity, self._state, now, positions, time.monotonic(), self._sent_ms, ranking)
        status = self._statements.status(*told)
        stated = self._totals({**status.counters, THROTTLED_MS: throttled_ms()}, self._metrics.whole)
        if self._metrics.of:
            of = self._metrics.of.items()
            totals = {name: self._totals(now.scenarios.get(name, {}), answered) for name, answered in of}
            stated["scenarios"] = {name: ScenarioTotals(**each) for name, each in totals.items()}
        stated |= {"erased": self._erased or msgspec.UNSET, "scenario": self._settings.scenario or msgspec.UNSET}
        stated |= self._moves.stated()
        return msgspec.structs.replace(status, lag=sum(self.lag.values()), version=VERSION, **stated)

    def _totals(self, counters: Mapping[str, float], answered: Answered) -> dict[str, Any]:
        """The fields `counters` and `latencies`, of all that this worker serves or of one scenario."""
        counters = {**counters, **answered.counters}
        latencies = {outcome: tuple(counts) for outcome, counts in answered.latencies.items()}
        if self._settings.worker.withhold_outcomes:  # two statuses tell by the others what became of the one ranking
            counters = {name: total for name, total in counters.items() if name in TOLD or name.startswith("answers_")}
            latencies = {}
        return {"counters": counters, "latencies": latencies or msgspec.UNSET}

    def _export(self, now: Snapshot, lanes: int) -> None:
        metrics = self._metrics
        metrics.export(now)
        unknown = now.totals["unknown_items"]
        if unknown and not self._told_of_unknown:
            self._told_of_unknown = True
            log.warning("item ids outside the model's vocabulary", so_far=int(unknown))
        metrics.lanes.set(lanes)
        metrics.lag.labels("unread").set(sum(self.lag.values()))
        metrics.lag.labels("uncommitted").set(self._consumer.uncommitted)

    def _on_statuses(self, records: list[Record]) -> None:
        """Two processes of one name: the later incarnation serves, the earlier gives way once it does."""
        if self._incarnation:  # what was there before us may be of any age
            self._peers.on_records(records)
            self._erasures.on_records(records)
            file, last = self._runtime.tier_file, records[-1]
            if file is not None and not (self._erasures.under_way or self._runtime.cache.waits_for_restore):
                file.until = Until(last.offset, last.timestamp_ms)
        for record in records:
            if record.key != self._name.encode():
                continue
            try:
                other = self.reader.read(record, fresh=self._incarnation > 0)
            except DecodeError:
                continue  # not ours to judge; triggers count it
            if not isinstance(other, WorkerStatus):
                continue
            if not self._incarnation:
                self._before_us = max(self._before_us, other.incarnation)
                continue
            if (other.incarnation, other.host, other.pid) != (self._incarnation, self._host, os.getpid()):
                self._metrics.name_conflicts.inc()
            if gives_way_to(other, self._incarnation, self._host, os.getpid()):
                self._background.fail(
                    Superseded(
                        f"another worker named {self._name!r} started later and serves: host {printable(other.host)}, "
                        f"pid {other.pid}; this one ends. Give each worker its own worker.name"
                    )
                )


def gives_way_to(other: WorkerStatus, incarnation: int, host: str, pid: int) -> bool:
    """Whether a worker of our name started after us, and serves: a worker that never serves ends no other.

    Two that started at once, from the same statuses, may have one incarnation: then host and pid decide.
    """
    return other.state == "serving" and (other.incarnation, other.host, other.pid) > (incarnation, host, pid)
