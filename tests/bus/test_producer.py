"""The producer on each broker: offsets, partitions, and its typed errors."""

from __future__ import annotations

import asyncio
import re
from typing import Literal

import msgspec
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import (
    InvalidTopicError,
    KafkaConnectionError,
    KafkaError,
    KafkaStorageError,
    KafkaTimeoutError,
    LeaderNotAvailableError,
    MessageSizeTooLargeError,
    NotEnoughReplicasError,
    NotLeaderForPartitionError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

from relaygr_stream.bus.buffering import buffered
from relaygr_stream.bus.producer import Outgoing, Producer
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.client.sender import Sender
from relaygr_stream.errors import AccessDenied, BrokerError, BrokerUnavailable, MessageTooLarge, TopicError
from relaygr_stream.ops.brokers.local import local_broker
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.topic_files import load_topics
from tests.waiting import WITHIN_S

#: A producer waits so long for a broker that does not answer; one that does may be late on a crowded machine.
HASTY_MS = 3000


async def test_offsets_count_up_per_partition(kafka_settings: Kafka) -> None:
    await apply_topics(kafka_settings)
    topic = load_topics(kafka_settings).scores.name
    choices: list[Literal["all", 1]] = ["all", 1]
    for acks in choices:
        async with Producer(kafka_settings, client_id="test", acks=acks) as producer:
            first = await producer.send_and_wait(topic, b"0", partition=2)
            sent = [await producer.send(topic, b"x", partition=2) for _ in range(50)]
            assert await asyncio.gather(*sent) == list(range(first + 1, first + 51))


async def test_what_is_buffered_at_once_is_what_aiokafka_sends(kafka_settings: Kafka) -> None:
    await apply_topics(kafka_settings)
    topic, headers = load_topics(kafka_settings).scores.name, [("a", b"1"), ("a", b"")]
    messages = [Outgoing(b"k", b"v", headers), Outgoing(None, b"", []), Outgoing(b"", bytes(50_000), headers)]
    async with Producer(kafka_settings, client_id="test", max_bytes=60_000) as producer:
        client = producer._renewed.client
        first = await producer.send_and_wait(topic, b"0", partition=1) + 1
        theirs = [await client.send(topic, each.value, each.key, 1, None, [*each.headers]) for each in messages[:2]]
        ours = [buffered(client, topic, 1, each.key, each.value, [*each.headers]) for each in messages]
        assert buffered(client, topic, 1, None, bytes(20_000), []) is None, "the batch has no room"
        assert buffered(client, topic, 99, None, b"", []) is None
        assert buffered(client, "nowhere", 0, None, b"", []) is None
        assert buffered(client, topic, 0, None, bytes(60_000), []) is None, "too large"
        sent = await asyncio.gather(*theirs, *(each for each in ours if each is not None))
        assert [each.offset for each in sent] == list(range(first, first + 5))
    assert buffered(client, topic, 0, None, b"", []) is None, "closed"
    assert await _read(kafka_settings, TopicPartition(topic, 1), first, 5) == [*messages[:2], *messages]


async def _read(kafka: Kafka, partition: TopicPartition, offset: int, count: int) -> list[Outgoing]:
    async with AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, group_id=None) as consumer:
        consumer.assign([partition])
        consumer.seek(partition, offset)
        read = [await asyncio.wait_for(consumer.getone(), WITHIN_S) for _ in range(count)]
    return [Outgoing(each.key, each.value, list(each.headers)) for each in read]


async def test_messages_sent_together_are_acknowledged_one_by_one(kafka_settings: Kafka) -> None:
    await apply_topics(kafka_settings)
    topic = load_topics(kafka_settings).scores.name
    sizes = [100, 40_000, 40_000, 0, 90_000, 200_000, 7, *([1000] * 200)]  # a batch has 64 KiB; the sixth is too large
    messages = [
        Outgoing(f"key-{number}".encode(), bytes([number]) * size, [("at", b"%d" % number)] * (number % 2))
        for number, size in enumerate(sizes)
    ]
    settled: dict[int, int | BrokerError] = {}

    def settle(index: int, outcome: int | BrokerError) -> None:
        assert index not in settled
        settled[index] = outcome

    async with Producer(kafka_settings, client_id="test", max_bytes=100_000) as producer:
        first = await producer.send_and_wait(topic, b"0", partition=1)
        await producer.send_together(topic, messages, partition=1, settled=settle)
        beside = await producer.send(topic, b"beside", partition=1)
        assert await beside == first + len(messages)
        await producer.send_together(topic, [], partition=1, settled=settle)
    refused = settled.pop(5)
    assert isinstance(refused, BrokerError)
    assert re.search(r"200000 bytes .* exceed the 100000", str(refused))
    assert [one for _, one in sorted(settled.items())] == list(range(first + 1, first + len(messages)))
    read = await _read(kafka_settings, TopicPartition(topic, 1), first + 1, len(messages) - 1)
    assert read == messages[:5] + messages[6:]


