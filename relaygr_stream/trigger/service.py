"""The trigger process: request events in, pre-infer signals out, bad events to the dead letters.

Connects the parts, gives each lane of the consumer group its LaneTrigger, and asks the brokers periodically where the
lanes end. Knows nothing of how events are decided on (lane.py, decision.py).
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

import structlog

from relaygr_stream.bus.ages import LogEnds
from relaygr_stream.bus.counts import PartitionCounts
from relaygr_stream.bus.dead_letter import DeadLetters, check_dead_letters_fit
from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.renewed import RenewalsCollector
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import load_topics, verify_topics
from relaygr_stream.errors import BrokerError
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.trigger.decision import Policy
from relaygr_stream.trigger.lane import LaneTrigger
from relaygr_stream.trigger.metrics import TriggerMetrics
from relaygr_stream.trigger.refused import FLUSH_S, Refused
from relaygr_stream.trigger.signals import Surroundings
from relaygr_stream.trigger.statement import NeverAtRisk, Statements
from relaygr_stream.wire.fleet import OwnerDirectory
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.trigger_status import STATUS_S
from relaygr_stream.wire.worker_status import StatusReader

log = structlog.get_logger(__name__)
limited = LogLimiter().limited

#: Ages are bounded from samples of the logs' ends; four samples within the staleness bound keep the error of a fresh
#: event's age below it, whatever its sender's clock says.
SAMPLES_PER_STALE: Final = 4
RECONCILE_S: Final = 1.0
READINESS_S: Final = 0.5
STATUS_PERIODS: Final = 2
#: Events waiting, over all lanes, at which this process counts as stuck and gives its lanes up (after
#: kafka.max_poll_ms). An event of 4,096 behaviours has 53 KB, so this is half a gigabyte at worst.
BACKLOG_LIMIT: Final = 10_000
#: The broker checked each batch as it took it, TCP checks what travels; what is left is a disk that changes bits. An
#: event changed by one is a dead letter, or at worst a pre-inference of a prefix that no ranking asks for: a ranking's
#: own sequence is compared with an entry's, token by token. `benchmarks/trigger.py rate` has what reading costs.
CHECK_CRCS: Final = False
#: The last status takes milliseconds; without a broker it has no reader, and stopping must not wait for one.
LAST_WORD_S: Final = 1.0
#: On SIGTERM: events already read take milliseconds, signals in flight at most the request timeout; supervisors kill
#: after 10 s by default.
DRAIN_S: Final = 8.0


async def run_trigger(context: ProcessContext) -> None:
    """Run a trigger until `context.stop` is set, then drain.

    Raises ConfigError, TopicError, CoPartitionError or BrokerUnavailable at the start, BrokerError when reading fails
    for good.
    """
    settings = context.settings
    topics = load_topics(settings.kafka)
    check_dead_letters_fit(topics)
    await verify_topics(settings.kafka)
    member = f"trigger-{socket.gethostname()}-{os.getpid()}"
    max_bytes = max(topics.pre_infer.max_message_bytes, topics.dead_letter.max_message_bytes)
    metrics = TriggerMetrics(context.registry)
    context.registry.register(RenewalsCollector())
    reader = StatusReader.of(settings, topics)
    await reader.prepare()
    owners = OwnerDirectory(
        settings.trigger.silence_ms,
        on_unreadable=metrics.statuses_unreadable.inc,
        on_unsigned=metrics.statuses_unsigned.inc,
        reader=reader,
    )
    async with AsyncExitStack() as stack:
        producer = await stack.enter_async_context(Producer(settings.kafka, client_id=member, max_bytes=max_bytes))
        ends = await stack.enter_async_context(LogEnds(settings.kafka, member))
        # From the end: a status that was there before us may be of any age (owners.py).
        status = topics.worker_status
        tail = TopicTail(settings.kafka, status.name, range(status.partitions), "latest", owners.on_records)
        await stack.enter_async_context(tail)

        def done(record: Record) -> None:
            consumer.done(record)  # which needs the lanes first

        waiting, keep_values = metrics.dead_letters_waiting, settings.kafka.dead_letter_values
        letters = DeadLetters(producer, topics.dead_letter, done, waiting, keep_values=keep_values)
        stack.callback(letters.close)
        context.conditions.append(letters.why_not_taken)
        verbose = settings.telemetry.log_level == "debug"
        lanes = TriggerLanes(
            Surroundings(
                Policy.of(settings),
                topics,
                owners,
                producer,
                letters,
                ends,
                metrics,
                done,
                Refused(topics.pre_infer.name, producer),
                log_decisions=verbose,
            )
        )
        stack.push_async_callback(lanes.close)
        consumer = LaneConsumer(
            settings.kafka,
            topics=[topics.retrieval.name],
            group=settings.kafka.prefix + settings.trigger.group,
            member=member,
            on_records=lanes.on_records,
            on_lanes=lanes.on_lanes,
            check_crcs=CHECK_CRCS,
            progressing=lambda: lanes.backlog < BACKLOG_LIMIT and not letters.full,
        )
        statements = Statements(
            settings,
            status.name,
            member,
            producer,
            reader,
            lanes=lambda: lanes.numbers,
            decisions=lambda: metrics.decisions,
            backlog=lambda: lanes.backlog,
            on_hold=lambda: lanes.on_hold,
        )
        # By then every worker alive has stated itself, so that the first events find their lanes' owners.
        await asyncio.sleep(STATUS_PERIODS * settings.worker.status_ms / 1000)
        await stack.enter_async_context(consumer)
        context.started = True

        async def tell_readiness() -> None:
            trouble = consumer.trouble or producer.trouble or tail.trouble
            silence = f"no Kafka broker answers at {settings.kafka.bootstrap}"
            context.set_ready(consumer.healthy and not trouble, trouble or silence)

        lanes.every(READINESS_S, tell_readiness)
        counts = PartitionCounts(topics, producer)
        context.conditions.append(counts.why_not_ready)
        lanes.run(counts.run())
        lanes.every(STATUS_S, statements.publish)
        lanes.every(STATUS_S, NeverAtRisk(settings, owners).tell)
        log.info("trigger ready", member=member, lanes=topics.lanes)
        await _first_of(context.stop, consumer.failed, tail.failed, lanes.failed, letters.failed)
        if not await consumer.drain(DRAIN_S):
            log.warning("trigger stopped with events undecided", undone=consumer.undone)
        await lanes.close()  # whose last status would come behind the tombstone
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                await statements.leave()


class TriggerLanes:
    """The lanes that are ours now, each with its running LaneTrigger."""

    def __init__(self, shared: Surroundings) -> None:
        self._shared = shared
        self._lanes: dict[int, LaneTrigger] = {}
        self._running: dict[LaneTrigger, asyncio.Task[None]] = {}
        #: Never completes unless something here broke; then it raises what.
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())  # may go unwatched
        sample_s = shared.policy.stale_ms / 1000 / SAMPLES_PER_STALE
        self._background: list[asyncio.Task[None]] = []
        self.every(sample_s, self._sample_ages)
        self.every(RECONCILE_S, self._reconcile)
        self.every(FLUSH_S, shared.refused.flush)

    @property
    def backlog(self) -> int:
        """Events read and not yet decided."""
        return sum(lane.backlog for lane in self._lanes.values())

    @property
    def numbers(self) -> Collection[int]:
        """The lanes."""
        return self._lanes.keys()

    @property
    def on_hold(self) -> int:
        """Lanes without admissions until their owner has read signals of unknown size."""
        return sum(lane.state is not None and lane.state.ledger.on_hold for lane in self._lanes.values())

    def on_lanes(self, gained: frozenset[int], lost: frozenset[int]) -> None:
        """Lanes came or went; events of a lost lane that were not decided are its next trigger's."""
        for number in lost:
            self._running.pop(self._lanes.pop(number)).cancel()
            self._shared.loads.lost(number, time.monotonic())
        for number in gained:
            self._lanes[number] = lane = LaneTrigger(number, self._shared)
            self._running[lane] = self._task(lane.run())
        self._shared.metrics.lanes.set(len(self._lanes))

    def on_records(self, records: list[Record]) -> None:
        """New request events."""
        for record in records:
            self._lanes[record.lane].put(record)

    async def close(self) -> None:
        """Stop everything; what is not done is read again by the lane's next trigger."""
        tasks = [*self._background, *self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample_ages(self) -> None:
        ends = await self._shared.ends.ask(self._shared.topics.retrieval.name, list(self._lanes))
        for number in ends.keys() & self._lanes.keys():
            self._lanes[number].sample_age(ends[number])

    async def _reconcile(self) -> None:
        ends = await self._shared.ends.ask(self._shared.topics.pre_infer.name, list(self._lanes))
        for number in ends.keys() & self._lanes.keys():
            self._lanes[number].reconcile(ends[number])
        ledgers = [lane.state.ledger for lane in self._lanes.values() if lane.state is not None]
        metrics = self._shared.metrics
        metrics.outstanding_bytes.set(sum(ledger.outstanding for ledger in ledgers))
        metrics.budget_bytes.set(sum(ledger.budget for ledger in ledgers))
        metrics.lanes_on_hold.set(sum(ledger.on_hold for ledger in ledgers))
        metrics.backlog.set(self.backlog)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do that until `close`."""
        self._background.append(self._task(work))

    def every(self, seconds: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do `work` now and again after so many seconds, until `close`."""
        self.run(self._repeat(seconds, work))

    async def _repeat(self, seconds: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await work()
            except BrokerError as error:
                limited(log.warning, "ends")("brokers do not say where the lanes end", error=str(error))
            await asyncio.sleep(seconds)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose unexpected end ends the process, visibly."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            log.error("trigger failed", error=repr(error))
            self.failed.set_exception(error)


async def _first_of(stop: asyncio.Event, *failures: asyncio.Future[None]) -> None:
    """Return when `stop` is set; raise what a failure says."""
    stopped: asyncio.Future[bool] = asyncio.ensure_future(stop.wait())
    ends: list[asyncio.Future[Any]] = [stopped, *failures]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for failure in failures:
            if failure.done():
                failure.result()
    finally:
        stopped.cancel()
