"""The worker process: lanes in, answers and status out, around one device thread.

pre-infer ─┐                          ┌─► scores (the client's partition)
ranking   ─┴─► intake ─► device ─► ───┼─► ranking (another worker's lane: too late here, not there)
                 │                    ├─► worker-status
                 └── cannot be read ──┴─► dead-letter
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

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
from relaygr_stream.errors import CRASHED, BrokerError, DecodeError, DeviceError
from relaygr_stream.history.store import HistoryStore, open_store
from relaygr_stream.models.api import schema_of
from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.models.relative import is_relative
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.otlp import tracing_of
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.telemetry.tracing import Tracing
from relaygr_stream.wire.erase import Erase
from relaygr_stream.wire.fleet import OwnerDirectory
from relaygr_stream.wire.headers import KIND_CANCEL, KIND_DELEGATED
from relaygr_stream.wire.messages import kind_of
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.refusals import KIND as REFUSALS
from relaygr_stream.wire.refusals import Reasons
from relaygr_stream.wire.worker_status import StatusReader
from relaygr_stream.worker.audit import AuditReport, Report
from relaygr_stream.worker.build import Held, WorkerRuntime, build
from relaygr_stream.worker.commands import (
    DELEGATED_LANE,
    Answer,
    Cancel,
    EraseUser,
    LanesLost,
    Placed,
    Prefill,
    PrefillTask,
    Rank,
    RankTask,
)
from relaygr_stream.worker.device import DeviceThread
from relaygr_stream.worker.forwarding import Forwarding
from relaygr_stream.worker.histories import Histories, HistoryMetrics, Resolver
from relaygr_stream.worker.intake import Intake, Origin, TooMuch
from relaygr_stream.worker.metrics import WorkerMetrics
from relaygr_stream.worker.replies import Outbox, check_answers_fit
from relaygr_stream.worker.status import StatusReporter
from relaygr_stream.worker.traces import SignalOrigin, signal_over
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
MakeHandover = Callable[
    [Settings, str, WorkerRuntime, DeviceThread, int, OwnerDirectory, CollectorRegistry], Handover | None
]


#: Builds a worker's runtime on the device thread, of its settings, where audits are reported, and what wakes the
#: thread; the laboratory builds one with an emulated device.
Build = Callable[[Settings, Report, Callable[[], None]], WorkerRuntime]


async def run_worker(
    context: ProcessContext, make_handover: MakeHandover = lambda *_: None, build: Build = build
) -> None:
    """Serve until `context.stop` is set, then drain. Raises RelayError where the process must end otherwise."""
    async with made_worker(context, make_handover, build) as worker:
        await worker.run()


@asynccontextmanager
async def made_worker(
    context: ProcessContext, make_handover: MakeHandover = lambda *_: None, build: Build = build
) -> AsyncIterator[Worker]:
    """A worker whose model is loaded and whose producers are connected; all of it is closed at the end."""
    settings, topics = context.settings, load_topics(context.settings.kafka)
    context.set_ready(False, "loading the model")
    check_dead_letters_fit(topics)
    metrics = WorkerMetrics(context.registry)
    context.registry.register(RenewalsCollector())
    audits = AuditReport(settings.worker, metrics)
    device = DeviceThread(asyncio.get_running_loop())
    try:
        await verify_topics(settings.kafka)
        runtime = await device.start(lambda: build(settings, audits, device.wake))
        metrics.model_info.labels(runtime.model.version, runtime.model.note).set(1)
        describe = log.warning if runtime.model.note else log.info
        described = {"version": runtime.model.version, "note": runtime.model.note, "device": str(runtime.device)}
        if isinstance(runtime.model, HSTUModel):
            described["kernels"] = runtime.model.kernels
            if is_relative(runtime.model.config):
                log.info("torch operators compute the bias on relative positions or times; no kernel does")
        describe("model loaded", **described)
        check_answers_fit(topics, settings.relay.max_candidates, runtime.model)
        context.set_ready(False, "joining the group")
        name = settings.worker.name or f"{socket.gethostname()}-{os.getpid()}"
        max_bytes = max(topics.dead_letter.max_message_bytes, topics.worker_status.max_message_bytes)
        async with AsyncExitStack() as stack:
            tracing = await stack.enter_async_context(tracing_of(settings.telemetry, "worker", context.registry))
            takes = topics.scores.max_message_bytes
            scores = Producer(settings.kafka, client_id=f"{name}-scores", acks=1, max_bytes=takes)
            others = Producer(settings.kafka, client_id=f"{name}-others", max_bytes=max_bytes)
            for producer in (scores, others):
                await producer.start()
                stack.push_async_callback(end, "a producer", producer.stop, CLOSE_S)
            ends = LogEnds(settings.kafka, f"{name}-ages")
            await ends.__aenter__()
            stack.push_async_callback(end, "the lanes' ends", partial(ends.__aexit__, None, None, None), CLOSE_S)
            bus = Bus(topics, scores, others, ends)
            store = open_store(settings.history) if settings.history.store else None
            if store is not None:
                stack.push_async_callback(end, "the history store", store.close, CLOSE_S)
            yield Worker(context, name, bus, device, runtime, metrics, audits, make_handover, tracing, store)
    finally:
        if not await device.stop(timeout=settings.worker.drain_ms / 1e3):
            log.error("the device thread hangs; the process ends without it")
    if device.failed.done():
        device.failed.result()  # its books did not balance when it closed


@dataclass(frozen=True)
class Bus:
    """A worker's connections. scores: for answers, acknowledged by one broker; others: for all else, by all in sync."""

    topics: TopicSet
    scores: Producer
    others: Producer
    ends: LogEnds


