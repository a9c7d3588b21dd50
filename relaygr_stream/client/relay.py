"""RelayClient: announce requests, rank candidates, over Kafka. One event loop, no thread.

Knows nothing of triggers or caches: whoever owns the user's lane, or another worker where that one does not, answers on
this client's partition of `scores`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from copy import copy
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from relaygr_stream.bus.counts import PartitionCounts
from relaygr_stream.bus.ending import end
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.records import Record
from relaygr_stream.bus.renewed import RenewalsCollector
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.client.announcements import Announcements, Message
from relaygr_stream.client.answers import Answers, Call, Ranking, ranking_of
from relaygr_stream.client.exchange import Exchange
from relaygr_stream.client.hedges import Hedges
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.client.replies import ReplyRoute, reply_partitions
from relaygr_stream.client.sender import Sender
from relaygr_stream.config import load
from relaygr_stream.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigError,
    DeadlineExceeded,
    DecodeError,
    Overloaded,
    Rejected,
    RelayError,
    RequestError,
    TopicError,
)
from relaygr_stream.messages import (
    HEADER_CORRELATION,
    HEADER_REPLY_PARTITION,
    ITEM_DTYPE,
    RankingRequest,
    RequestEvent,
    decode,
    encode,
)
from relaygr_stream.owners import OwnerDirectory
from relaygr_stream.settings import Settings
from relaygr_stream.status.reader import StatusReader
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.topics import Topic, TopicRow, lane_of, load_topics, verify_topics

log = structlog.get_logger(__name__)
limited = LogLimiter().limited

M = TypeVar("M", RequestEvent, RankingRequest)

#: What a message takes beside value, key and headers, as the broker counts: a record batch's header (61 bytes), the
#: record's varints (at most 35), names and lengths of our headers (about 60).
FRAME_BYTES: Final = 256


class RelayClient:
    """A connection to the relay, as an async context: `async with RelayClient("kafka:9092") as relay: …`

    bootstrap: brokers, HOST:PORT[,HOST:PORT…]; in place of settings.kafka.bootstrap. settings: by default what the
    environment says (RELAYGR_…). client_id: how brokers' logs and workers name this client. registry: where its
    metrics go; a new one by default.

    Raises ConfigError; entering it raises BrokerUnavailable, TopicError or CoPartitionError. Thousands of calls may run
    concurrently, on the event loop that entered the context.
    """

    def __init__(
        self,
        bootstrap: str | None = None,
        *,
        settings: Settings | None = None,
        client_id: str | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        if settings is None:
            settings = load(flags={"kafka.bootstrap": bootstrap}).settings
        elif bootstrap is not None:
            kafka = msgspec.structs.replace(settings.kafka, bootstrap=bootstrap)
            settings = msgspec.structs.replace(settings, kafka=kafka)
        self._settings = settings
        self._client_id = client_id or f"relaygr-client-{secrets.token_hex(4)}"
        self._topics = load_topics(settings.kafka)
        self.registry: Final = CollectorRegistry() if registry is None else registry
        self._metrics = ClientMetrics(self.registry)
        with suppress(ValueError):  # the registry of a process has it
            self.registry.register(RenewalsCollector())
        self._answers = Answers(self._metrics, self._topics.scores.max_message_bytes, settings.relay.answer_secret)
        self._counts: PartitionCounts | None = None
        self._route: ReplyRoute | None = None
        self._reader = StatusReader.of(settings, self._topics)
        self._owners = OwnerDirectory(settings.client.silence_ms, reader=self._reader)
        self._hedges = Hedges(self._owners, settings.relay.slo_ms, stuck=self._stuck)
        self._tail: TopicTail | None = None
        self._sender: Sender | None = None
        self._announcements: Announcements | None = None
        self._stack = AsyncExitStack()
        self._ended: RelayError = RequestError("the client is not open: use `async with RelayClient(…) as relay`")

    @property
    def in_flight(self) -> int:
        """Calls of rank() without an answer yet."""
        return len(self._answers)

    async def worker_serves(self, within_s: float) -> bool:
        """Whether a worker states that it serves, waiting so long for one. True where client.hedge_ms is 0: then the
        client does not listen to them."""
        give_up = time.monotonic() + within_s
        while self._settings.client.hedge_ms and time.monotonic() < give_up:
            if any(status.state == "serving" for status in self._owners.workers().values()):
                return True
            await asyncio.sleep(0.05)
        return not self._settings.client.hedge_ms

    async def __aenter__(self) -> Self:
        kafka, topics = self._settings.kafka, self._topics
        async with AsyncExitStack() as stack:
            rows = await verify_topics(kafka, optional=(topics.worker_status.name,))
            self._route = route = ReplyRoute(self._reply_partitions(rows))
            # The tail stands before anything is sent, so that no answer is missed.
            tail = TopicTail(kafka, topics.scores.name, route.partitions, "latest", self._on_answers)
            await stack.enter_async_context(tail)
            tail.failed.add_done_callback(self._tail_failed)
            self._tail = tail
            if self._settings.client.hedge_ms:
                await self._listen(stack, any(row.topic.name == topics.worker_status.name for row in rows))
            max_bytes = max(topics.retrieval.max_message_bytes, topics.ranking.max_message_bytes)
            producer = Producer(kafka, client_id=self._client_id, acks=1, max_bytes=max_bytes)
            await stack.enter_async_context(producer)
            self._sender = Sender(producer, kafka.bootstrap)
            self._counts = PartitionCounts(topics, producer)
            stack.callback(asyncio.create_task(self._counts.run()).cancel)
            self._announcements = announcements = self._announcing(self._sender)
            stack.push_async_callback(end, "announcing", announcements.flush)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Fail the calls under way with RequestError, send what is buffered, disconnect."""
        self._end(RequestError("the client was closed"))
        await self._stack.aclose()

    async def announce(self, event: RequestEvent) -> None:
        """Publish a request event as retrieval starts; `sent_ms` is stamped here.

        Returns once the event is buffered: its loss costs speed, not scores, so nobody waits for the broker. It leaves
        with others within client.announce_linger_ms. Raises Rejected (invalid or too large), BrokerUnavailable (the
        brokers are away), LanesChanged (the cluster has another number of lanes than these settings say).
        """
        sender = self._open_sender()
        assert self._announcements is not None
        event = msgspec.structs.replace(event, sent_ms=_now_ms(), tenant=event.tenant or self._settings.client.tenant)
        value, key = self._encoded(event, self._topics.retrieval)
        lane = lane_of(event.user_id, self._topics.lanes)
        try:
            async with asyncio.timeout(self._settings.client.timeout_ms / 1000):
                sender.check(self._topics.retrieval.name, lane)
                await self._announcements.add(lane, key, value)
        except TimeoutError:
            self._metrics.announcements.labels("BrokerUnavailable").inc()
            raise BrokerUnavailable(
                f"the send buffer stayed full for {self._settings.client.timeout_ms:g} ms (client.timeout_ms); "
                f"brokers at {self._settings.kafka.bootstrap}"
            ) from None
        except BrokerError as error:
            self._metrics.announcements.labels(type(error).__name__).inc()
            raise

    async def rank(self, request: RankingRequest, *, timeout: float | None = None) -> Ranking:
        """Score the request's candidates; `sent_ms` and `timeout_ms` are stamped here.

        timeout: seconds; None: client.timeout_ms. Raises DeadlineExceeded (no answer in time, or the worker said so),
        Overloaded (by the worker, or client.max_in_flight calls are under way), Rejected (invalid, too large, or
        beyond a limit, which it names), WorkerFailed, BrokerUnavailable or BrokerError (not sent), LanesChanged (the
        cluster has another number of lanes than these settings say), RequestError (the client was closed).
        """
        try:
            ranking = await self._rank(request, self._settings.client.timeout_ms / 1000 if timeout is None else timeout)
        except RelayError as error:
            self._metrics.rankings.labels(type(error).__name__).inc()
            raise
        self._metrics.rankings.labels(ranking.outcome).inc()
        self._metrics.rank_seconds.observe(ranking.latency_ms / 1000)
        return ranking

    async def _rank(self, request: RankingRequest, timeout_s: float) -> Ranking:
        started = time.perf_counter()
        sender = self._open_sender()
        if timeout_s <= 0:
            raise DeadlineExceeded(f"the timeout is {timeout_s:g} s: too late before it was sent")
        request = msgspec.structs.replace(
            request,
            sent_ms=_now_ms(),
            timeout_ms=timeout_s * 1000,
            tenant=request.tenant or self._settings.client.tenant,
            client_id=request.client_id or self._client_id,
        )
        value, key = self._encoded(request, self._topics.ranking)
        self._check_limits(request)
        most = self._settings.client.max_in_flight
        if len(self._answers) >= most:
            raise Overloaded(f"{most} calls are under way (client.max_in_flight)")
        call = self._answers.expect(request.request_id)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._exchange(sender, call, request, value, key).run()
        except TimeoutError:
            if self._tail is not None and (trouble := self._tail.trouble) is not None:
                raise BrokerError(f"no answer within {timeout_s * 1000:g} ms: {trouble}") from None
            raise DeadlineExceeded(f"no answer within {timeout_s * 1000:g} ms") from None
        finally:
            self._answers.forget(call)
        candidates = len(request.candidates) // ITEM_DTYPE.itemsize
        return ranking_of(reply, candidates, (time.perf_counter() - started) * 1000)

    def _exchange(self, sender: Sender, call: Call, request: RankingRequest, value: bytes, key: bytes) -> Exchange:
        topic, route = self._topics.ranking.name, self._route
        assert route is not None
        first, began_ms = route.choose(), time.perf_counter() * 1000

        async def send(lane: int, hops: int, settled: Callable[[BrokerError | None], None]) -> None:
            copy_of_it = value
            if hops:  # a worker knows its age since now alone: it is told the time that is left
                left_ms = max(1.0, request.timeout_ms + began_ms - time.perf_counter() * 1000)
                copy_of_it = encode(msgspec.structs.replace(request, hops=hops, sent_ms=_now_ms(), timeout_ms=left_ms))
            reply_to = route.choose_again() if hops else first
            headers = [(HEADER_CORRELATION, call.correlation), (HEADER_REPLY_PARTITION, str(reply_to).encode())]
            try:
                await sender.send(
                    topic,
                    copy_of_it,
                    key=key,
                    partition=lane,
                    headers=headers,
                    patience_s=request.timeout_ms / 1000,
                    settled=settled,
                )
            except BrokerError as error:
                settled(error)

        return Exchange(
            call,
            lane_of(request.user_id, self._topics.lanes),
            lambda *attempt: asyncio.create_task(send(*attempt)),
            self._hedges,
            self._settings.client.hedge_ms / 1000,
            self._metrics,
        )

    def _encoded(self, message: M, topic: Topic) -> tuple[bytes, bytes]:
        """Value and key of a message that any receiver will accept; otherwise Rejected."""
        try:
            value = encode(message)
            # What the receivers check, checked by the same code: a Struct does not look at what it is made of.
            decode(type(message), value, topic.max_message_bytes)
            key = message.user_id.encode()
        except (DecodeError, TypeError, ValueError, OverflowError) as error:
            raise Rejected(f"not a valid {type(message).__name__}: {error}") from error
        size = len(value) + len(key) + FRAME_BYTES
        if size > topic.max_message_bytes:
            raise Rejected(f"{size} bytes with headers, {topic.name} takes {topic.max_message_bytes}")
        return value, key

    def _check_limits(self, request: RankingRequest) -> None:
        relay = self._settings.relay
        candidates = len(request.candidates) // ITEM_DTYPE.itemsize
        for what, count, limit, setting in (
            ("prefix behaviours", len(request.prefix), relay.max_prefix_tokens, "relay.max_prefix_tokens"),
            ("suffix behaviours", len(request.suffix), relay.max_suffix_tokens, "relay.max_suffix_tokens"),
            ("candidates", candidates, relay.max_candidates, "relay.max_candidates"),
        ):
            if count > limit:
                raise Rejected(f"{count} {what}, the limit is {limit} ({setting})")

    def _on_answers(self, records: list[Record]) -> None:
        assert self._route is not None
        for record in records:
            self._route.heard(record.lane)
        self._answers.on_records(records)

    def _stuck(self, lane: int) -> bool:
        return self._sender is not None and self._sender.stuck(self._topics.ranking.name, lane)

    def _reply_partitions(self, rows: Sequence[TopicRow]) -> list[int]:
        found = next(row.found for row in rows if row.topic.name == self._topics.scores.name)
        assert found is not None, "verified"
        chosen = self._settings.client.reply_partition
        if chosen >= found.partitions:  # the cluster's count counts: it may have more than the file says
            raise ConfigError(
                f"`client.reply_partition` = {chosen}: {self._topics.scores.name} has partitions "
                f"0…{found.partitions - 1}"
            )
        return reply_partitions(found.leaders, None if chosen < 0 else chosen)

    def _announcing(self, sender: Sender) -> Announcements:
        topic = self._topics.retrieval.name

        async def send(lane: int, events: list[Message]) -> None:
            await sender.send_together(topic, events, partition=lane, settled=self._announced)

        return Announcements(send, self._settings.client.announce_linger_ms / 1000)

    def _open_sender(self) -> Sender:
        if self._sender is None:
            raise copy(self._ended)  # each caller's own traceback
        if self._counts is not None and self._counts.error is not None:
            raise copy(self._counts.error)
        return self._sender

    def _end(self, error: RelayError) -> None:
        self._sender, self._ended = None, error
        self._answers.fail_all(error)

    async def _listen(self, stack: AsyncExitStack, there: bool) -> None:
        """Hear what workers state, which only hedges need: without it there are none, and everything else goes on.

        there: the topic is, as far as we are let see."""
        settings, name = self._settings, self._topics.worker_status.name
        await self._reader.prepare()
        statuses = TopicTail(settings.kafka, name, [0], "latest", self._owners.on_records)
        try:
            if not there:
                raise TopicError(f"there is no topic {name}, or we are not let see it")
            await stack.enter_async_context(statuses)
        except BrokerError as error:
            log.warning("requests are not hedged: what workers state cannot be read", topic=name, error=str(error))
        else:
            silence_ms = settings.client.silence_ms
            self._hedges = Hedges(self._owners, settings.relay.slo_ms, stuck=self._stuck, silence_ms=silence_ms)

    def _tail_failed(self, failed: asyncio.Future[None]) -> None:
        if not failed.cancelled() and (error := failed.exception()) is not None:
            self._end(error if isinstance(error, RelayError) else BrokerError(f"answers cannot be read: {error!r}"))

    def _announced(self, error: BrokerError | None) -> None:
        self._metrics.announcements.labels("sent" if error is None else type(error).__name__).inc()
        if error is not None:
            limited(log.warning, "announce")("a request event was not sent", error=str(error))


def _now_ms() -> int:
    return int(time.time() * 1000)
