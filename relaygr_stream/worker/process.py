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
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Final

import structlog

from relaygr_stream.bus.ages import LogEnds
from relaygr_stream.bus.aiokafka_compat import end
from relaygr_stream.bus.crashes import Crashes
from relaygr_stream.bus.dead_letter import check_dead_letters_fit
from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.renewed import RenewalsCollector
from relaygr_stream.bus.topic_check import PartitionCounts
from relaygr_stream.bus.topics import verified_topics
from relaygr_stream.cache.copy import Wake
from relaygr_stream.engine.audit import Report
from relaygr_stream.engine.build import WorkerRuntime, build
from relaygr_stream.errors import BrokerError, DeviceError, RelayError
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.groups.moves import GroupMoves
from relaygr_stream.history.store import open_store
from relaygr_stream.models.api import schema_of
from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.models.loading import BuiltIn
from relaygr_stream.models.relative import is_relative
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.background import Background, periodically
from relaygr_stream.telemetry.otlp import tracing_of
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.wire.erase import Erase
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader
from relaygr_stream.worker.context import WorkerConnections, WorkerContext
from relaygr_stream.worker.core import WorkerCore, WorkerPolicy
from relaygr_stream.worker.device import Device, DeviceThread
from relaygr_stream.worker.fair_share import LOOK_S, FairShare
from relaygr_stream.worker.handing import MakeHandover
from relaygr_stream.worker.metrics import WorkerMetrics
from relaygr_stream.worker.replies import check_answers_fit
from relaygr_stream.worker.requests import Requests
from relaygr_stream.worker.restart import find_again
from relaygr_stream.worker.status import StatusReporter
from relaygr_stream.worker.watch import AuditReport, Watch

log = structlog.get_logger(__name__)

#: Ages of requests are bounded from samples of where the lanes end, taken this often.
AGES_S: Final = 0.25
#: A connection ends within milliseconds; without a broker aiokafka would wait for the timeouts of its requests.
CLOSE_S: Final = 2.0


#: Builds a worker's runtime on the device thread, of its settings, where audits are reported, and what wakes the
#: thread; the laboratory builds one with an emulated device.
Build = Callable[[Settings, Report, Wake], WorkerRuntime]


def name_of(settings: Settings) -> str:
    """The worker's name."""
    return settings.worker.name or f"{socket.gethostname()}-{os.getpid()}"


@asynccontextmanager
async def made_worker(
    context: ProcessContext,
    make_handover: MakeHandover = lambda *_: None,
    build: Build = build,
    moves: GroupMoves | None = None,
) -> AsyncIterator[WorkerProcess]:
    """A worker whose model is loaded and whose producers are connected; all of it is closed at the end.

    moves: call it away to another scenario; None: nothing does. Raises DeviceError where it was called away, and the
    device hangs.
    """
    settings, runtime, left = context.settings, None, False
    context.set_ready(False, "loading the model")
    log.info("loading the model")
    check_dead_letters_fit(load_topics(settings.kafka))
    metrics = WorkerMetrics.of_settings(context.registry, settings)
    context.registry.register(RenewalsCollector())
    audits = AuditReport(settings.worker, metrics)
    device = DeviceThread(asyncio.get_running_loop())
    try:
        topics = await verified_topics(settings.kafka)
        runtime = await device.start(lambda: build(settings, audits, device.wake))
        _say_model(settings, runtime, metrics)
        check_answers_fit(topics, settings.relay.max_candidates, runtime.model)
        context.set_ready(False, "joining the group")
        name = name_of(settings)
        max_bytes = max(topics.dead_letter.max_message_bytes, topics.worker_status.max_message_bytes)
        async with AsyncExitStack() as stack:
            tracing = await stack.enter_async_context(
                tracing_of(settings.telemetry, "worker", context.registry, settings.scenario)
            )
            takes = topics.scores.max_message_bytes
            scores = Producer(settings.kafka, client_id=f"{name}-scores", acks=1, max_bytes=takes)
            others = Producer(settings.kafka, client_id=f"{name}-others", max_bytes=max_bytes)
            for producer in (scores, others):
                await producer.start()
                stack.push_async_callback(end, "a producer", producer.stop, CLOSE_S)
            ends = LogEnds(settings.kafka, f"{name}-ages")
            await ends.__aenter__()
            stack.push_async_callback(end, "the lanes' ends", partial(ends.__aexit__, None, None, None), CLOSE_S)
            store = open_store(settings.history) if settings.history.store else None
            connections = WorkerConnections(topics, scores, others, ends, store)
            shared = WorkerContext(
                settings, name, metrics, context.registry, tracing, Background(), moves or GroupMoves()
            )
            worker = WorkerProcess(context, shared, connections, Device(device, runtime), audits, make_handover)
            stack.push_async_callback(end, "the history store", worker.requests.close, CLOSE_S)
            yield worker
            left = worker.left
    finally:
        if hangs := not await device.stop(timeout=settings.worker.drain_ms / 1e3):
            log.error("the device thread hangs; the process ends without it")
        elif runtime is not None:
            runtime.close(for_good=left)
    if device.failed.done():
        device.failed.result()  # its books did not balance when it closed
    if hangs and not context.stop.is_set():
        raise DeviceError("the device thread hangs, and nothing else can run on its device")