class Worker:
    """One worker process: `run` serves until it is told to stop."""

    def __init__(
        self,
        context: ProcessContext,
        name: str,
        bus: Bus,
        device: DeviceThread,
        runtime: WorkerRuntime,
        metrics: WorkerMetrics,
        audits: AuditReport,
        make_handover: MakeHandover,
        tracing: Tracing,
        store: HistoryStore | None = None,
    ) -> None:
        settings, topics = context.settings, bus.topics
        self._context = context
        self._settings: Settings = settings
        self._name = name
        self._tracing = tracing
        self._bus = bus
        self._device = device
        device.on_answers = self._on_answers
        device.on_placed = self._on_placed
        self._runtime = runtime
        self._metrics = metrics
        self._watch = Watch(context, device, settings.kafka.max_poll_interval_ms / 1e3, lambda: audits.distrust)
        self._intake = Intake(
            settings.relay,
            settings.client.timeout_ms,
            topics.scores.partitions,
            topics.ranking.max_message_bytes,
            metrics.clock_clamped.inc,
            settings.worker.reply_ms,
            settings.worker.max_timeout_ms,
            len(runtime.model.tasks),
            schema_of(runtime.model),
        )
        self._held = Held(settings.worker.max_waiting_bytes, lambda: device.prefill_bytes)
        self._background = Background()
        history_metrics = HistoryMetrics(context.registry)
        self._resolver = Resolver(
            None if store is None else Histories(store, settings.history, history_metrics),
            self._intake,
            history_metrics,
            self._on_resolved,
            lambda answer: self._on_answers([answer]),
            self._signal_dropped,
            lambda lane: lane in self._consumer.lanes,
            self._background,
        )
        self._peers = OwnerDirectory(
            settings.client.silence_ms,
            on_unreadable=metrics.statuses_unreadable.inc,
            on_unsigned=metrics.statuses_unsigned.inc,
            reader=StatusReader.of(settings, topics),
        )
        self._reasons = Reasons(settings.relay.life_window_ms)
        self._in_flight: set[RankTask] = set()
        self._consumer = LaneConsumer(
            settings.kafka,
            topics=[topics.pre_infer.name, topics.ranking.name],
            group=settings.kafka.prefix + settings.worker.group,
            member=name,
            on_records=self._on_records,
            on_lanes=self._on_lanes,
            capacity=settings.worker.capacity,
            progressing=self._progressing,
            crashes=Crashes(topics.ranking.name, settings.worker.max_crashes, self._on_crashed),
        )
        self._forwarding = Forwarding(name, self._peers, topics.lanes, averaging=settings.relay.averaging)
        self._outbox = Outbox(
            topics,
            bus.scores,
            bus.others,
            metrics,
            name,
            runtime.model,
            self._done,
            self._rank_again,
            self._background,
            self._forwarding if settings.worker.forward else None,
            settings.relay.answer_secret,
            self._reasons,
            settings.kafka.dead_letter_values,
        )
        self._counts = PartitionCounts(topics, bus.scores, self._intake.set_reply_partitions)
        context.conditions += [self._outbox.letters.why_not_taken, self._counts.why_not_ready]
        self._handover = make_handover(settings, name, runtime, device, topics.lanes, self._peers, context.registry)
        self._reporter = StatusReporter(
            settings,
            topics,
            name,
            socket.gethostname(),
            runtime,
            device,
            metrics,
            bus.others,
            self._peers,
            self._consumer,
            lambda: "" if self._handover is None else self._handover.address,
            self._fetching_bytes,
            self._erase,
            self._background,
        )

    async def run(self) -> None:
        """Serve until the process is told to stop, then drain and leave. Raises what fails."""
        context, consumer, reporter, background = self._context, self._consumer, self._reporter, self._background
        await self._counts.ask()
        async with AsyncExitStack() as stack:
            if self._handover is not None:
                await self._handover.start()
                stack.push_async_callback(self._handover.stop)
            await stack.enter_async_context(reporter)
            await consumer.start()
            context.started = True
            background.watch(self._device.failed, consumer.failed)
            watch = background.start(self._watch.run(consumer, self._bus.scores, self._bus.others))
            background.start(self._sample_ages())
            background.start(self._counts.run())
            try:
                reporter.serve()
                await background.until(context.stop.wait())
                watch.cancel()
                drained_by = time.monotonic() + self._settings.worker.drain_ms / 1e3
                context.set_ready(False, "draining")
                await reporter.announce("draining")
                # A device that fails meanwhile answers nothing more; whatever else fails, what was read is answered.
                if not await self._device.until(consumer.drain(self._settings.worker.drain_ms / 1e3)):
                    log.warning("drain time is over", records_left=consumer.undone, setting="worker.drain_ms")
                left = consumer.lanes
            except Exception as error:
                if isinstance(error, DeviceError) or self._device.failed.done():
                    watch.cancel()  # which would find the worker ready
                    context.set_ready(False, str(error))
                    await self._fail_in_flight(error)
                raise
            finally:
                self._outbox.close()
                await background.end()
                # It commits where each lane stands, for half a session timeout at most, and leaves the group.
                await end("the consumer", consumer.stop, self._settings.kafka.session_timeout_ms / 2e3 + CLOSE_S)
            if self._handover is not None:
                await self._handover.farewell(left, drained_by - time.monotonic())
            await reporter.announce("stopped")
            await reporter.withdraw()

    async def _fail_in_flight(self, error: Exception) -> None:
        """Every request that the device will not answer gets its answer here, and is not read again by others: one
        that brought this worker down would bring them down in turn."""
        log.error("the device failed", error=str(error), in_flight=len(self._in_flight))
        for task in list(self._in_flight):
            self._on_answers([Answer(task, "failed", detail=str(error))])
        await self._outbox.flush(LAST_ANSWERS_S)

    async def _sample_ages(self) -> None:
        """Ask, for ever, where our lanes end: what is read beyond is younger than that (Intake)."""
        consumer, ends = self._consumer, self._bus.ends
        while True:
            topics = self._bus.topics.pre_infer.name, self._bus.topics.ranking.name
            asked = (ends.ask(topic, consumer.lanes) for topic in topics)
            for topic, answer in zip(topics, await asyncio.gather(*asked, return_exceptions=True), strict=True):
                if isinstance(answer, dict):
                    self._intake.sample_ages(topic, answer)
                    owned = consumer.lanes & answer.keys()
                    ahead = (answer[lane].offset - consumer.position(topic, lane) for lane in owned)
                    self._reporter.lag[topic] = sum(max(0, each) for each in ahead)
                elif not isinstance(answer, BrokerError):  # of which readiness and the other clients tell
                    raise answer
            await asyncio.sleep(AGES_S)

    def _progressing(self) -> bool:
        return self._watch.progressing and not self._outbox.letters.full

    # ---- records in ----

    def _on_lanes(self, gained: frozenset[int], lost: frozenset[int]) -> None:
        self._metrics.lane_changes.labels("gained").inc(len(gained))
        self._metrics.lane_changes.labels("lost").inc(len(lost))
        log.info("lanes changed", gained=sorted(gained), lost=sorted(lost))
        if self._handover is not None:
            self._handover.lanes_changed(gained, lost)
        if lost:
            self._intake.lanes_lost(lost)
            self._device.submit(LanesLost(lost))

    def _on_records(self, records: list[Record]) -> None:
        """Hand what came to the device as commands: rankings first, because their clients wait."""
        signals: list[Prefill] = []
        rankings: list[Rank | Cancel] = []  # in their order: a ranking may come behind the cancel of its request
        for record in records:
            kind, ranked = kind_of(record.headers), record.topic == self._bus.topics.ranking.name
            if kind and not (ranked and kind == KIND_DELEGATED):
                if (cancel := self._other(record, kind)) is not None:
                    rankings.append(cancel)
            elif ranked and not kind:
                if (ranking := self._ranking(record)) is not None:
                    rankings.append(ranking)
            elif (signal := self._signal(record)) is not None:
                signals.append(signal)
        if signals or rankings:
            self._device.submit(*rankings, *signals)

    def _other(self, record: Record, kind: str) -> Cancel | None:
        """A client's cancel, refusals of the trigger, or a kind of a later release, which is skipped."""
        if kind == KIND_CANCEL and record.topic == self._bus.topics.ranking.name:
            try:
                cancel = Cancel(self._intake.cancelled(record))
            except DecodeError as error:
                self._dead_letter(record, error)
                return None
            self._pass_on_cancel(record, cancel)
            self._consumer.done(record)
            return cancel
        if kind == REFUSALS and record.topic == self._bus.topics.pre_infer.name:
            with suppress(DecodeError):  # nothing depends on it
                self._reasons.read(record)
        else:
            self._metrics.records_skipped.inc()
        self._consumer.done(record)
        return None

    def _signal(self, record: Record) -> Prefill | None:
        try:
            task = self._intake.signal(record)
        except DecodeError as error:
            self._dead_letter(record, error)
            return None
        self._reasons.admitted(task.request_id, delegated=task.lane == DELEGATED_LANE)
        # A signal is acknowledged at once: if it is lost with the process, its ranking runs in full.
        self._consumer.done(record)
        if self._tracing.on:
            task.origin = SignalOrigin(self._tracing.receive("relaygr.pre-infer", record), time.monotonic())
        if self._held.signal(task.nbytes):
            resolved = self._resolver.take(Prefill(task))
            return resolved if isinstance(resolved, Prefill) else None
        self._metrics.signals.labels("no_memory").inc()
        if task.origin is not None:
            signal_over(Placed(task, "no_memory", completed=False), self._name)
        return None

    def _ranking(self, record: Record) -> Rank | None:
        origin: Origin | None = None
        try:
            origin = self._intake.route(record)
            if self._tracing.on:
                origin = replace(origin, trace=self._tracing.receive("relaygr.ranking", record))
            task = self._intake.ranking(record, origin)
            self._metrics.rankings_read.labels(str(task.hops)).inc()
            task.pass_to = self._delegate(task)
            if self._held.ranking(record.lane, record.offset, task.nbytes):
                self._in_flight.add(task)
                resolved = self._resolver.take(Rank(task))
                return resolved if isinstance(resolved, Rank) else None
            self._outbox.decline(
                task, f"requests of {self._held.nbytes >> 20} MiB wait for their answers (worker.max_waiting_bytes)"
            )
        except TooMuch as error:
            assert origin is not None
            self._outbox.refuse(origin, error)
        except DecodeError as error:
            self._dead_letter(record, error, origin)
        return None

    def _delegate(self, task: RankTask) -> int | None:
        """A lane of the worker that has a ranking's prefix KV on our behalf; None: there is none any more."""
        name = self._reasons.take_delegate(task.request_key)
        if not name or task.hops or task.full:
            return None
        lane = self._forwarding.lane_of_delegate(name, (task.deadline - time.monotonic()) * 1e3)
        if lane is None:
            self._metrics.forwards.labels("delegate_gone").inc()
        return lane

    def _pass_on_cancel(self, record: Record, cancel: Cancel) -> None:
        """What another worker pins on our behalf for this request is to be released there, too."""
        name = self._reasons.take_delegate(cancel.request_key)
        lane = self._forwarding.lane_of_delegate(name, math.inf) if name else None
        if lane is not None:
            self._outbox.pass_on(record, lane)

    def _rank_again(self, task: RankTask) -> None:
        self._in_flight.add(task)
        self._device.submit(Rank(task))

    def _on_resolved(self, command: Rank | Prefill) -> None:
        """A command that waited for its history has it; its ranking may have been answered meanwhile."""
        if isinstance(command, Prefill) or command.task in self._in_flight:
            self._device.submit(command)

    def _signal_dropped(self, task: PrefillTask) -> None:
        self._held.signal_over(task.nbytes)
        if task.origin is not None:
            signal_over(Placed(task, "no_history", completed=False), self._name)

    def _fetching_bytes(self, lane: int) -> int:
        """HBM bytes of signals that were read and wait for their history: a status counts them as pinned."""
        context = schema_of(self._runtime.model).context_tokens
        return sum(self._runtime.cache.nbytes(context + tokens) for tokens in self._resolver.signal_tokens(lane))

    async def _erase(self, erase: Erase) -> None:
        """Drop a user from this worker: kept histories, both tiers, pins."""
        self._resolver.erase(erase.names)
        entries = await self._device.ask(EraseUser(erase))
        log.info("a user was erased", erase=erase.id, entries=entries)

    def _on_crashed(self, record: Record) -> None:
        """Dead-letter a ranking at which so many workers ended: no worker runs it again."""
        limit = self._settings.worker.max_crashes
        detail = f"{limit} workers ended while they worked at this request (worker.max_crashes)"
        try:
            origin = self._intake.route(record)
        except DecodeError:
            origin = None
        self._dead_letter(record, DecodeError(CRASHED, detail), origin)

    def _done(self, record: Record) -> None:
        if record.topic == self._bus.topics.ranking.name:
            self._held.over(record.lane, record.offset)
        self._consumer.done(record)

    def _dead_letter(self, record: Record, error: DecodeError, origin: Origin | None = None) -> None:
        self._outbox.dead_letter(record, error, origin)

    # ---- answers out ----

    def _on_placed(self, placed: list[Placed]) -> None:
        for each in placed:
            signal_over(each, self._name)

    def _on_answers(self, answers: list[Answer]) -> None:
        for answer in answers:
            if answer.task in self._in_flight:  # else it was answered here when the device failed
                self._in_flight.remove(answer.task)
                self._outbox.settle(answer)
