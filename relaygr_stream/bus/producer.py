"""Sends messages: no linger, Kafka's own partitioner, typed errors. Knows nothing of what it sends.

Memory is bounded: aiokafka keeps one open batch per partition, and a send that finds it full waits.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    NodeNotReadyError,
    RequestTimedOutError,
    UnknownTopicOrPartitionError,
)
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from relaygr_stream.bus.aiokafka_compat import CLOSE_S, broker_error, client_options, typed_errors
from relaygr_stream.bus.renewed import Renewed
from relaygr_stream.errors import BrokerError, BrokerUnavailable, TopicError
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.partitioner import partition_of

#: What a topic takes by default (its file's max_message_bytes).
DEFAULT_MAX_BYTES: Final = 1_048_576
#: Small messages travel together up to this; far below what any topic takes, since the broker checks whole batches.
BATCH_BYTES: Final = 64 * 1024


class Sent(NamedTuple):
    """Where a message is in its partition, and where the batch begins that it is in: the log has all of it, or none."""

    offset: int
    batch: int


class Producer:
    """A producer for one kind of traffic; make a second one rather than let scores wait behind other messages."""

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
        self._renewed = Renewed(kafka, "a producer", self._make, leave=_fail_unsent)

    def _make(self) -> Any:
        return AIOKafkaProducer(
            **client_options(self._kafka, self._client_id),
            acks=self._acks,
            linger_ms=0,
            max_batch_size=BATCH_BYTES,
            max_request_size=self._max_bytes,
            partitioner=murmur2_partition,
        )

    @property
    def trouble(self) -> str | None:
        """Why nothing can be sent: it has ended, and is made anew. Sends wait meanwhile."""
        return self._renewed.trouble

    async def start(self) -> None:
        """Connect. Raises BrokerUnavailable."""
        await self._renewed.start()

    async def stop(self) -> None:
        """Deliver what is buffered, within the request timeout, and disconnect."""
        await self._renewed.stop(self._kafka.request_timeout_ms / 1000 + CLOSE_S)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.stop()

    def broker_of(self, topic: str, partition: int) -> int | None:
        """The id of the broker that leads a partition, as far as it is known; -1: nobody leads it."""
        client = self._renewed.client
        leader = (
            None if client is None else client.client.cluster.leader_for_partition(TopicPartition(topic, partition))
        )
        return None if leader is None else int(leader)

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
        future: BrokerUnavailable (nobody answered within the request timeout), TopicError (no such topic or partition),
        BrokerError (too large, or refused).
        """
        producer = await self._renewed.present()
        try:
            acknowledged = await producer.send(topic, value, key, partition, None, list(headers))
        except AssertionError:
            raise self._no_partition(topic, partition) from None
        except (KafkaError, OSError) as error:
            raise self._typed(topic, len(value or b""), error) from error
        sent: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        acknowledged.add_done_callback(partial(self._acknowledge, sent, topic, len(value or b"")))
        return sent

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
        messages: Sequence[tuple[bytes | None, bytes]],
        *,
        partition: int,
        settled: Callable[[int, Sent | BrokerError], None],
    ) -> None:
        """Buffer messages (key, value) of one partition, in as few batches as hold them: 8 µs less each than by `send`.

        Each message is settled once: settled(index, Sent) when the broker has acknowledged it, settled(index, error)
        with an error as `send` raises it when that failed, be it before this returns. None of a batch is settled when
        the producer was stopped while it was on its way. Waits where an earlier batch of the partition has not left
        yet. Raises nothing of the bus.
        """
        try:
            producer = await self._renewed.present()
        except BrokerUnavailable as error:
            for index in range(len(messages)):
                settled(index, BrokerUnavailable(f"cannot send to {topic}: {error}"))
            return
        submit = partial(self._submit, producer, topic, partition, settled)
        first, batch = 0, producer.create_batch()
        for index, (key, value) in enumerate(messages):
            if DefaultRecordBatchBuilder.estimate_size_in_bytes(key, value, []) > self._max_bytes:
                await submit(first, batch)
                settled(index, self._typed(topic, len(value), MessageSizeTooLargeError()))
                first, batch = index + 1, producer.create_batch()
            elif batch.append(timestamp=None, key=key, value=value) is None:  # full
                await submit(first, batch)
                first, batch = index, producer.create_batch()
                batch.append(timestamp=None, key=key, value=value)  # any one message fits an empty batch
        await submit(first, batch)

    async def _submit(
        self,
        producer: Any,
        topic: str,
        partition: int,
        settled: Callable[[int, Sent | BrokerError], None],
        first: int,
        batch: Any,
    ) -> None:
        """Hand over a batch whose first message has the index `first`."""
        indices = range(first, first + batch.record_count())
        if not indices:
            return
        size = batch.size()
        batch.close()  # else aiokafka adds messages of `send` to it

        def fail(error: BrokerError) -> None:
            for index in indices:
                settled(index, error)

        def acknowledge(done: asyncio.Future[Any]) -> None:
            if done.cancelled():
                return
            error = done.exception()
            if error is not None:
                fail(self._typed(topic, size, error))
                return
            offset = done.result().offset
            for index in indices:
                settled(index, Sent(offset + index - first, offset))

        try:
            acknowledged = await producer.send_batch(batch, topic, partition=partition)
        except AssertionError:
            fail(self._no_partition(topic, partition))
        except (KafkaError, OSError) as error:
            fail(self._typed(topic, size, error))
        else:
            acknowledged.add_done_callback(acknowledge)

    async def partitions(self, topics: Sequence[str]) -> dict[str, int]:
        """How many partitions the topics have now, 0 for those that are away; new ones can be sent to from then on.

        Raises BrokerUnavailable.
        """
        client = (await self._renewed.present()).client
        for topic in topics:
            client.add_topic(topic)
        with typed_errors(self._kafka, "ask for partitions"):
            async with asyncio.timeout(self._kafka.request_timeout_ms / 1000):
                await client.force_metadata_update()
        return {topic: len(client.cluster.partitions_for_topic(topic) or ()) for topic in topics}

    async def flush(self) -> None:
        """Wait until everything sent so far is acknowledged or failed."""
        await (await self._renewed.present()).flush()

    def _acknowledge(self, sent: asyncio.Future[int], topic: str, size: int, done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            sent.cancel()
            return
        error = done.exception()
        if sent.done():
            return
        if error is None:
            sent.set_result(done.result().offset)
        else:
            sent.set_exception(self._typed(topic, size, error))

    def _no_partition(self, topic: str, partition: int | None) -> TopicError:
        return TopicError(f"topic {topic} has no partition {partition}")

    def _typed(self, topic: str, size: int, error: BaseException) -> BrokerError:
        """size: bytes of the message, or of the batch."""
        doing = f"send to {topic}"
        if isinstance(error, MessageSizeTooLargeError):
            return BrokerError(f"cannot {doing}: {size} bytes with headers exceed the {self._max_bytes} it takes")
        if isinstance(error, UnknownTopicOrPartitionError):
            return TopicError(f"cannot {doing}: no such topic; `relaygr topics apply` creates it")
        if isinstance(error, (KafkaTimeoutError, RequestTimedOutError, NodeNotReadyError)):
            return BrokerUnavailable(
                f"cannot {doing}: no acknowledgement from {self._kafka.bootstrap} within "
                f"{self._kafka.request_timeout_ms} ms"
            )
        return broker_error(self._kafka, doing, error)


def _fail_unsent(producer: Any) -> None:
    """What a producer that has ended still holds is not going to be sent: whoever waits for it is told."""
    producer._message_accumulator.fail_all(KafkaConnectionError("the producer has ended"))


def murmur2_partition(key: bytes | None, partitions: list[int], available: list[int]) -> int:
    """The partition of a key, as Kafka's Java client chooses it; any that has a leader without one."""
    if key is None:
        return random.choice(available or partitions)
    # Partitions are numbered from 0 without gaps, so that the count alone decides.
    return partition_of(key, len(partitions))