async def test_messages_that_cannot_be_sent_together_each_say_why() -> None:
    async with local_broker("embedded") as broker:
        kafka = broker.kafka_settings(Kafka(partitions=2))
        await apply_topics(kafka)
        topic = load_topics(kafka).scores.name
        hasty = msgspec.structs.replace(kafka, request_timeout_ms=HASTY_MS)
        async with Producer(hasty, client_id="test") as producer:
            settled: list[tuple[int, int | BrokerError]] = []

            async def send(partition: int) -> list[tuple[int, int | BrokerError]]:
                settled.clear()
                both = asyncio.Event()

                def settle(index: int, outcome: int | BrokerError) -> None:
                    settled.append((index, outcome))
                    if len(settled) == 2:
                        both.set()

                await producer.send_together(
                    topic, [Outgoing(b"k", b"v"), Outgoing(None, b"w")], partition=partition, settled=settle
                )
                await asyncio.wait_for(both.wait(), WITHIN_S)
                return settled

            assert [(index, type(outcome)) for index, outcome in await send(99)] == [(0, TopicError), (1, TopicError)]
            assert await send(0) == [(0, 0), (1, 1)]
            broker.stop()
            assert [(index, type(outcome)) for index, outcome in await send(0)] == [
                (0, BrokerUnavailable),
                (1, BrokerUnavailable),
            ]


async def test_what_a_partition_has_no_room_for_in_time_fails() -> None:
    async with local_broker("embedded") as broker:
        kafka = broker.kafka_settings(Kafka(partitions=2))
        await apply_topics(kafka)
        topic = load_topics(kafka).scores.name
        settled: dict[int, int | BrokerError] = {}
        messages = [Outgoing(None, b"x" * 40_000)] * 5  # a batch each
        async with Producer(msgspec.structs.replace(kafka, request_timeout_ms=60_000), client_id="test") as producer:
            await producer.send_and_wait(topic, b"", partition=0)
            broker.stop()
            async with asyncio.timeout(WITHIN_S):
                await producer.send_together(topic, messages, partition=0, settled=settled.__setitem__, within_s=0.05)
            assert 3 <= len(settled) <= 4, "one batch is under way, and another one open"
            assert sorted(settled) == list(range(5))[-len(settled) :]
            assert {type(outcome) for outcome in settled.values()} == {BrokerUnavailable}
            await producer._renewed._end(producer._renewed.client, 0.01)


async def test_a_producer_that_is_closed_fails_what_comes_together() -> None:
    settled: dict[int, object] = {}
    producer = Producer(Kafka(), client_id="test")
    await producer.send_together(
        "t", [Outgoing(b"k", b"v"), Outgoing(None, b"w")], partition=0, settled=settled.__setitem__
    )
    assert [type(settled[index]) for index in (0, 1)] == [BrokerUnavailable, BrokerUnavailable]


@pytest.mark.parametrize(
    ("error", "typed"),
    [
        (LeaderNotAvailableError, BrokerUnavailable),
        (NotLeaderForPartitionError, BrokerUnavailable),
        (NotEnoughReplicasError, BrokerUnavailable),
        (KafkaStorageError, BrokerUnavailable),
        (KafkaTimeoutError, BrokerUnavailable),
        (KafkaConnectionError, BrokerUnavailable),
        (UnknownTopicOrPartitionError, TopicError),
        (MessageSizeTooLargeError, MessageTooLarge),
        (RecordListTooLargeError, MessageTooLarge),
        (TopicAuthorizationFailedError, AccessDenied),
        (InvalidTopicError, BrokerError),
    ],
)
async def test_what_another_try_may_mend_counts_as_a_broker_that_is_away(
    error: type[KafkaError], typed: type[BrokerError]
) -> None:
    found = Producer(Kafka(), client_id="test")._typed("t", 5, error())
    assert type(found) is typed
    if typed is BrokerUnavailable and error is not KafkaConnectionError:
        assert error.__name__ in str(found)


