"""The trigger process: reads request events, sends pre-infer signals, dead-letters unreadable events.

Connects the parts, runs a LaneTrigger for each assigned lane (lane.py) on one core (core.py), and periodically asks the
brokers for the ends of the lanes' logs.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import structlog

from relaygr_stream.bus.ages import AgeBounds, LogEnds, SenderLag
from relaygr_stream.bus.aiokafka_compat import end
from relaygr_stream.bus.broker_errors import no_broker
from relaygr_stream.bus.dead_letter import DeadLetters, check_dead_letters_fit
from relaygr_stream.bus.erasures import Erasures
from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.producer import Producer, TopicLeaders
from relaygr_stream.bus.renewed import RenewalsCollector
from relaygr_stream.bus.tail import STATUS_PAUSE_S, TopicTail
from relaygr_stream.bus.topic_check import PartitionCounts
from relaygr_stream.bus.topics import verified_topics
from relaygr_stream.fleet import STATUS_PERIODS, OwnerDirectory
from relaygr_stream.groups.live import live_where_assigned
from relaygr_stream.groups.moves import GroupMoves
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.background import Background, periodically
from relaygr_stream.telemetry.otlp import tracing_of
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.trigger.core import TriggerCore
from relaygr_stream.trigger.decision import Decide, Policy, decide
from relaygr_stream.trigger.delegation import FLUSH_S, Delegation
from relaygr_stream.trigger.intake import EventIntake
from relaygr_stream.trigger.lane import LaneTrigger
from relaygr_stream.trigger.metrics import TriggerMetrics, TriggerTelemetry
from relaygr_stream.trigger.outbox import SENDING_S, Outbox, RefusalNotices
from relaygr_stream.trigger.sent import SentBooks
from relaygr_stream.trigger.statement import Stated, TriggerStatements
from relaygr_stream.wire.erase import Erase, filter_named_users
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import TopicSet, load_topics
from relaygr_stream.wire.trigger_status import STATUS_S
from relaygr_stream.wire.worker_status import StatusReader

C = TypeVar("C", bound=AbstractAsyncContextManager[Any, None])

log = structlog.get_logger(__name__)

#: Events' ages are bounded by samples of the logs' ends. Four samples within the staleness bound keep the error of a
#: fresh event's age below that bound, whatever its sender's clock states.
SAMPLES_PER_STALE: Final = 4
GAUGES_S: Final = 1.0
READINESS_S: Final = 0.5
#: Undecided events of all lanes, and their bytes, at which no more are read. What is stale by then is skipped, so that
#: a lane whose broker is away keeps the others from being read for a second at most.
BACKLOG_LIMIT: Final = 10_000
BACKLOG_BYTES: Final = 512 << 20
#: Stale events are looked for so often: a quarter of the default staleness, as ages are sampled.
SKIP_S: Final = 0.25
#: Off: the broker checks each batch on arrival, and TCP checks transfers; what remains is a disk that changes bits. A
#: changed event is dead-lettered, or at worst causes a pre-inference that no ranking uses: a ranking compares its own
#: sequence with the entry's, token by token. `relaygr_lab/benchmarks/trigger.py rate` measures the cost of reading.
CHECK_CRCS: Final = False
#: Timeout of the last status, which takes milliseconds: stopping must not wait for a broker that is away.
FINAL_STATUS_S: Final = 1.0
#: Ends of the clients behind the drain may take so long, each: with all brokers away they would take 20 s together.
CLOSE_S: Final = 1.0
#: Timeout on SIGTERM: events already read take milliseconds, signals in flight at most the request timeout; supervisors
#: kill after 10 s by default.
DRAIN_S: Final = 8.0


async def run_trigger(context: ProcessContext, decide: Decide = decide, *, follows: bool = True) -> None:
    """Run a trigger until `context.stop` is set, then drain. follows: workers that were moved in place.

    Raises ConfigError, TopicError, CoPartitionError or BrokerUnavailable at the start, BrokerError when reading fails
    for good.
    """
    own = context.settings
    moves = GroupMoves(own=own.scenario)
    live = partial(_live, context, decide, moves)
    await (live_where_assigned(context, "trigger", moves, live) if follows else live())


async def _live(context: ProcessContext, decide: Decide, moves: GroupMoves) -> bool:
    """One trigger, from its start to its end."""
    settings = context.settings
    check_dead_letters_fit(load_topics(settings.kafka))
    topics = await verified_topics(settings.kafka)
    member = f"trigger-{socket.gethostname()}-{os.getpid()}"
    max_bytes = max(each.max_message_bytes for each in (topics.pre_infer, topics.ranking, topics.dead_letter))
    metrics = TriggerMetrics(context.registry)
    context.registry.register(RenewalsCollector())
    reader = StatusReader.from_settings(settings, topics)
    await reader.prepare()
    owners = OwnerDirectory(settings.trigger.max_status_age_ms, metrics, reader=reader)
    background = Background()
    async with AsyncExitStack() as stack:
        tracing = await stack.enter_async_context(
            tracing_of(settings.telemetry, "trigger", context.registry, settings.scenario)
        )
        producer = await _enter(stack, Producer(settings.kafka, client_id=member, max_bytes=max_bytes))
        ends = await _enter(stack, LogEnds(settings.kafka, member))
        stack.push_async_callback(background.end)
        telemetry = TriggerTelemetry(metrics, tracing, log_decisions=settings.telemetry.log_level == "debug")
        core = trigger_core(settings, topics, owners, producer, decide)
        lanes = TriggerLanes(settings, member, core, Connections(topics, producer, ends), telemetry, background)
        consumer = lanes.consumer
        counts = PartitionCounts(topics, producer, also=[topics.worker_status])
        stack.callback(lanes.dead_letters.close)
        context.conditions += [lanes.dead_letters.why_not_taken, counts.why_not_ready]
        status = topics.worker_status.name
        statements = TriggerStatements(settings, status, member, producer, reader, lanes)
        erasures = Erasures(reader, background, statements, metrics.statuses_unsigned)
        # From the end: a status written before this start may be of any age (fleet.py).
        tail = await _enter(
            stack,
            TopicTail(settings.kafka, status, [0], "latest", partial(_take, owners, erasures), pause_s=STATUS_PAUSE_S),
        )
        # Wait until every live worker has stated itself, so that the first events find their lanes' owners.
        await asyncio.sleep(STATUS_PERIODS * settings.worker.status_interval_ms / 1000)
        await stack.enter_async_context(consumer)
        context.started = True
        moves.arrive()

        async def tell_readiness() -> None:
            trouble = consumer.trouble or producer.trouble or tail.trouble
            context.set_ready(consumer.healthy and not trouble, trouble or no_broker(settings.kafka.bootstrap))

        background.watch(consumer.failed, tail.failed)
        background.start(periodically(READINESS_S, tell_readiness, "tell whether it is ready"))
        background.start(counts.run())
        background.start(periodically(STATUS_S, statements.publish, "publish the status"))
        log.info("trigger ready", member=member, lanes=topics.lanes)
        await background.until(moves.until_away(context.stop))
        if not await consumer.drain(DRAIN_S):
            log.warning("trigger stopped with events undecided", undone=consumer.undone)
        await lanes.tell_owners()
        await background.end()  # first: its last status would follow the tombstone
        with suppress(TimeoutError):
            async with asyncio.timeout(FINAL_STATUS_S):
                await statements.publish_stopped()
    return True


def _take(owners: OwnerDirectory, erasures: Erasures, records: list[Record]) -> None:
    owners.on_records(records)
    erasures.on_records(records)


async def _enter(stack: AsyncExitStack, client: C) -> C:
    """Begin it now, and end it with the stack, within CLOSE_S."""
    await client.__aenter__()
    stack.push_async_callback(end, type(client).__name__, partial(client.__aexit__, None, None, None), CLOSE_S)
    return client


class Connections(NamedTuple):
    """What a trigger's lanes send by, and ask for the ends of logs."""

    topics: TopicSet
    producer: Producer
    ends: LogEnds


