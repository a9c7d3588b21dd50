"""The parts of an open client: the tail of its answers, its producer, the workers' statuses, the lane count.

A Connection exists only while all of these do. Requests enter as encoded messages through `announce` and `rank`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from copy import copy
from typing import Any, Final

import structlog

from relaygr_stream.bus.aiokafka_compat import end
from relaygr_stream.bus.producer import Outgoing, Producer
from relaygr_stream.bus.tail import STATUS_PAUSE_S, TopicTail
from relaygr_stream.bus.topic_check import PartitionCounts, TopicRow, topics_with
from relaygr_stream.bus.topics import verify_topics
from relaygr_stream.client.answers import Answers, ReplyRoute, reply_partitions
from relaygr_stream.client.exchange import Copies, Exchange, Hedges, between_copies_s
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.client.sender import SILENT_S, Announcements, Sender, TopicWaits
from relaygr_stream.errors import BrokerError, BrokerUnavailable, ConfigError, DeadlineExceeded, RelayError, TopicError
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.background import Background, periodically
from relaygr_stream.telemetry.limiter import LogLimiter, flush_limiters, library_lines
from relaygr_stream.wire.messages import RankingRequest, ScoreReply
from relaygr_stream.wire.records import HEADER_KIND, KIND_CANCEL, Record
from relaygr_stream.wire.topic_files import TopicSet, lane_of

log = structlog.get_logger(__name__)
limited = LogLimiter().limited

#: How often lines that a limit held back are counted in the log; a process of the relay does so itself.
FLUSH_LOGS_S: Final = 1.0

Beside = Callable[[Producer, Background], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def connected(
    settings: Settings,
    topics: TopicSet,
    client_id: str,
    answers: Answers,
    owners: OwnerDirectory,
    metrics: ClientMetrics,
    background: Background,
    beside: Beside | None = None,
) -> AsyncIterator[Connection]:
    """Connect to the brokers; at the end, send what is buffered and disconnect.

    background: fails when it can no longer serve, as when answers cannot be read. beside: made with the producer
    and the background, and entered before the connection is used. Raises BrokerUnavailable,
    TopicError, CoPartitionError, ConfigError.
    """
    kafka, client = settings.kafka, settings.client
    library_lines.attach("aiokafka")  # in an outage it writes 150 lines a second
    async with AsyncExitStack() as stack:
        rows = await verify_topics(kafka, optional=(topics.worker_status.name,))
        if not kafka.partitions:  # routes may say another number
            topics.follow(topics_with(kafka, rows).lanes)
        max_bytes = max(topics.retrieval.max_message_bytes, topics.ranking.max_message_bytes)
        producer = Producer(kafka, client_id=client_id, acks=1, max_bytes=max_bytes)
        sender, scores = Sender(producer, kafka.bootstrap), topics.scores.name
        route = ReplyRoute(
            scores,
            _reply_partitions(rows, topics, client.reply_partition),
            TopicWaits(sender, scores),
        )

        def on_replies(records: list[Record]) -> None:
            for record in records:
                route.received(record.lane)
            answers.on_records(records)

        # The tail starts before the producer, so that no answer is missed.
        replies = TopicTail(kafka, scores, route.partitions, "latest", on_replies)
        await stack.enter_async_context(replies)
        stack.push_async_callback(background.end)
        background.watch(replies.failed)
        listening = bool(client.hedge_ms) and await _listen(stack, settings, topics, owners, rows)
        await stack.enter_async_context(producer)
        background.start(periodically(SILENT_S, sender.probe, "ask the brokers that are away"))
        counts = PartitionCounts(topics, producer, route, serves=False)
        await counts.ask_now()
        await sender.connect({topics.retrieval.name: topics.lanes, topics.ranking.name: topics.lanes})
        background.start(counts.run())
        if beside is not None:
            await stack.enter_async_context(beside(producer, background))
        background.start(periodically(FLUSH_LOGS_S, _flush_logs, "write what log lines were held back"))
        connection = Connection(
            settings,
            topics,
            answers,
            replies,
            route,
            sender,
            counts,
            Hedges(
                owners,
                settings.relay.slo_ms,
                waits=TopicWaits(sender, topics.ranking.name),
                silence_ms=client.silence_ms if listening else 0.0,
            ),
            metrics,
            owners if listening else None,
        )
        stack.push_async_callback(end, "announcing", connection.announcements.flush)
        yield connection


class Connection:
    """One client's connection to the brokers: sends its messages, receives its answers."""

    def __init__(
        self,
        settings: Settings,
        topics: TopicSet,
        answers: Answers,
        replies: TopicTail,
        route: ReplyRoute,
        sender: Sender,
        counts: PartitionCounts,
        hedges: Hedges,
        metrics: ClientMetrics,
        owners: OwnerDirectory | None,
    ) -> None:
        self._settings = settings
        self.topics: Final = topics
        self._owners = owners
        self._answers = answers
        self._replies = replies
        self._route = route
        self._sender = sender
        self._counts = counts
        self._hedges = hedges
        self._metrics = metrics
        self.announcements = Announcements(self, settings.client.announce_linger_ms / 1000)

    @property
    def error(self) -> RelayError | None:
        """Why no call is possible on this connection any more: its reply partitions are gone. None: calls are."""
        return self._route.gone

    @property
    def trouble(self) -> str | None:
        """Why nothing is sent, or what is sent is refused; None if all is well."""
        return self._sender.trouble

    @property
    def serves(self) -> bool:
        """Whether a worker serves, by the statuses; True where they are not read."""
        return self._owners is None or self._owners.serves

    def check_lanes(self) -> None:
        """Raise LanesChanged if the cluster has another number of lanes than the settings."""
        if self._counts.error is not None:
            raise copy(self._counts.error)  # each caller gets its own traceback

    async def announce(self, user_id: str, message: Outgoing) -> None:
        """Buffer a request event. Raises BrokerError if its lane's broker accepts no messages."""
        lane = lane_of(user_id, self.topics.lanes)
        try:
            self._sender.check(self.topics.retrieval.name, lane)
            if not self.announcements.has_room(lane):
                async with asyncio.timeout(self._settings.client.timeout_ms / 1000):
                    await self.announcements.room(lane)
            self.announcements.add(lane, message)
        except TimeoutError:
            self._metrics.announcements.labels("BrokerUnavailable").inc()
            raise BrokerUnavailable(self._buffer_full()) from None
        except BrokerError as error:
            self._metrics.announcements.labels(type(error).__name__).inc()
            raise

    async def cancel(self, lane: int, value: bytes) -> None:
        """Buffer a cancel on this lane. Raises BrokerError if its broker takes no messages."""
        message = Outgoing(b"", value, [(HEADER_KIND, KIND_CANCEL.encode())])
        rest = self._sender.send(self.topics.ranking.name, message, partition=lane, settled=self._cancelled)
        if rest is not None:
            try:
                async with asyncio.timeout(self._settings.client.timeout_ms / 1000):
                    await rest
            except TimeoutError:
                raise BrokerUnavailable(self._buffer_full()) from None

    async def rank(self, request: RankingRequest, message: Outgoing, lane: int | None = None) -> ScoreReply:
        """Send a request, and copies of it if its lane does not answer; the first answer counts.

        lane: where it is sent first; None: the user's own lane.
        Raises DeadlineExceeded, BrokerError, or the error that completed the call.
        """
        call = self._answers.expect(request.request_id)
        timeout_ms = request.timeout_ms
        deadline = asyncio.get_running_loop().call_later(timeout_ms / 1000, call.fail, TimeoutError())
        try:
            exchange = Exchange(
                call,
                lane_of(request.user_id, self.topics.lanes) if lane is None else lane,
                Copies(self._sender, self._route, self.topics.ranking.name, request, message),
                self._hedges,
                between_copies_s(self._settings.client.hedge_ms, timeout_ms),
                self._metrics,
            )
            return await exchange.run()
        except TimeoutError:
            if call.fallback is not None:  # the other copies are not answered in time
                return call.fallback
            if (error := exchange.why_unsent(timeout_ms)) is not None:
                raise error from None
            if (trouble := self._replies.trouble) is not None:
                raise BrokerError(f"no answer within {timeout_ms:g} ms: {trouble}") from None
            raise DeadlineExceeded(f"no answer within {timeout_ms:g} ms") from None
        finally:
            deadline.cancel()
            self._answers.release(call)

    def send_lane(self, lane: int, events: Sequence[Outgoing]) -> Coroutine[Any, Any, None] | None:
        """Hand one lane's request events to the producer (LaneSender)."""
        return self._sender.buffer(self.topics.retrieval.name, lane, events, settled=self._announced)

    def _buffer_full(self) -> str:
        settings = self._settings
        waited = f"{settings.client.timeout_ms:g} ms (client.timeout_ms)"
        return f"the send buffer stayed full for {waited}; brokers at {settings.kafka.bootstrap}"

    def _cancelled(self, error: BrokerError | None) -> None:
        self._metrics.cancels.labels("sent" if error is None else type(error).__name__).inc()

    def _announced(self, error: BrokerError | None) -> None:
        self._metrics.announcements.labels("sent" if error is None else type(error).__name__).inc()
        if error is not None:
            limited(log.warning, "announce")("request event not sent", error=str(error))


