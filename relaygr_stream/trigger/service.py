"""The trigger process: reads request events, sends pre-infer signals, dead-letters unreadable events.

Connects the parts, runs a LaneTrigger for each assigned lane (lane.py, decision.py), and periodically asks the brokers
for the ends of the lanes' logs.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import partial
from typing import Any, Final, TypeVar

import structlog

from relaygr_stream.bus.ages import LogEnds
from relaygr_stream.bus.aiokafka_compat import end
from relaygr_stream.bus.dead_letter import DeadLetters, check_dead_letters_fit
from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.producer import NO_LEADER, Producer
from relaygr_stream.bus.refused import RefusalsCollector
from relaygr_stream.bus.renewed import RenewalsCollector
from relaygr_stream.bus.tail import STATUS_PAUSE_S, TopicTail
from relaygr_stream.bus.topic_check import PartitionCounts
from relaygr_stream.bus.topics import verify_topics
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.background import Background, periodically
from relaygr_stream.telemetry.otlp import tracing_of
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.telemetry.tracing import OFF, Tracing
from relaygr_stream.trigger.decision import Decide, Policy, decide
from relaygr_stream.trigger.delegation import FLUSH_S, Delegation
from relaygr_stream.trigger.lane import LaneTrigger
from relaygr_stream.trigger.load import OwnerLoads
from relaygr_stream.trigger.metrics import TriggerMetrics
from relaygr_stream.trigger.signals import SENDING_S, LaneContext, RefusalNotices
from relaygr_stream.trigger.statement import NeverAtRisk, Statements
from relaygr_stream.wire.fleet import STATUS_PERIODS, OwnerDirectory
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import TopicSet, load_topics
from relaygr_stream.wire.trigger_status import STATUS_S
from relaygr_stream.wire.worker_status import StatusReader

C = TypeVar("C", bound=AbstractAsyncContextManager[Any, None])

log = structlog.get_logger(__name__)

#: Events' ages are bounded by samples of the logs' ends. Four samples within the staleness bound keep the error of a
#: fresh event's age below that bound, whatever its sender's clock states.
SAMPLES_PER_STALE: Final = 4
RECONCILE_S: Final = 1.0
READINESS_S: Final = 0.5
#: Undecided events of all lanes, and their bytes, at which no more are read. What is stale by then is skipped, so that
#: a lane whose broker is away keeps the others from being read for a second at most.
BACKLOG_LIMIT: Final = 10_000
BACKLOG_BYTES: Final = 512 << 20
#: Stale events are looked for so often: a quarter of the default staleness, as ages are sampled.
SKIP_S: Final = 0.25
#: Off: the broker checks each batch on arrival, and TCP checks transfers; what remains is a disk that changes bits. A
#: changed event is dead-lettered, or at worst causes a pre-inference that no ranking uses: a ranking compares its own
#: sequence with the entry's, token by token. `benchmarks/trigger.py rate` measures the cost of reading.
CHECK_CRCS: Final = False
#: Timeout of the last status, which takes milliseconds: stopping must not wait for a broker that is away.
FINAL_STATUS_S: Final = 1.0
#: Ends of the clients behind the drain may take so long, each: with all brokers away they would take 20 s together.
CLOSE_S: Final = 1.0
#: Timeout on SIGTERM: events already read take milliseconds, signals in flight at most the request timeout; supervisors
#: kill after 10 s by default.
DRAIN_S: Final = 8.0


async def run_trigger(context: ProcessContext, decide: Decide = decide) -> None:
    """Run a trigger until `context.stop` is set, then drain.

    Raises ConfigError, TopicError, CoPartitionError or BrokerUnavailable at the start, BrokerError when reading fails
    for good.
    """
    settings = context.settings
    topics = load_topics(settings.kafka)
    check_dead_letters_fit(topics)
    await verify_topics(settings.kafka)
    member = f"trigger-{socket.gethostname()}-{os.getpid()}"
    takes = topics.pre_infer, topics.ranking, topics.dead_letter
    max_bytes = max(topic.max_message_bytes for topic in takes)
    metrics = TriggerMetrics(context.registry)
    context.registry.register(RenewalsCollector())
    context.registry.register(RefusalsCollector())
    reader = StatusReader.of(settings, topics)
    await reader.prepare()
    owners = OwnerDirectory(
        settings.trigger.max_status_age_ms,
        on_unreadable=metrics.statuses_unreadable.inc,
        on_unsigned=metrics.statuses_unsigned.inc,
        reader=reader,
    )
    background = Background()
    async with AsyncExitStack() as stack:
        tracing = await stack.enter_async_context(tracing_of(settings.telemetry, "trigger", context.registry))
        producer = await _enter(stack, Producer(settings.kafka, client_id=member, max_bytes=max_bytes))
        ends = await _enter(stack, LogEnds(settings.kafka, member))
        # From the end: a status written before this start may be of any age (wire/fleet.py).
        status, take = topics.worker_status, owners.on_records
        tail = TopicTail(settings.kafka, status.name, [0], "latest", take, pause_s=STATUS_PAUSE_S)
        await _enter(stack, tail)
        stack.push_async_callback(background.end)
        lanes = TriggerLanes(settings, topics, member, owners, producer, ends, metrics, background, tracing, decide)
        consumer, dead_letters = lanes.consumer, lanes.dead_letters
        counts = PartitionCounts(topics, producer, also=[topics.worker_status])
        stack.callback(dead_letters.close)
        context.conditions += [dead_letters.why_not_taken, counts.why_not_ready]
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
        # Wait until every live worker has stated itself, so that the first events find their lanes' owners.
        await asyncio.sleep(STATUS_PERIODS * settings.worker.status_interval_ms / 1000)
        await stack.enter_async_context(consumer)
        context.started = True

        async def tell_readiness() -> None:
            trouble = consumer.trouble or producer.trouble or tail.trouble
            silence = f"no Kafka broker answers at {settings.kafka.bootstrap}"
            context.set_ready(consumer.healthy and not trouble, trouble or silence)

        background.watch(consumer.failed, tail.failed)
        background.start(periodically(READINESS_S, tell_readiness, "tell whether it is ready"))
        background.start(counts.run())
        background.start(periodically(STATUS_S, statements.publish, "publish the status"))
        background.start(periodically(STATUS_S, NeverAtRisk(settings, owners).check, "check the workers' statuses"))
        log.info("trigger ready", member=member, lanes=topics.lanes)
        await background.until(context.stop.wait())
        if not await consumer.drain(DRAIN_S):
            log.warning("trigger stopped with events undecided", undone=consumer.undone)
        await lanes.tell_owners()
        await background.end()  # first: its last status would follow the tombstone
        with suppress(TimeoutError):
            async with asyncio.timeout(FINAL_STATUS_S):
                await statements.publish_stopped()


async def _enter(stack: AsyncExitStack, client: C) -> C:
    """Begin it now, and end it with the stack, within CLOSE_S."""
    await client.__aenter__()
    stack.push_async_callback(end, type(client).__name__, partial(client.__aexit__, None, None, None), CLOSE_S)
    return client


class TriggerLanes:
    """The lanes assigned to `consumer`, each with a running LaneTrigger. background: runs their tasks."""

    def __init__(
        self,
        settings: Settings,
        topics: TopicSet,
        member: str,
        owners: OwnerDirectory,
        producer: Producer,
        ends: LogEnds,
        metrics: TriggerMetrics,
        background: Background,
        tracing: Tracing = OFF,
        decide: Decide = decide,
    ) -> None:
        self._background = background
        self._lanes: dict[int, LaneTrigger] = {}
        self._running: dict[LaneTrigger, asyncio.Task[Any]] = {}
        self.consumer = LaneConsumer(
            settings.kafka,
            topics=[topics.retrieval.name],
            group=settings.kafka.prefix + settings.trigger.group,
            member=member,
            on_records=self._on_records,
            on_lanes=self._on_lanes,
            check_crcs=CHECK_CRCS,
            progressing=self._progressing,
        )
        self.dead_letters = DeadLetters(
            producer,
            topics.dead_letter,
            self.consumer.done,
            metrics.dead_letters_waiting,
            background,
            keep_values=settings.kafka.dead_letter_values,
        )
        policy = Policy.of(settings)
        loads = OwnerLoads(policy.averaging)

        def led(lane: int) -> bool:
            return producer.broker_of(topics.ranking.name, lane) != NO_LEADER

        self._shared = shared = LaneContext(
            policy,
            topics,
            owners,
            producer,
            self.dead_letters,
            ends,
            metrics,
            self.consumer.done,
            RefusalNotices(topics.pre_infer.name, producer, background),
            loads=loads,
            decide=decide,
            delegation=Delegation(owners, loads, topics.lanes, led=led) if policy.delegate else None,
            tracing=tracing,
            log_decisions=settings.telemetry.log_level == "debug",
        )
        sample_s = shared.policy.stale_ms / 1000 / SAMPLES_PER_STALE
        background.start(periodically(sample_s, self._sample_ages, "ask for the ends of the event logs"))
        background.start(periodically(SKIP_S, self._skip_stale, "skip events that have become stale"))
        background.start(periodically(RECONCILE_S, self._reconcile, "ask for the ends of the signal logs"))
        background.start(periodically(FLUSH_S, shared.refused.flush, "tell owners what was refused"))

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

    async def tell_owners(self) -> None:
        """Hand what owners are to be told to the producer now, as far as brokers take it soon."""
        await self._shared.refused.flush(SENDING_S)

    def _on_lanes(self, gained: frozenset[int], lost: frozenset[int]) -> None:
        """Handle a new assignment. A lost lane's next trigger decides on its undecided events."""
        for number in lost:
            self._running.pop(self._lanes.pop(number)).cancel()
            self._shared.loads.remove(number, time.monotonic())
        for number in gained:
            self._lanes[number] = lane = LaneTrigger(number, self._shared)
            self._running[lane] = self._background.start(lane.run())
        self._shared.metrics.lanes.set(len(self._lanes))

    def _on_records(self, records: list[Record]) -> None:
        """Enqueue new request events."""
        for record in records:
            self._lanes[record.lane].put(record)

    async def _skip_stale(self) -> None:
        now_s = time.monotonic()
        for lane in self._lanes.values():
            lane.skip_stale(now_s)

    def _progressing(self) -> bool:
        nbytes = sum(lane.backlog_bytes for lane in self._lanes.values())
        return self.backlog < BACKLOG_LIMIT and nbytes < BACKLOG_BYTES and not self.dead_letters.full

    async def _sample_ages(self) -> None:
        ends = await self._shared.ends.ask(self._shared.topics.retrieval.name, list(self._lanes))
        unread, topic = 0, self._shared.topics.retrieval.name
        for number in ends.keys() & self._lanes.keys():
            self._lanes[number].sample_age(ends[number])
            unread += max(0, ends[number].offset - self.consumer.position(topic, number))
        self._shared.metrics.lag.labels("unread").set(unread)
        self._shared.metrics.lag.labels("uncommitted").set(self.consumer.uncommitted)

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