def trigger_core(
    settings: Settings, topics: TopicSet, owners: OwnerDirectory, producer: Producer, decide: Decide
) -> TriggerCore:
    """The core of a trigger process. producer: knows which lanes have a leader."""
    policy, leaders = Policy.from_settings(settings), TopicLeaders(producer, topics.ranking.name)
    delegation = Delegation(owners, SentBooks(), topics.lanes, leaders=leaders)
    return TriggerCore(policy, owners, decide, delegation)


class TriggerLanes:
    """The lanes assigned to `consumer`, each with a running LaneTrigger. background: runs their tasks."""

    def __init__(
        self,
        settings: Settings,
        member: str,
        core: TriggerCore,
        connections: Connections,
        telemetry: TriggerTelemetry,
        background: Background,
    ) -> None:
        self._core = core
        self._topics, producer, self._ends = connections
        self._telemetry = telemetry
        self._background = background
        self._lanes: dict[int, LaneTrigger] = {}
        self._running: dict[LaneTrigger, asyncio.Task[Any]] = {}
        # A trigger believes stated ages until it has measured the clocks: events from before its start are old, and a
        # fresh event that a wrong clock makes stale only loses a pre-inference. A worker does not: it would lose an
        # answer.
        self._lag = SenderLag(0.0)
        self.consumer = LaneConsumer(
            settings.kafka,
            topics=[self._topics.retrieval.name],
            group=settings.kafka.prefix + settings.trigger.group,
            member=member,
            user=self,
            check_crcs=CHECK_CRCS,
        )
        metrics = telemetry.metrics
        self.dead_letters = DeadLetters(
            producer,
            self._topics.dead_letter,
            self.consumer,
            metrics.dead_letters_waiting,
            background,
            keep_values=settings.kafka.dead_letter_values,
            scenario=settings.scenario,
            sharing=settings.sharing,
        )
        self._intake = EventIntake(self._topics, self.dead_letters, metrics, self.consumer)
        self._notices = RefusalNotices(self._topics.pre_infer.name, producer, background)
        self._outbox = Outbox(core, self._topics, producer, self._notices, metrics, self.consumer)
        sample_s = core.policy.stale_ms / 1000 / SAMPLES_PER_STALE
        background.start(periodically(sample_s, self._sample_ages, "ask for the ends of the event logs"))
        background.start(periodically(SKIP_S, self._skip_stale, "skip events that have become stale"))
        background.start(periodically(GAUGES_S, self._set_gauges, "tell what is known"))
        background.start(periodically(FLUSH_S, self._notices.flush, "tell owners what was refused"))

    def stated(self) -> Stated:
        """What this trigger's status says of its lanes now."""
        return Stated(tuple(sorted(self._lanes)), self._telemetry.metrics.decisions, self._backlog)

    async def erase(self, erase: Erase) -> None:
        """Drop a user: waiting events, recent requests, where the prefix KV are. Signals that are sent stay so."""
        for lane in list(self._lanes.values()):
            await lane.erase(erase)
        self._core.forget(await filter_named_users(self._core.users(), erase))
        log.info("a user was erased", erase=erase.id)

    async def tell_owners(self) -> None:
        """Hand what owners are to be told to the producer now, as far as brokers take it soon."""
        await self._notices.flush(SENDING_S)

    @property
    def _backlog(self) -> int:
        """Events read and not yet decided."""
        return sum(lane.backlog for lane in self._lanes.values())

    def on_lanes(self, gained: frozenset[int], lost: frozenset[int]) -> None:
        """Handle a new assignment. A lost lane's next trigger decides on its undecided events."""
        for number in lost:
            self._running.pop(self._lanes.pop(number)).cancel()
            self._core.leave_lane(number)
        for number in gained:
            ages = AgeBounds(self._lag)
            lane = LaneTrigger(number, self._core, self._intake, self._outbox, ages, self._telemetry)
            self._lanes[number] = lane
            self._core.take_lane(number)
            self._running[lane] = self._background.start(lane.run())
        self._telemetry.metrics.lanes.set(len(self._lanes))

    def on_records(self, records: list[Record]) -> None:
        """Enqueue new request events."""
        for record in records:
            self._lanes[record.lane].put(record)

    async def _skip_stale(self) -> None:
        now_s = time.monotonic()
        for lane in self._lanes.values():
            lane.skip_stale(now_s)

    @property
    def progressing(self) -> bool:
        """Whether there is room for more events and dead letters."""
        nbytes = sum(lane.backlog_bytes for lane in self._lanes.values())
        return self._backlog < BACKLOG_LIMIT and nbytes < BACKLOG_BYTES and not self.dead_letters.full

    async def _sample_ages(self) -> None:
        unread, topic = 0, self._topics.retrieval.name
        ends = await self._ends.ask(topic, list(self._lanes))
        for number in ends.keys() & self._lanes.keys():
            self._lanes[number].sample_age(ends[number])
            unread += max(0, ends[number].offset - self.consumer.position(topic, number))
        lag = self._telemetry.metrics.lag
        lag.labels("unread").set(unread)
        lag.labels("uncommitted").set(self.consumer.uncommitted)

    async def _set_gauges(self) -> None:
        metrics = self._telemetry.metrics
        metrics.lanes_with_owner.set(self._core.owned)
        metrics.backlog.set(self._backlog)
        if self._core.delegation is not None:
            self._core.delegation.lanes = self._topics.lanes
