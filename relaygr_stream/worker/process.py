"""The worker process: lanes in, answers and status out, around one device thread.

pre-infer ─┐                          ┌─► scores (the client's partition)
ranking   ─┴─► intake ─► device ─► ───┼─► ranking (another worker's lane: too late here, not there)
                 │                    ├─► worker-status
                 └── cannot be read ──┴─► dead-letter
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, Final, Protocol

import structlog
from prometheus_client import CollectorRegistry

from relaygr_stream.bus.ages import LogEnds
from relaygr_stream.bus.aiokafka_compat import end
from relaygr_stream.bus.counts import PartitionCounts
from relaygr_stream.bus.crashes import Crashes
from relaygr_stream.bus.dead_letter import check_dead_letters_fit
from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.renewed import RenewalsCollector
from relaygr_stream.bus.topics import TopicSet, load_topics, verify_topics
from relaygr_stream.errors import CRASHED, BrokerError, DecodeError, DeviceError, Superseded
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.wire.fleet import OwnerDirectory
from relaygr_stream.wire.messages import kind_of
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.refusals import KIND as REFUSALS
from relaygr_stream.wire.refusals import Reasons
from relaygr_stream.wire.worker_status import StatusReader
from relaygr_stream.worker.audit import AuditReport
from relaygr_stream.worker.build import Held, Inside, build
from relaygr_stream.worker.device import DeviceThread
from relaygr_stream.worker.forwarding import Forwarding
from relaygr_stream.worker.intake import Intake, Origin, TooMuch
from relaygr_stream.worker.metrics import WorkerMetrics
from relaygr_stream.worker.replies import Outbox, check_answers_fit
from relaygr_stream.worker.scheduler import RelayCore
from relaygr_stream.worker.status import StatusReporter
from relaygr_stream.worker.tasks import Answer, PreInferTask, RankTask
from relaygr_stream.worker.watch import Watch

log = structlog.get_logger(__name__)

#: Ages of requests are bounded from samples of where the lanes end, taken this often.
AGES_S: Final = 0.25
#: A worker whose device failed gives its last answers this long to leave: a send takes milliseconds, and its lanes'
#: next owners wait for it to end.
LAST_ANSWERS_S: Final = 2.0
#: A connection ends within milliseconds; without a broker aiokafka would wait for the timeouts of its requests.
CLOSE_S: Final = 2.0


class Handover(Protocol):
    """Prefix KV of lanes that move between workers, as a worker sees it (handover/service.py)."""

    @property
    def address(self) -> str:
        """host:port that other workers reach it under."""

    async def start(self) -> None:
        """Listen for other workers."""

    def lanes_changed(self, gained: Iterable[int], lost: Iterable[int]) -> None:
        """Fetch for the lanes gained, offer those lost."""

    async def farewell(self, lanes: Iterable[int], seconds: float) -> None:
        """Wait until the next owners have fetched these lanes, for so long at most."""

    async def stop(self) -> None:
        """Close everything."""


#: Makes a worker's hand-over of its settings, name, parts, device thread, number of lanes, peers and metrics; None: it
#: is off.
MakeHandover = Callable[[Settings, str, Inside, DeviceThread, int, OwnerDirectory, CollectorRegistry], Handover | None]


async def run_worker(context: ProcessContext, make_handover: MakeHandover = lambda *_: None) -> None:
    """Serve until `context.stop` is set, then drain. Raises RelayError where the process must end otherwise."""
    await Worker(context, make_handover).run()


class Worker:
    """One worker process."""

    def __init__(self, context: ProcessContext, make_handover: MakeHandover = lambda *_: None) -> None:
        settings = context.settings
        self._context = context
        self._make_handover = make_handover
        self._settings: Settings = settings
        self._topics: TopicSet = load_topics(settings.kafka)
        self._metrics = WorkerMetrics(context.registry)
        context.registry.register(RenewalsCollector())
        self._host = socket.gethostname()
        self._name = settings.worker.name or f"{self._host}-{os.getpid()}"
        self._device = DeviceThread(asyncio.get_running_loop(), self._on_answers)
        self._audits = AuditReport(settings.worker, self._metrics)
        self._watch = Watch(context, self._device, settings.kafka.max_poll_ms / 1e3, lambda: self._audits.distrust)
        self._intake = Intake(
            settings.relay,
            settings.client.timeout_ms,
            self._topics.scores.partitions,
            self._topics.ranking.max_message_bytes,
            self._metrics.clock_clamped.inc,
            settings.worker.reply_ms,
            settings.worker.max_timeout_ms,
        )
        self._held = Held(settings.worker.waiting_bytes)
        self._peers = OwnerDirectory(
            settings.client.silence_ms,
            on_unreadable=self._metrics.statuses_unreadable.inc,
            on_unsigned=self._metrics.statuses_unsigned.inc,
            reader=StatusReader.of(settings, self._topics),
        )
        self._reasons = Reasons(settings.relay.life_window_ms)
        self._in_flight: set[RankTask] = set()
        self._consumer: LaneConsumer | None = None
        self._inside: Inside | None = None
        self._outbox: Outbox | None = None
        self._handover: Handover | None = None

    async def run(self) -> None:
        """Start, serve, drain."""
        settings, context, topics = self._settings, self._context, self._topics
        context.set_ready(False, "loading the model")
        check_dead_letters_fit(topics)
        try:
            await verify_topics(settings.kafka)
            await self._device.start(self._build)
            assert self._inside is not None
            check_answers_fit(topics, settings.relay.max_candidates, self._inside.model)
            context.set_ready(False, "joining the group")
            max_bytes = max(topics.dead_letter.max_message_bytes, topics.worker_status.max_message_bytes)
            async with AsyncExitStack() as stack:
                takes = topics.scores.max_message_bytes
                scores = Producer(settings.kafka, client_id=f"{self._name}-scores", acks=1, max_bytes=takes)
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
            progressing=lambda: self._watch.progressing and not outbox.letters.full,
            crashes=Crashes(topics.ranking.name, settings.worker.crash_limit, self._on_crashed),
        )
        model = self._inside.model
        self._intake.score_columns = len(model.tasks)
        forwarding = Forwarding(self._name, self._peers, topics.lanes) if settings.worker.forward else None
        self._outbox = outbox = Outbox(
            topics,
            scores,
            others,
            self._metrics,
            self._name,
            model,
            self._done,
            forwarding,
            settings.relay.answer_secret,
            self._reasons,
            settings.kafka.dead_letter_values,
        )
        counts = PartitionCounts(topics, scores, self._intake.set_reply_partitions)
        await counts.ask()
        context.conditions += [outbox.letters.why_not_taken, counts.why_not_ready]
        self._handover = handover = await self._start_handover()
        address = "" if handover is None else handover.address
        reporter = StatusReporter(
            settings,
            topics,
            self._name,
            self._host,
            self._inside,
            self._device,
            self._metrics,
            others,
            self._peers,
            address,
        )
        async with AsyncExitStack() as stack:
            if handover is not None:
                stack.push_async_callback(handover.stop)
            await stack.enter_async_context(reporter)
            await consumer.start()
            context.started = True
            watch = asyncio.create_task(self._watch.run(consumer, scores, others))
            ages = asyncio.create_task(self._sample_ages(consumer, ends, reporter))
            counting = asyncio.create_task(counts.run())
            try:
                reporter.serve(consumer)
                parts = {self._device.failed, watch, consumer.failed, reporter.failed, outbox.failed, ages}
                await self._until_stopped({*parts, outbox.letters.failed, counting})
                watch.cancel()
                drained_by = time.monotonic() + settings.worker.drain_ms / 1e3
                context.set_ready(False, "draining")
                await reporter.announce("draining")
                if not await self._drained(consumer):
                    log.warning("drain time is over", records_left=consumer.undone, setting="worker.drain_ms")
                left = consumer.lanes
            except Exception as error:
                if isinstance(error, DeviceError) or self._device.failed.done():
                    watch.cancel()  # which would find the worker ready
                    context.set_ready(False, str(error))
                    await self._fail_in_flight(error, outbox)
                raise
            finally:
                watch.cancel()
                ages.cancel()
                counting.cancel()
                outbox.close()
                # It commits where each lane stands, for half a session timeout at most, and leaves the group.
                await end("the consumer", consumer.stop, settings.kafka.session_timeout_ms / 2e3 + CLOSE_S)
            if handover is not None:
                await handover.farewell(left, drained_by - time.monotonic())
            await reporter.announce("stopped")
            await reporter.bury()

    async def _until_stopped(self, parts: set[asyncio.Future[Any]]) -> None:
        """Wait for the stop event, or for a part that failed for good, whose error is raised."""
        stop: asyncio.Future[Any] = asyncio.ensure_future(self._context.stop.wait())
        try:
            done, _ = await asyncio.wait({stop, *parts}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        _raise_first(done - {stop})

    async def _drained(self, consumer: LaneConsumer) -> bool:
        """As LaneConsumer.drain, but what ends the device thread meanwhile is raised: it would answer nothing more."""
        drain = asyncio.create_task(consumer.drain(self._settings.worker.drain_ms / 1e3))
        ends: set[asyncio.Future[Any]] = {drain, self._device.failed}
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            _raise_first(done - {drain})
            return await drain
        finally:
            drain.cancel()

    async def _fail_in_flight(self, error: Exception, outbox: Outbox) -> None:
        """Every request that the device will not answer gets its answer here, and is not read again by others: one
        that brought this worker down would bring them down in turn."""
        log.error("the device failed", error=str(error), in_flight=len(self._in_flight))
        for task in list(self._in_flight):
            self._on_answers([Answer(task, "failed", detail=str(error))])
        await outbox.flush(LAST_ANSWERS_S)

    async def _sample_ages(self, consumer: LaneConsumer, ends: LogEnds, reporter: StatusReporter) -> None:
        """Ask, for ever, where our lanes end: what is read beyond is younger than that (Intake)."""
        while True:
            topics = self._topics.pre_infer.name, self._topics.ranking.name
            asked = (ends.ask(topic, consumer.lanes) for topic in topics)
            for topic, answer in zip(topics, await asyncio.gather(*asked, return_exceptions=True), strict=True):
                if isinstance(answer, dict):
                    self._intake.sample_ages(topic, answer)
                    owned = consumer.lanes & answer.keys()
                    ahead = (answer[lane].offset - consumer.position(topic, lane) for lane in owned)
                    reporter.lag[topic] = sum(max(0, each) for each in ahead)
                elif not isinstance(answer, BrokerError):  # of which readiness and the other clients tell
                    raise answer
            await asyncio.sleep(AGES_S)

    # ---- parts ----

    async def _start_handover(self) -> Handover | None:
        """None: it is off, for want of a secret or certificates."""
        inside = self._inside
        assert inside is not None
        handover = self._make_handover(
            self._settings, self._name, inside, self._device, self._topics.lanes, self._peers, self._context.registry
        )
        if handover is not None:
            await handover.start()
        return handover

    def _build(self) -> RelayCore:
        inside = build(self._settings, self._device.deliver, self._audits, self._device.wake)
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
        if self._handover is not None:
            self._handover.lanes_changed(gained, lost)
        if lost:
            self._intake.lanes_lost(lost)
            self._device.submit(lambda core, now: core.lanes_lost(lost))

    def _on_records(self, records: list[Record]) -> None:
        """Decode what came and hand it to the device in one call."""
        signals: list[PreInferTask] = []
        rankings: list[RankTask] = []
        assert self._consumer is not None
        for record in records:
            kind = kind_of(record.headers)
            if kind == REFUSALS and record.topic == self._topics.pre_infer.name:
                with suppress(DecodeError):  # nothing depends on it
                    self._reasons.read(record)
                self._consumer.done(record)
            elif kind:  # of a later release
                self._metrics.records_skipped.inc()
                self._consumer.done(record)
            elif record.topic == self._topics.pre_infer.name:
                try:
                    signal = self._intake.signal(record)
                    self._reasons.admitted(signal.request_id)
                    if self._held.signal(signal.nbytes):
                        signals.append(signal)
                    else:
                        self._metrics.signals.labels("no_memory").inc()
                except DecodeError as error:
                    self._dead_letter(record, error)
                else:
                    # Lost with the process or not, a signal is worth no second reading: its ranking runs in full.
                    self._consumer.done(record)
            elif (task := self._ranking(record)) is not None:
                rankings.append(task)
                self._in_flight.add(task)
        if signals or rankings:
            self._device.submit(partial(_take, signals, rankings, self._held))

    def _ranking(self, record: Record) -> RankTask | None:
        assert self._outbox is not None
        origin: Origin | None = None
        try:
            origin = self._intake.route(record)
            task = self._intake.ranking(record, origin)
            self._metrics.rankings_read.labels(str(task.hops)).inc()
            if self._held.ranking(record.lane, record.offset, task.nbytes):
                return task
            self._outbox.decline(
                task, f"requests of {self._held.nbytes >> 20} MiB wait for their answers (worker.waiting_bytes)"
            )
        except TooMuch as error:
            assert origin is not None
            self._outbox.refuse(origin, error)
        except DecodeError as error:
            self._dead_letter(record, error, origin)
        return None

    def _on_crashed(self, record: Record) -> None:
        """A ranking that each of its workers ended at: nobody runs it again."""
        limit = self._settings.worker.crash_limit
        detail = f"{limit} workers ended while they worked at this request (worker.crash_limit)"
        try:
            origin = self._intake.route(record)
        except DecodeError:
            origin = None
        self._dead_letter(record, DecodeError(CRASHED, detail), origin)

    def _done(self, record: Record) -> None:
        assert self._consumer is not None
        if record.topic == self._topics.ranking.name:
            self._held.over(record.lane, record.offset)
        self._consumer.done(record)

    def _dead_letter(self, record: Record, error: DecodeError, origin: Origin | None = None) -> None:
        assert self._outbox is not None
        self._outbox.dead_letter(record, error, origin)

    # ---- answers out ----

    def _on_answers(self, answers: list[Answer]) -> None:
        assert self._outbox is not None
        for answer in answers:
            if answer.task in self._in_flight:  # else it was answered here when the device failed
                self._in_flight.remove(answer.task)
                self._outbox.settle(answer)


def _raise_first(parts: Iterable[asyncio.Future[Any]]) -> None:
    """Raise what one of them failed with: what explains the others before them."""
    errors = [error for part in parts if (error := part.exception()) is not None]
    for error in sorted(errors, key=lambda error: not isinstance(error, Superseded | DeviceError)):
        if isinstance(error, RuntimeError):  # as torch raises what happens to a device outside of a request's work
            raise DeviceError(f"the device thread failed: {error}") from error
        raise error


def _take(signals: list[PreInferTask], rankings: list[RankTask], held: Held, core: RelayCore, now: float) -> None:
    held.taken(sum(signal.nbytes for signal in signals))
    for task in rankings:
        core.rank(task, now)
    for signal in signals:
        core.signal(signal, now)