def _say_model(settings: Settings, runtime: WorkerRuntime, metrics: WorkerMetrics) -> None:
    metrics.model_info.labels(runtime.model.version, runtime.model.note).set(1)
    describe = log.warning if runtime.model.note else log.info
    described = {"version": runtime.model.version, "note": runtime.model.note, "device": str(runtime.device)}
    if isinstance(runtime.model, BuiltIn):
        described["kernels"] = runtime.model.kernels
        if isinstance(runtime.model, HSTUModel) and is_relative(runtime.model.config):
            log.info("torch operators compute the bias on relative positions or times; no kernel does")
    describe("model loaded", **described)
    if settings.trigger.delegate and runtime.delegated_bytes < runtime.longest_bytes:
        log.warning(
            "no longest prefix is delegated to this worker: HBM has no room for one beside its own users' "
            "prefixes; raise worker.hbm_bytes",
            room_bytes=runtime.delegated_bytes,
            needed_bytes=runtime.longest_bytes,
        )


class WorkerProcess:
    """One worker process: `run` serves until it is told to stop."""

    def __init__(
        self,
        process: ProcessContext,
        context: WorkerContext,
        connections: WorkerConnections,
        device: Device,
        audits: AuditReport,
        make_handover: MakeHandover,
    ) -> None:
        settings, topics, metrics, name = context.settings, connections.topics, context.metrics, context.name
        self._process = process
        self._moves = context.moves
        self.left = False  # it has drained, and does not come back to this group soon
        self._settings: Settings = settings
        self._connections = connections
        self.device: Final = device.thread
        self.runtime: Final = device.runtime
        self._metrics = metrics
        self._watch = Watch(process, device.thread, settings.kafka.max_poll_interval_ms / 1e3, audits)
        self._background = context.background
        peers = OwnerDirectory(settings.client.silence_ms, metrics, reader=StatusReader.from_settings(settings, topics))
        self.consumer: Final = LaneConsumer(
            settings.kafka,
            topics=[topics.pre_infer.name, topics.ranking.name],
            group=settings.kafka.prefix + settings.worker.group,
            member=name,
            user=self,
            capacity=settings.worker.capacity or 1.0,
            crashes=Crashes([topics.pre_infer.name, topics.ranking.name], settings.worker.max_crashes, self),
        )
        self._fair_share = FairShare(name, peers, self.consumer, fixed=settings.worker.capacity > 0)
        self.core: Final = WorkerCore(name, WorkerPolicy.from_settings(settings), peers, topics)
        self.requests: Final = Requests(context, connections, device, self.core, self.consumer)
        device.thread.deliver_to(self.requests)
        self._counts = PartitionCounts(topics, connections.scores, self.requests.intake, [topics.worker_status])
        process.conditions += [self.requests.letters.why_not_taken, self._counts.why_not_ready]
        self._handover = make_handover(context, device, topics, peers)
        self._reporter = StatusReporter(context, connections, device, peers, self.consumer, self)

    async def run(self) -> bool:
        """Serve until the process is told to stop, or to serve another scenario, then drain and leave.

        Returns False if records were left at the end of worker.drain_ms. Raises what fails.
        """
        topics = self._connections.topics
        context, consumer, reporter, background = self._process, self.consumer, self._reporter, self._background
        await self._counts.ask()
        async with AsyncExitStack() as stack:
            if self._handover is not None:
                await self._handover.start()
                background.watch(self._handover.failed)
                stack.push_async_callback(self._handover.stop)
            await stack.enter_async_context(reporter)
            warm = await find_again(self._settings.kafka, topics, reporter.reader, Device(self.device, self.runtime))
            await consumer.start(warm)
            context.started = True
            background.watch(self.device.failed, consumer.failed)
            watch = background.start(self._watch.run(consumer, self._connections.scores, self._connections.others))
            background.start(periodically(AGES_S, self._sample_ages, "ask for the ends of the lanes' logs"))
            background.start(self._counts.run())
            background.start(periodically(LOOK_S, self._fair_share.look, "look at the workers' loads"))
            in_order = True
            try:
                self._moves.arrive()
                reporter.serve()
                background.start(reporter.publish_now())  # triggers count no lanes of a worker that starts
                await background.until(self._moves.until_away(context.stop))
                watch.cancel()
                if not context.stop.is_set():
                    to = self._moves.in_words(self._moves.target)
                    context.doing = f"moves to {to}"
                    log.info("leaves for another group", to=to, epoch=self._moves.epoch)
                drained_by = time.monotonic() + self._settings.worker.drain_ms / 1e3
                drained = await self._drain(drained_by)
            except Exception as error:
                # Else a defect, which a record may have tripped that is still to be answered.
                in_order = isinstance(error, RelayError) or self.device.failed.done()
                if isinstance(error, DeviceError) or self.device.failed.done():
                    watch.cancel()  # which would find the worker ready
                    context.set_ready(False, str(error))
                    await self.requests.fail_in_flight(error)
                raise
            finally:
                self.requests.stop_sending()
                await background.end()
                # It commits where each lane stands, for half a session timeout at most, and leaves the group.
                leave = partial(consumer.stop, in_order=in_order)
                await end("the consumer", leave, self._settings.kafka.session_timeout_ms / 2e3 + CLOSE_S)
            if self._handover is not None:
                await self._handover.farewell(drained_by - time.monotonic())
            await reporter.announce("stopped")
            await reporter.withdraw()
        self.left = drained and not context.stop.is_set()
        return drained

    async def _drain(self, by: float) -> bool:
        """Answer what was read, in the time up to `by`. Returns False if records are left."""
        self._process.set_ready(False, "draining")
        await self._reporter.announce("draining")
        if self._handover is not None:
            self._handover.leaving(self.consumer.lanes)
        # A device that fails meanwhile answers nothing more; whatever else fails, what was read is answered.
        drained = await self.device.until(self.consumer.drain(self._settings.worker.drain_ms / 1e3))
        # A group that rebalances takes the lanes from a member that drains, and their records with them.
        drained = drained and await self.device.until(self.requests.all_answered(by))
        if not drained:
            log.warning(
                "drain time is over",
                records_left=max(self.consumer.undone, len(self.core.in_flight)),
                setting="worker.drain_ms",
            )
        return drained

    async def _sample_ages(self) -> None:
        """Ask where our lanes end: what is read beyond is younger than that (Intake)."""
        consumer, ends = self.consumer, self._connections.ends
        topics = self._connections.topics.pre_infer.name, self._connections.topics.ranking.name
        asked = (ends.ask(topic, consumer.lanes) for topic in topics)
        for topic, answer in zip(topics, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(answer, dict):
                self.requests.intake.sample_ages(topic, answer)
                owned = consumer.lanes & answer.keys()
                ahead = (answer[lane].offset - consumer.position(topic, lane) for lane in owned)
                self._reporter.lag[topic] = sum(max(0, each) for each in ahead)
            elif not isinstance(answer, BrokerError):  # of which readiness and the other clients tell
                raise answer

    @property
    def handover_address(self) -> str:
        """HOST:PORT of its hand-over, or empty."""
        return "" if self._handover is None else self._handover.address

    async def erase(self, erase: Erase) -> None:
        """Drop a user from this worker."""
        await self.requests.erase(erase)

    def fetching_bytes(self, lane: int) -> int:
        """HBM bytes of signals that were read and wait for their history: a status counts them as pinned."""
        context = schema_of(self.runtime.model).context_tokens
        return sum(self.runtime.cache.nbytes(context + tokens) for tokens in self.core.fetching_tokens(lane))

    # ---- what the consumer asks and tells (LaneUser, CrashingUser) ----

    @property
    def progressing(self) -> bool:
        """Whether the device moves, and what is read can leave."""
        return self._watch.progressing and not self.requests.full

    def on_records(self, records: list[Record]) -> None:
        """Take what came."""
        self.requests.on_records(records)

    def on_suspect(self, record: Record) -> None:
        """Take a record that may end this worker."""
        self.requests.on_records([record], suspect=True)

    def on_crashed(self, record: Record) -> None:
        """Take a record at which so many workers ended."""
        self.requests.on_crashed(record)

    def on_lanes(self, gained: frozenset[int], lost: frozenset[int]) -> None:
        """Handle a change of the lanes that this worker owns."""
        self._metrics.lane_changes.labels("gained").inc(len(gained))
        self._metrics.lane_changes.labels("lost").inc(len(lost))
        log.info("lanes changed", gained=sorted(gained), lost=sorted(lost))
        if any(lane >= self._connections.topics.lanes for lane in gained):  # they were just added
            self._background.start(self._counts.ask_now())
        self._fair_share.lanes_changed()
        if self._handover is not None:
            self._handover.lanes_changed(gained, lost)
        self.requests.on_lanes(gained, lost)
        if gained:  # triggers admit nothing in a lane until they know who has it
            self._background.start(self._reporter.publish_now())
