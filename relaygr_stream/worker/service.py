"""The worker process: lanes in, answers and status out, around one device thread.

pre-infer ─┐                          ┌─► scores (the client's partition)
ranking   ─┴─► intake ─► device ─► ───┼─► worker-status
                 └── cannot be read ──┴─► dead-letter
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

import structlog

from relaygr_stream.bus.ending import end
from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.records import Record
from relaygr_stream.errors import BrokerError, ConfigError, DecodeError, DeviceError, Superseded
from relaygr_stream.settings import Settings
from relaygr_stream.telemetry.logs import request_log_fields
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.topics import TopicSet, load_topics, verify_topics
from relaygr_stream.trigger.log_ends import LogEnds
from relaygr_stream.worker.build import Inside, build
from relaygr_stream.worker.core import RelayCore
from relaygr_stream.worker.device import DeviceThread
from relaygr_stream.worker.intake import Intake, Origin, TooMuch
from relaygr_stream.worker.metrics import WorkerMetrics
from relaygr_stream.worker.outbox import Outbox
from relaygr_stream.worker.status import StatusReporter
from relaygr_stream.worker.tasks import Answer, PreInferTask, RankTask
from relaygr_stream.worker.watch import Watch

log = structlog.get_logger(__name__)

#: A relayed score may differ from full inference by this much, relative (DESIGN §8: 1e-5 in float32). In half
#: precision the two paths round differently; a hundredth is two bfloat16 steps.
AUDIT_TOLERANCE: Final = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
#: Ages of requests are bounded from samples of where the lanes end, taken this often.
AGES_S: Final = 0.25
#: A worker whose device failed gives its last answers this long to leave: a send takes milliseconds, and its lanes'
#: next owners wait for it to end.
LAST_ANSWERS_S: Final = 2.0
#: A connection ends within milliseconds; without a broker aiokafka would wait for the timeouts of its requests.
CLOSE_S: Final = 2.0
#: What a dead letter's headers add to the original: reason, detail and origin are below 2 KiB.
DEAD_LETTER_HEADERS: Final = 4096


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
        self._device = DeviceThread(asyncio.get_running_loop(), self._on_answers)
        self._watch = Watch(context, self._device, settings.kafka.max_poll_ms / 1e3)
        self._intake = Intake(
            settings.relay,
            settings.client.timeout_ms,
            self._topics.scores.partitions,
            self._topics.ranking.max_message_bytes,
            self._metrics.clock_clamped.inc,
        )
        self._in_flight: set[RankTask] = set()
        self._consumer: LaneConsumer | None = None
        self._inside: Inside | None = None
        self._outbox: Outbox | None = None

    async def run(self) -> None:
        """Start, serve, drain."""
        settings, context, topics = self._settings, self._context, self._topics
        context.set_ready(False, "loading the model")
        _check_dead_letters_fit(topics)
        try:
            await verify_topics(settings.kafka)
            await self._device.start(self._build)
            context.set_ready(False, "joining the group")
            max_bytes = max(topics.dead_letter.max_message_bytes, topics.worker_status.max_message_bytes)
            async with AsyncExitStack() as stack:
                scores = Producer(settings.kafka, client_id=f"{self._name}-scores", acks=1)
                others = Producer(settings.kafka, client_id=f"{self._name}-others", max_bytes=max_bytes)
                for producer in (scores, others):
                    await producer.start()
                    stack.push_async_callback(end, "a producer", producer.stop, CLOSE_S)
                ends = LogEnds(settings.kafka, f"{self._name}-ages")
                await ends.__aenter__()
                stack.push_async_callback(end, "the lanes' ends", partial(ends.__aexit__, None, None, None), CLOSE_S)
                await self._serve(scores, others, ends)
        finally:
            if not await self._device.stop(timeout=settings.worker.drain_ms / 1e3):
                log.error("the device thread hangs; the process ends without it")
        if self._device.failed.done():
            self._device.failed.result()  # its books did not balance at the end

    async def _serve(self, scores: Producer, others: Producer, ends: LogEnds) -> None:
        settings, context, topics = self._settings, self._context, self._topics
        assert self._inside is not None
        self._consumer = consumer = LaneConsumer(
            settings.kafka,
            topics=[topics.pre_infer.name, topics.ranking.name],
            group=settings.kafka.prefix + settings.worker.group,
            member=self._name,
            on_records=self._on_records,
            on_lanes=self._on_lanes,
            capacity=settings.worker.capacity,
            progressing=lambda: self._watch.progressing,
        )
        model = self._inside.model
        self._outbox = outbox = Outbox(topics, scores, others, self._metrics, self._name, model, consumer.done)
        reporter = StatusReporter(
            settings, topics, self._name, self._host, self._inside, self._device, self._metrics, others
        )
        async with reporter:
            await consumer.start()
            context.started = True
            watch = asyncio.create_task(self._watch.run(consumer))
            ages = asyncio.create_task(self._sample_ages(consumer, ends))
            try:
                reporter.serve(consumer)
                await self._until_stopped(
                    {self._device.failed, watch, consumer.failed, reporter.failed, outbox.failed, ages}
                )
                watch.cancel()
                context.set_ready(False, "draining")
                await reporter.announce("draining")
                if not await consumer.drain(settings.worker.drain_ms / 1e3):
                    log.warning("drain time is over", records_left=consumer.undone, setting="worker.drain_ms")
            except Exception as error:
                if isinstance(error, DeviceError) or self._device.failed.done():
                    context.set_ready(False, str(error))
                    await self._fail_in_flight(error, outbox)
                raise
            finally:
                watch.cancel()
                ages.cancel()
                outbox.close()
                # It commits where each lane stands, for half a session timeout at most, and leaves the group.
                await end("the consumer", consumer.stop, settings.kafka.session_timeout_ms / 2e3 + CLOSE_S)
            await reporter.announce("stopped")

    async def _until_stopped(self, parts: set[asyncio.Future[Any]]) -> None:
        """Wait for the stop event, or for a part that failed for good, whose error is raised."""
        stop: asyncio.Future[Any] = asyncio.ensure_future(self._context.stop.wait())
        try:
            done, _ = await asyncio.wait({stop, *parts}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        errors = [error for part in done - {stop} if (error := part.exception()) is not None]
        for error in sorted(errors, key=lambda error: not isinstance(error, Superseded | DeviceError)):
            if isinstance(error, RuntimeError):  # as torch raises what happens to a device outside of a request's work
                raise DeviceError(f"the device thread failed: {error}") from error
            raise error

    async def _fail_in_flight(self, error: Exception, outbox: Outbox) -> None:
        """Every request that the device will not answer gets its answer here, and is not read again by others: one
        that brought this worker down would bring them down in turn."""
        log.error("the device failed", error=str(error), in_flight=len(self._in_flight))
        for task in list(self._in_flight):
            self._on_answers([Answer(task, "failed", detail=str(error))])
        await outbox.flush(LAST_ANSWERS_S)

    async def _sample_ages(self, consumer: LaneConsumer, ends: LogEnds) -> None:
        """Ask, for ever, where our lanes end: what is read beyond is younger than that (Intake)."""
        while True:
            for topic in (self._topics.pre_infer.name, self._topics.ranking.name):
                try:
                    self._intake.sample_ages(topic, await ends.ask(topic, consumer.lanes))
                except BrokerError:
                    break  # readiness and the other clients tell of it
            await asyncio.sleep(AGES_S)

    # ---- parts ----

    def _build(self) -> RelayCore:
        inside = build(self._settings, self._device.deliver, self._report_audit, self._device.wake)
        self._inside = inside
        self._metrics.model_info.labels(inside.model.version, inside.model.note).set(1)
        describe = log.warning if inside.model.note else log.info
        describe("model loaded", version=inside.model.version, note=inside.model.note, device=str(inside.device))
        return inside.core

    # ---- records in ----

    def _on_lanes(self, gained: frozenset[int], lost: frozenset[int]) -> None:
        self._metrics.lane_changes.labels("gained").inc(len(gained))
        self._metrics.lane_changes.labels("lost").inc(len(lost))
        log.info("lanes changed", gained=sorted(gained), lost=sorted(lost))
        if lost:
            self._intake.lanes_lost(lost)
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
                self._in_flight.add(task)
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
            self._outbox.refuse(origin, error)
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
            if answer.task in self._in_flight:  # else it was answered here when the device failed
                self._in_flight.remove(answer.task)
                self._outbox.answer(answer)

    def _report_audit(self, task: RankTask, deviation: float, ms: float) -> None:
        """Called on the device thread; prometheus_client's objects take that."""
        worker = self._settings.worker
        tolerance, storage = AUDIT_TOLERANCE[worker.dtype], "exact"
        if task.approximate:
            tolerance, storage = max(tolerance, worker.dram_int8_deviation), "int8"
        agreed = deviation <= tolerance
        self._metrics.audits.labels("agreed" if agreed else "deviated", storage).inc()
        self._metrics.device_seconds.labels("audit").inc(ms / 1e3)
        assert self._inside is not None
        auditor = self._inside.core.auditor
        self._metrics.audit_deviation.labels(storage).set(auditor.worst_rounded if task.approximate else auditor.worst)
        if not agreed:
            log.error(
                "a relayed score deviates from full inference",
                **request_log_fields(task.request_id, task.user_id, task.lane, task.outcome),
                deviation=deviation,
                tolerance=tolerance,
                storage=storage,
            )


def _check_dead_letters_fit(topics: TopicSet) -> None:
    """A dead letter that its topic does not take would hold up its lane's commits for ever."""
    for topic in (topics.ranking, topics.pre_infer):
        if topics.dead_letter.max_message_bytes < topic.max_message_bytes + DEAD_LETTER_HEADERS:
            raise ConfigError(
                f"topic {topics.dead_letter.name} takes {topics.dead_letter.max_message_bytes} bytes, {topic.name} "
                f"{topic.max_message_bytes}: a dead letter has up to {DEAD_LETTER_HEADERS} more than its original; "
                f"raise max_message_bytes of the former"
            )


def _take(signals: list[PreInferTask], rankings: list[RankTask], core: RelayCore, now: float) -> None:
    for task in rankings:
        core.rank(task, now)
    for signal in signals:
        core.signal(signal, now)
