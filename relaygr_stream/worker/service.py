"""The worker process: lanes in, answers and status out, around one device thread.

pre-infer ─┐                          ┌─► scores (the client's partition)
ranking   ─┴─► intake ─► device ─► ───┼─► worker-status
                 └── cannot be read ──┴─► dead-letter
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from functools import partial
from typing import Any, Final

import structlog

from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.records import Record
from relaygr_stream.errors import DecodeError, DeviceError, RelayError
from relaygr_stream.settings import Settings
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.topics import TopicSet, load_topics, verify_topics
from relaygr_stream.worker.build import Inside, build
from relaygr_stream.worker.core import RelayCore
from relaygr_stream.worker.device import DeviceThread
from relaygr_stream.worker.intake import Intake, Origin, TooMuch
from relaygr_stream.worker.metrics import WorkerMetrics
from relaygr_stream.worker.outbox import Outbox
from relaygr_stream.worker.status import StatusReporter
from relaygr_stream.worker.tasks import Answer, PreInferTask, RankTask

log = structlog.get_logger(__name__)

#: A relayed score may differ from full inference by this much, relative (DESIGN §8: 1e-5 in float32). In half
#: precision the two paths round differently; a hundredth is two bfloat16 steps.
AUDIT_TOLERANCE: Final = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
#: The pulse of the device thread may pause for one long chunk; past half of the poll limit the lanes are given up.
STALL_SHARE: Final = 0.5
WATCH_S: Final = 0.25  # health is as fresh as worker-status is by default


async def run_worker(context: ProcessContext) -> None:
    """Serve until `context.stop` is set, then drain. Raises RelayError where the process must end otherwise."""
    await Worker(context).run()


class Worker:
    """One worker process."""

    def __init__(self, context: ProcessContext) -> None:
        settings = context.settings
        self._context = context
        self._settings: Settings = settings
        self._topics: TopicSet = load_topics(settings.kafka)
        self._metrics = WorkerMetrics(context.registry)
        self._host = socket.gethostname()
        self._name = settings.worker.name or f"{self._host}-{os.getpid()}"
        self._incarnation = time.time_ns()
        self._device = DeviceThread(asyncio.get_running_loop(), self._on_answers)
        self._consumer: LaneConsumer | None = None
        self._inside: Inside | None = None
        self._outbox: Outbox | None = None

    async def run(self) -> None:
        """Start, serve, drain."""
        settings, context = self._settings, self._context
        context.set_ready(False, "loading the model")
        try:
            await verify_topics(settings.kafka)
            # The thread hands back the core; what else was built is kept for reading.
            core_ready = self._device.start(self._build)
            await core_ready
            assert self._inside is not None
            context.set_ready(False, "joining the group")
            async with (
                Producer(settings.kafka, client_id=f"{self._name}-scores", acks=1) as scores,
                Producer(settings.kafka, client_id=f"{self._name}-status", acks="all") as others,
            ):
                self._outbox = Outbox(self._topics, scores, others, self._metrics, self._name, self._inside.model)
                await self._serve(self._outbox, others)
        finally:
            stopped = await self._device.stop(timeout=settings.worker.drain_ms / 1e3)
            if not stopped:
                log.error("the device thread hangs; the process ends without it")

    async def _serve(self, outbox: Outbox, others: Producer) -> None:
        settings, context, topics = self._settings, self._context, self._topics
        assert self._inside is not None
        self._intake = Intake(
            settings.relay,
            settings.client.timeout_ms,
            topics.scores.partitions,
            topics.ranking.max_message_bytes,
            self._metrics.clock_clamped.inc,
        )
        consumer = LaneConsumer(
            settings.kafka,
            topics=[topics.pre_infer.name, topics.ranking.name],
            group=settings.kafka.prefix + settings.worker.group,
            member=self._name,
            on_records=self._on_records,
            on_lanes=self._on_lanes,
            capacity=settings.worker.capacity,
            progressing=self._progressing,
        )
        self._consumer = consumer
        outbox.done = consumer.done
        reporter = StatusReporter(
            settings,
            topics,
            self._name,
            self._incarnation,
            self._host,
            self._inside,
            self._device,
            self._metrics,
            others,
        )
        async with reporter:
            await consumer.start()
            watch = asyncio.create_task(self._watch(consumer))
            try:
                reporter.serve(consumer)
                await self._until_stopped(consumer, reporter)
                watch.cancel()
                context.set_ready(False, "draining")
                await reporter.announce("draining")
                if not await consumer.drain(settings.worker.drain_ms / 1e3):
                    log.warning("drain time is over", records_left=consumer.undone, setting="worker.drain_ms")
            finally:
                watch.cancel()
                outbox.cancel()
                await consumer.stop()
            await reporter.announce("stopped")

    async def _until_stopped(self, consumer: LaneConsumer, reporter: StatusReporter) -> None:
        """Wait for the stop event, or for a part that failed for good, whose error is raised."""
        stop: asyncio.Future[Any] = asyncio.ensure_future(self._context.stop.wait())
        parts: set[asyncio.Future[Any]] = {stop, self._device.failed, consumer.failed, reporter.failed}
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        for part in done - {stop}:
            error = part.exception()
            if isinstance(error, RelayError):
                raise error
            raise DeviceError(f"a part of the worker failed: {error!r}") from error

    async def _watch(self, consumer: LaneConsumer) -> None:
        """Keep /readyz and /healthz true to the device thread and the brokers."""
        limit = self._settings.kafka.max_poll_ms / 1e3
        while True:
            stalled = self._device.stalled_for
            hangs = stalled > limit
            self._context.set_live(not hangs, f"the device thread has not moved for {stalled:.1f} s")
            self._context.set_ready(consumer.healthy, "no broker answers")
            await asyncio.sleep(WATCH_S)

    # ---- parts ----

    def _build(self) -> RelayCore:
        inside = build(self._settings, self._device.deliver, self._report_audit, self._device.wake)
        self._inside = inside
        self._metrics.model_info.labels(inside.model.version, inside.model.note).set(1)
        describe = log.warning if inside.model.note else log.info
        describe("model loaded", version=inside.model.version, note=inside.model.note, device=str(inside.device))
        return inside.core

    def _progressing(self) -> bool:
        return self._device.stalled_for < STALL_SHARE * self._settings.kafka.max_poll_ms / 1e3

    # ---- records in ----

    def _on_lanes(self, gained: frozenset[int], lost: frozenset[int]) -> None:
        self._metrics.lane_changes.labels("gained").inc(len(gained))
        self._metrics.lane_changes.labels("lost").inc(len(lost))
        log.info("lanes changed", gained=sorted(gained), lost=sorted(lost))
        if lost:
            self._device.submit(lambda core, now: core.lanes_lost(lost))

    def _on_records(self, records: list[Record]) -> None:
        """Decode what came and hand it to the device in one call."""
        signals: list[PreInferTask] = []
        rankings: list[RankTask] = []
        assert self._consumer is not None
        for record in records:
            if record.topic == self._topics.pre_infer.name:
                try:
                    signals.append(self._intake.signal(record))
                except DecodeError as error:
                    self._dead_letter(record, error)
                else:
                    # Lost with the process or not, a signal is worth no second reading: its ranking runs in full.
                    self._consumer.done(record)
            elif (task := self._ranking(record)) is not None:
                rankings.append(task)
        if signals or rankings:
            self._device.submit(partial(_take, signals, rankings))

    def _ranking(self, record: Record) -> RankTask | None:
        assert self._outbox is not None
        origin: Origin | None = None
        try:
            origin = self._intake.route(record)
            return self._intake.ranking(record, origin)
        except TooMuch as error:
            assert origin is not None
            self._outbox.refuse(origin, "rejected", str(error))
        except DecodeError as error:
            self._dead_letter(record, error, origin)
        return None

    def _dead_letter(self, record: Record, error: DecodeError, origin: Origin | None = None) -> None:
        assert self._outbox is not None
        self._outbox.dead_letter(record, error, origin)

    # ---- answers out ----

    def _on_answers(self, answers: list[Answer]) -> None:
        assert self._outbox is not None
        for answer in answers:
            self._outbox.answer(answer)

    def _report_audit(self, task: RankTask, deviation: float, ms: float) -> None:
        """Called on the device thread; prometheus_client's objects take that."""
        tolerance = AUDIT_TOLERANCE[self._settings.worker.dtype]
        agreed = deviation <= tolerance
        self._metrics.audits.labels("agreed" if agreed else "deviated").inc()
        self._metrics.device_seconds.labels("audit").inc(ms / 1e3)
        assert self._inside is not None
        self._metrics.audit_deviation.set(self._inside.core.auditor.worst)
        if not agreed:
            log.error(
                "a relayed score deviates from full inference",
                request_id=task.request_id,
                user_id=task.user_id,
                lane=task.lane,
                outcome=task.outcome,
                deviation=deviation,
                tolerance=tolerance,
            )


def _take(signals: list[PreInferTask], rankings: list[RankTask], core: RelayCore, now: float) -> None:
    for task in rankings:
        core.rank(task, now)
    for signal in signals:
        core.signal(signal, now)