async def _listen(
    stack: AsyncExitStack, settings: Settings, topics: TopicSet, owners: OwnerDirectory, rows: Sequence[TopicRow]
) -> bool:
    """Follow the workers' statuses, which only hedges need. False if they cannot be read; the client works without."""
    name = topics.worker_status.name
    statuses = TopicTail(settings.kafka, name, [0], "latest", owners.on_records, pause_s=STATUS_PAUSE_S)
    try:
        if all(row.topic.name != name for row in rows):
            raise TopicError(f"topic {name} does not exist, or this client has no permission to describe it")
        await stack.enter_async_context(statuses)
    except BrokerError as error:
        log.warning("requests are not hedged: worker statuses cannot be read", topic=name, error=str(error))
        return False
    return True


async def _flush_logs() -> None:
    flush_limiters()


def _reply_partitions(rows: Sequence[TopicRow], topics: TopicSet, chosen: int) -> list[int]:
    found = next(row.found for row in rows if row.topic.name == topics.scores.name)
    assert found is not None, "verified"
    if chosen >= found.partitions:  # the cluster's count: it may be above the topic file's
        raise ConfigError(
            f"`client.reply_partition` = {chosen}: {topics.scores.name} has partitions 0…{found.partitions - 1}"
        )
    return reply_partitions(found.leaders, None if chosen < 0 else chosen)
