"""Carries proposals out: publishes which worker serves which scenario, while this planner leads.

Of the planners of a fleet one leads (bus/leadership.py). One that takes over first reads what was published, and
publishes it again with an epoch that the last one cannot reach. So workers ignore what the last one still writes;
compaction would keep it, as the newest record, so it is followed by ours once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import msgspec
import structlog

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.assignments import write_assignments
from relaygr_stream.bus.leadership import Leadership
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import topic_exists
from relaygr_stream.errors import BrokerError, DecodeError, TopicError
from relaygr_stream.ops.planner.metrics import PlannerMetrics
from relaygr_stream.ops.planner.moves import MovesMemory, PendingMove, begun, followed
from relaygr_stream.ops.planner.plan import Damping
from relaygr_stream.ops.planner.seen import Observation
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.assignments import Assignments, newer_assignments
from relaygr_stream.wire.planner_status import Move
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.routes import routes_topic
from relaygr_stream.wire.topic_files import TopicSet, load_topics
from relaygr_stream.wire.worker_status import StatusReader

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: The consumer group whose only lane makes the leader, behind kafka.prefix.
GROUP: Final = "planner"


class Acting:
    """Acts on the plans of one planner. reader: verifies assignments, and has the secret that signs them."""

    def __init__(
        self,
        settings: Settings,
        name: str,
        leadership: Leadership,
        reader: StatusReader,
        producer: Producer,
        metrics: PlannerMetrics,
        damping: Damping,
    ) -> None:
        self._scenarios, self._name, self._damping = settings.scenarios, name, damping
        self._leadership, self._reader, self._producer, self._metrics = leadership, reader, producer, metrics
        self._topics: TopicSet = load_topics(settings.kafka)
        self._within_s = settings.kafka.request_timeout_ms / 1e3
        self._moves = MovesMemory()
        self._known: Assignments | None = None  # what it says of no scenario stays
        self._published = 0  # the epoch that the log has from us; 0: none, or another record is behind it
        self._said = ""
        self.leads = False
        self.tail: Final = TopicTail(settings.kafka, routes_topic(self._topics).name, [0], "earliest", self._on_records)

    @property
    def trouble(self) -> str | None:
        """Why nobody may lead; None if all is well."""
        return self._leadership.trouble

    @property
    def says(self) -> str:
        """The move under way, or how the last one ended; "" without one."""
        return self._said

    async def follow(self, seen: Observation) -> Observation:
        """See what became of the move under way. Returns the observation with `moving` as the plan is to see it."""
        self._leadership.check()
        if not self._leadership.leads:
            self.leads = False
        elif not self.leads:
            await self._take_over()
        if not self.leads:
            return msgspec.structs.replace(seen, moving=True)
        before = self._moves.pending
        self._moves, ended = followed(self._moves, seen, self._damping)
        if ended is not None:
            self._metrics.moves.labels(ended.result).inc()
            self._said = f"{_told(ended.move)} is verified"
            if ended.result == "given_up":
                self._said = f"{_told(ended.move)} was given up: {ended.reason}"
            log.info("a move has ended", worker=ended.move.worker, result=ended.result, reason=ended.reason)
        elif self._moves.pending not in (None, before):
            self._began(self._moves.pending, "it does not serve what it is assigned")
        return msgspec.structs.replace(seen, moving=self._moves.busy(seen.at_s, self._damping))

    async def act(self, seen: Observation, move: Move | None) -> None:
        """Begin the move that the plan proposes, and publish what has changed. A broker that is away is asked again
        after the next observation."""
        if not self.leads:
            return
        if move is not None:
            self._moves = begun(self._moves, seen, move, self._scenarios)
            self._began(self._moves.pending, move.reason)
        if self._published == self._moves.epoch:
            return
        epoch, workers = self._moves.epoch, dict(self._moves.assigned)
        assignments = Assignments(epoch=epoch, sent_ms=now_ms(), planner=self._name, workers=workers)
        if (known := self._known) is not None:
            assignments = msgspec.structs.replace(assignments, home=known.home, checkpoints=known.checkpoints)
        self._published = epoch
        try:
            await write_assignments(self._producer, self._topics, self._reader, assignments)
        except BrokerError as error:
            self._published = 0
            limited(log.warning, "assignments")("assignments are not published", error=str(error))

    def _on_records(self, records: list[Record]) -> None:
        """Take what planners published."""
        for record in records:
            try:
                found = newer_assignments(record, self._reader, None)
            except DecodeError as error:
                limited(log.warning, "refused")("a record of assignments is ignored", detail=str(error))
                continue
            if found is None or found.epoch == self._moves.epoch:
                continue
            if found.epoch < self._moves.epoch:
                self._published = 0
                continue
            if self.leads:
                log.warning("another planner has acted as the leader", planner=found.planner, epoch=found.epoch)
                self.leads = False
                self._leadership.doubt()
            self._known = found
            self._moves = self._moves.taken(found.epoch, found.workers)

    async def _take_over(self) -> None:
        try:
            async with asyncio.timeout(self._within_s):
                await self.tail.catch_up()
        except (BrokerError, TimeoutError) as error:
            limited(log.warning, "take over")("cannot lead now", error=str(error) or "no broker answers")
            return
        self.leads = True
        self._moves = self._moves.taken_over(now_ms())
        log.info("leads", epoch=self._moves.epoch, assigned=len(self._moves.assigned))

    def _began(self, pending: PendingMove | None, reason: str) -> None:
        if pending is not None:
            self._said = f"{_told(pending)} is under way: {reason}"
            log.info("moves", worker=pending.worker, source=pending.source, target=pending.target, reason=reason)


def _told(move: PendingMove) -> str:
    return f"the move of {move.worker} from {move.source} to {move.target}"


@asynccontextmanager
async def acting(
    settings: Settings,
    name: str,
    reader: StatusReader,
    producer: Producer,
    metrics: PlannerMetrics,
    damping: Damping,
) -> AsyncIterator[Acting]:
    """Take part in who leads. Raises TopicError where there is no topic of routes, BrokerError."""
    kafka = settings.kafka
    topic = routes_topic(load_topics(kafka))
    if not await topic_exists(kafka, topic):
        raise TopicError(f"no topic {topic.name}: `relaygr topics apply --config FILE` makes it, with the fleet's file")
    leadership = Leadership(kafka, topic=topic.name, group=kafka.prefix + GROUP, member=name)
    made = Acting(settings, name, leadership, reader, producer, metrics, damping)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(made.tail)
        await stack.enter_async_context(leadership)
        yield made
