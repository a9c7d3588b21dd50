"""The producer on each broker: offsets, partitions, and its typed errors."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
import pytest

from relaygr_stream.bus.local import local_broker
from relaygr_stream.bus.producer import Producer
from relaygr_stream.errors import BrokerError, BrokerUnavailable, TopicError
from relaygr_stream.settings import Kafka
from relaygr_stream.topics import apply_topics, load_topics
from tests.conftest import AnyBroker


async def test_offsets_count_up_per_partition(kafka_settings: Kafka) -> None:
    await apply_topics(kafka_settings)
    topic = load_topics(kafka_settings).scores.name
    choices: list[Literal["all", 1]] = ["all", 1]
    for acks in choices:
        async with Producer(kafka_settings, client_id="test", acks=acks) as producer:
            first = await producer.send_and_wait(topic, b"0", partition=2)
            sent = [await producer.send(topic, b"x", partition=2) for _ in range(50)]
            await producer.flush()
            assert [future.result() for future in sent] == list(range(first + 1, first + 51))


async def test_what_cannot_be_sent_says_why(broker: AnyBroker, kafka_settings: Kafka) -> None:
    await apply_topics(kafka_settings)
    topic = load_topics(kafka_settings).scores.name
    hasty = msgspec.structs.replace(kafka_settings, request_timeout_ms=500)
    async with Producer(hasty, client_id="test", max_bytes=5000) as producer:
        with pytest.raises(BrokerError, match="6000 bytes with headers exceed the 5000"):
            await producer.send(topic, bytes(6000), partition=0)
        with pytest.raises(TopicError, match=f"{topic} has no partition 99"):
            await producer.send(topic, b"", partition=99)
        if broker.kind == "kafka":  # the embedded broker makes any topic that is named
            with pytest.raises(TopicError, match=r"nowhere.*relaygr topics apply"):
                await producer.send("nowhere", b"", partition=0)
        assert await producer.send_and_wait(topic, b"", partition=0) == 0


async def test_no_broker_is_said_at_once(kafka_settings: Kafka) -> None:
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        await Producer(msgspec.structs.replace(kafka_settings, bootstrap="127.0.0.1:1"), client_id="test").start()


async def test_a_broker_that_went_away_fails_sends_within_the_request_timeout() -> None:
    async with local_broker("embedded") as broker:
        kafka = broker.kafka_settings(Kafka(request_timeout_ms=500))
        await apply_topics(kafka)
        topic = load_topics(kafka).scores.name
        async with Producer(kafka, client_id="test") as producer:
            await producer.send_and_wait(topic, b"", partition=0)
            broker.stop()
            with pytest.raises(BrokerUnavailable, match="500 ms"):
                await asyncio.wait_for(producer.send_and_wait(topic, b"", partition=0), 10)
