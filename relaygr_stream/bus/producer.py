"""Sends messages without linger, with Kafka's own partitioner and typed errors.

Memory is bounded: aiokafka keeps one open batch per partition, and a send to a full batch waits.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Self

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import (
    InvalidTimestampError,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    NoError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from aiokafka.protocol.metadata import MetadataRequest

from relaygr_stream.bus.aiokafka_compat import CLOSE_S, broker_error, client_options, not_granted, typed_errors
from relaygr_stream.bus.broker_errors import unreachable
from relaygr_stream.bus.buffering import buffered
from relaygr_stream.bus.refused import RefusedTopics
from relaygr_stream.bus.renewed import ClientUser, Renewed
from relaygr_stream.bus.throttling import throttled_for, throttled_ms
from relaygr_stream.errors import BrokerError, BrokerUnavailable, MessageTooLarge, TopicError
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.topic_files import partition_of

#: The default size limit of a topic (max_message_bytes in its file).
DEFAULT_MAX_BYTES: Final = 1_048_576
#: In place of the id of a partition's leader.
NO_LEADER: Final = -1
#: Size limit of a batch of small messages. The broker checks whole batches, so it is far below any topic's limit.
BATCH_BYTES: Final = 64 * 1024
#: Partitions that are not known are asked for so often at most.
LEARN_S: Final = 1.0


class Outgoing(NamedTuple):
    """A message."""

    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes]] = ()


#: Called once with a message's offset, or with the error, after which a broker may have it all the same.
Settle = Callable[[int | BrokerError], None]
#: Called once for each message that was sent together: its index, and what became of it.
SettleEach = Callable[[int, int | BrokerError], None]


class Producer(ClientUser):
    """A producer for one kind of traffic. Use a second producer for messages that must not wait behind others.

    acks, max_bytes: as in Kafka (acks, max.request.size).
    """

    def __init__(
        self,
        kafka: Kafka,
        *,
        client_id: str,
        acks: Literal["all", 1] = "all",
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        self._kafka = kafka
        self._client_id = client_id
        self._acks = acks
        self._max_bytes = max_bytes
        self._refused = RefusedTopics()
        self._learning = asyncio.Lock()
        self._learned_s = -math.inf  # when it asked for unknown partitions last
        self._renewed = Renewed(kafka, "a producer", self)

    def make_client(self) -> Any:
        """A new aiokafka producer, not started."""
        return AIOKafkaProducer(
            **client_options(self._kafka, self._client_id),
            acks=self._acks,
            linger_ms=0,
            max_batch_size=BATCH_BYTES,
            max_request_size=self._max_bytes,
            partitioner=murmur2_partition,
        )

    def leave_client(self, client: Any) -> None:
        """Fail the buffered messages of a producer that has ended, since it will not send them."""
        client._message_accumulator.fail_all(KafkaConnectionError("the producer has ended"))

    @property
    def trouble(self) -> str | None:
        """Why sends wait for an ended producer to be replaced, or why they are refused. None if all is well."""
        return self._renewed.trouble or self._refused.trouble(time.monotonic())

    async def start(self) -> None:
        """Connect. Raises BrokerUnavailable."""
        await self._renewed.start()

    async def stop(self) -> None:
        """Deliver the buffered messages, within the request timeout, and disconnect."""
        await self._renewed.stop(self._kafka.request_timeout_ms / 1000 + CLOSE_S)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def broker_of(self, topic: str, partition: int) -> int | None:
        """The id of the broker that leads a partition; NO_LEADER; None: not known."""
        client = self._renewed.client
        leader = (
            None if client is None else client.client.cluster.leader_for_partition(TopicPartition(topic, partition))
        )
        return None if leader is None else int(leader)

    async def answers(self, broker: int, within_s: float) -> bool:
        """Whether this broker answers a request within within_s, over a new connection where there is none."""
        client = self._renewed.client
        try:
            async with asyncio.timeout(within_s):
                return client is not None and bool(await client.client.send(broker, MetadataRequest([])))
        except (KafkaError, OSError):  # a TimeoutError is an OSError
            return False

    def throttled_s(self, topic: str, partition: int) -> float:
        """For how many seconds from now the partition's broker takes nothing, because of a quota; 0: it takes."""
        client = self._renewed.client
        if client is None or not throttled_ms():  # the common case: no broker ever has
            return 0.0
        return throttled_for(client.client, self.broker_of(topic, partition))

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> asyncio.Future[int]:
        """Buffer a message; the future resolves to its offset once the broker has acknowledged it.

        value None: a tombstone. The partition is the given one, else the key's, else any. Raises, or sets on the
        future: BrokerUnavailable (no acknowledgement within the request timeout), TopicError (no such topic or
        partition), MessageTooLarge, AccessDenied, BrokerError (refused).
        """
        sent: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        resolve = partial(_resolve, sent)
        if partition is not None and self.send_now(topic, key, value, headers, partition, resolve):
            return sent
        await self._send_later(topic, key, value, headers, partition, resolve)
        return sent

    async def _send_later(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes]],
        partition: int | None,
        settled: Settle,
    ) -> None:
        """As `send_now`, and waits for room; raises as `send` does."""
        producer, size = await self._renewed.present(), len(value or b"")
        try:
            try:
                acknowledged = await producer.send(topic, value, key, partition, None, list(headers))
            except AssertionError:
                await self._learn(topic, partition)
                acknowledged = await producer.send(topic, value, key, partition, None, list(headers))
        except MessageSizeTooLargeError as error:  # aiokafka's own check: of this message, not of this process
            raise self._typed(topic, size, error) from error
        except (KafkaError, OSError) as error:
            raise self._failed(topic, size, error) from error
        acknowledged.add_done_callback(partial(self._acknowledged, settled, topic, size))

    def send_now(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes]],
        partition: int,
        settled: Settle,
    ) -> bool:
        """As `send`, where that neither waits nor raises; else False, and nothing is buffered.

        settled: called later, once, unless the producer ends before.
        """
        client = self._renewed.at_hand
        if client is None or (acknowledged := buffered(client, topic, partition, key, value, list(headers))) is None:
            return False
        acknowledged.add_done_callback(partial(self._acknowledged, settled, topic, len(value or b"")))
        return True

    async def send_and_wait(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> int:
        """Send a message and wait for its offset; raises as `send` does."""
        return await (await self.send(topic, value, key=key, partition=partition, headers=headers))

    async def send_together(
        self,
        topic: str,
        messages: Sequence[Outgoing],
        *,
        partition: int,
        settled: SettleEach,
        within_s: float | None = None,
    ) -> None:
        """Buffer messages of one partition, in order; waits while there is no room for the next one.

        within_s: what there is no room for within that time fails as BrokerUnavailable.

        settled(index, outcome) is called once for each message, possibly before this returns: with its offset when the
        broker has acknowledged it, or with an error as `send` raises it. It is not called for a message in transit when
        the producer stops. Raises no BrokerError.
        """
        until = None if within_s is None else asyncio.get_running_loop().time() + within_s
        for index, (key, value, headers) in enumerate(messages):
            settle = partial(settled, index)
            if self.send_now(topic, key, value, headers, partition, settle):
                continue
            try:
                async with asyncio.timeout_at(until):
                    await self._send_later(topic, key, value, headers, partition, settle)
            except TimeoutError:
                settle(
                    BrokerUnavailable(f"cannot send to {topic}: partition {partition} has had no room for {within_s} s")
                )
            except BrokerError as error:
                settle(error)

    async def partitions(self, topics: Sequence[str]) -> dict[str, int]:
        """The topics' present partition counts, 0 for an unavailable topic. Afterwards `send` knows new partitions.

        Raises BrokerUnavailable.
        """
        client = (await self._renewed.present()).client
        for topic in topics:
            client.add_topic(topic)
        with typed_errors(self._kafka, "ask for partitions", "DESCRIBE"):
            async with asyncio.timeout(self._kafka.request_timeout_ms / 1000):
                await client.force_metadata_update()
        return {topic: len(client.cluster.partitions_for_topic(topic) or ()) for topic in topics}

    async def exists(self, topic: str) -> bool:
        """Whether the cluster has the topic. Raises BrokerUnavailable, AccessDenied (it does not say), BrokerError."""
        client = (await self._renewed.present()).client
        with typed_errors(
            self._kafka, "ask for a topic", "DESCRIBE"
        ):  # not `add_topic`: it would be asked for, and missed, for ever
            async with asyncio.timeout(self._kafka.request_timeout_ms / 1000):
                found = await client.send(client.get_random_node(), MetadataRequest([topic]))
        errors = [error for error, name, *_ in found.topics if name == topic]
        if TopicAuthorizationFailedError.errno in errors:
            raise not_granted(self._kafka, f"look for {topic}", "READ", "topic", [topic])
        return NoError.errno in errors

    def _acknowledged(self, settled: Settle, topic: str, size: int, done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            settled(BrokerUnavailable("the producer was closed before the message was sent"))
        elif (error := done.exception()) is not None:
            settled(self._failed(topic, size, error))
        else:
            self._refused.taken(topic)
            settled(done.result().offset)

    async def _learn(self, topic: str, partition: int | None) -> None:
        """Ask for a partition that is not known, since lanes may grow; raises TopicError if there is none."""
        async with self._learning:
            if self.broker_of(topic, partition or 0) is not None:
                return  # by another one's question
            # A statement of lanes that are not there must not make us ask often.
            if (now := time.monotonic()) - self._learned_s >= LEARN_S:
                self._learned_s = now
                if (await self.partitions([topic]))[topic] > (partition or 0):
                    return
        raise TopicError(f"topic {topic} has no partition {partition}")

    def _failed(self, topic: str, size: int, error: BaseException) -> BrokerError:
        """As `_typed`, for what a broker or the cluster's metadata said; it counts for `trouble`."""
        typed = self._typed(topic, size, error)
        self._refused.failed(topic, typed, time.monotonic())
        return typed

    def _typed(self, topic: str, size: int, error: BaseException) -> BrokerError:
        """size: bytes of the message, or of the batch."""
        doing = f"send to {topic}"
        if isinstance(error, InvalidTimestampError):
            return BrokerError(
                f"cannot {doing}: the clock of this machine, or of the broker at {self._kafka.bootstrap}, is wrong: "
                f"the broker finds the message's time too far from its own (InvalidTimestampError; "
                f"message.timestamp.after.max.ms, an hour by default). Set the clocks (NTP); `relaygr topics apply` "
                f"lets brokers set the times (message.timestamp.type = LogAppendTime)"
            )
        if isinstance(error, (MessageSizeTooLargeError, RecordListTooLargeError)):
            return MessageTooLarge(f"cannot {doing}: {size} bytes with headers exceed the {self._max_bytes} it takes")
        if isinstance(error, UnknownTopicOrPartitionError):
            return TopicError(f"cannot {doing}: no such topic; `relaygr topics apply` creates it")
        if isinstance(error, KafkaConnectionError):
            return broker_error(self._kafka, doing, error, "WRITE")
        # Retriable: aiokafka tried until the timeout, for example while the partition had no leader.
        if isinstance(error, KafkaTimeoutError) or (isinstance(error, KafkaError) and error.retriable):
            away = unreachable()
            return BrokerUnavailable(
                f"cannot {doing}: no acknowledgement from {self._kafka.bootstrap} within "
                f"{self._kafka.request_timeout_ms} ms ({type(error).__name__}){away and f'; {away}'}"
            )
        return broker_error(self._kafka, doing, error, "WRITE")


def _resolve(sent: asyncio.Future[int], outcome: int | BrokerError) -> None:
    if sent.done():  # cancelled
        return
    if isinstance(outcome, BrokerError):
        sent.set_exception(outcome)
    else:
        sent.set_result(outcome)


class TopicLeaders:
    """Knows which partitions of a topic have a leader, by a producer's metadata."""

    def __init__(self, producer: Producer, topic: str) -> None:
        self._producer = producer
        self._topic = topic

    def has_leader(self, partition: int) -> bool:
        """False if the partition is known to have no leader."""
        return self._producer.broker_of(self._topic, partition) != NO_LEADER


def murmur2_partition(key: bytes | None, partitions: list[int], available: list[int]) -> int:
    """The partition of a key, as Kafka's Java client chooses it; without a key, any partition that has a leader."""
    if key is None:
        return random.choice(available or partitions)
    # Partitions are numbered from 0 without gaps, so the count is sufficient.
    return partition_of(key, len(partitions))