async def test_what_cannot_be_sent_says_why(kafka_settings: Kafka) -> None:
    await apply_topics(kafka_settings)
    topic = load_topics(kafka_settings).scores.name
    hasty = msgspec.structs.replace(kafka_settings, request_timeout_ms=HASTY_MS)
    async with Producer(hasty, client_id="test", max_bytes=5000) as producer:
        with pytest.raises(BrokerError, match="6000 bytes with headers exceed the 5000"):
            await producer.send(topic, bytes(6000), partition=0)
        with pytest.raises(TopicError, match=f"{topic} has no partition 99"):
            await producer.send(topic, b"", partition=99)
        with pytest.raises(TopicError, match=r"nowhere.*relaygr topics apply"):
            await producer.send("nowhere", b"", partition=0)
        assert await producer.send_and_wait(topic, b"", partition=0) == 0


async def test_a_message_that_cannot_be_encoded_leaves_nothing_unacknowledged(kafka_settings: Kafka) -> None:
    await apply_topics(kafka_settings)
    topic, wrong = load_topics(kafka_settings).scores.name, Outgoing(None, b"", [("a", "no bytes")])  # type: ignore[list-item]
    clock = iter(range(100)).__next__
    async with Producer(kafka_settings, client_id="test") as producer:
        sender = Sender(producer, kafka_settings.bootstrap, clock)
        sent: asyncio.Future[BrokerError | None] = asyncio.get_running_loop().create_future()
        settled: list[BrokerError | None] = []

        async def buffered(*messages: Outgoing) -> None:
            # Before the producer knows the topic, and where its buffer is full, the rest waits.
            if rest := sender.buffer(topic, 0, messages, settled=settled.append):
                await rest

        await buffered(wrong)
        assert isinstance(settled.pop(), BrokerError)  # what waited fails as its message, not as its caller
        assert await producer.send_and_wait(topic, b"known", partition=0) == 0
        with pytest.raises(TypeError):
            await buffered(Outgoing(None, b"first"), wrong)
        with pytest.raises(TypeError):
            await buffered(wrong)
        assert sender.buffer(topic, 0, [Outgoing(None, b"good")], settled=sent.set_result) is None
        assert await asyncio.wait_for(sent, WITHIN_S) is None
        assert sender.waits_s(topic, [0]) == {0: 0.0}


async def test_a_send_that_is_cancelled_while_it_waits_for_room_counts_no_more() -> None:
    class Full:
        """A producer without room."""

        def broker_of(self, topic: str, partition: int) -> int:
            del topic, partition
            return 1

        def throttled_s(self, *_: object) -> float:
            return 0.0

        def send_now(self, *_: object) -> bool:
            return False

        async def send_together(self, *_: object, **__: object) -> None:
            await asyncio.Event().wait()

    sender = Sender(Full(), "", iter(range(100)).__next__)  # type: ignore[arg-type]
    rest = sender.buffer("t", 0, [Outgoing(None, b"")], settled=lambda _: None)
    assert rest is not None
    waiting = asyncio.create_task(rest)
    await asyncio.sleep(0)
    assert sender.waits_s("t", [0])[0] > 0
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert sender.waits_s("t", [0]) == {0: 0.0}


async def test_no_broker_is_said_at_once(kafka_settings: Kafka) -> None:
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        await Producer(msgspec.structs.replace(kafka_settings, bootstrap="127.0.0.1:1"), client_id="test").start()


async def test_a_broker_that_went_away_fails_sends_within_the_request_timeout() -> None:
    async with local_broker("embedded") as broker:
        kafka = broker.kafka_settings(Kafka(partitions=2))
        await apply_topics(kafka)
        topic = load_topics(kafka).scores.name
        hasty = msgspec.structs.replace(kafka, request_timeout_ms=HASTY_MS)
        async with Producer(hasty, client_id="test") as producer:
            await producer.send_and_wait(topic, b"", partition=0)
            broker.stop()
            with pytest.raises(BrokerUnavailable, match=f"{HASTY_MS} ms"):
                await asyncio.wait_for(producer.send_and_wait(topic, b"", partition=0), WITHIN_S)
