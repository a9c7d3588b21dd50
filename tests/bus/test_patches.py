"""What aiokafka does wrong when brokers, topics and leaders come and go, and the package's patches mend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.conn import AIOKafkaConnection
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.structs import BrokerMetadata

from relaygr_stream.bus import aiokafka_compat, aiokafka_patches
from relaygr_stream.bus.aiokafka_compat import client_options
from relaygr_stream.bus.aiokafka_patches import RETRY_BACKOFF_MS
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.errors import BrokerError
from relaygr_stream.ops.brokers.local import LocalBroker, local_broker
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import TopicSet, load_topics
from tests.bus.members import Member
from tests.waiting import WITHIN_S, until


@pytest.fixture
async def topics(embedded_settings: Kafka) -> TopicSet:
    await apply_topics(embedded_settings)
    return load_topics(embedded_settings)


async def test_metadata_are_asked_for_with_a_pause(
    embedded_settings: Kafka, topics: TopicSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a partition had no leader, each client sent thousands of requests a second."""
    asked: list[Sequence[str] | None] = []
    send = AIOKafkaConnection.send

    def counting(self: Any, request: Any, expect_response: bool = True) -> Any:
        if isinstance(request, MetadataRequest):
            asked.append(request._topics)
        return send(self, request, expect_response)

    monkeypatch.setattr(AIOKafkaConnection, "send", counting)
    options = client_options(embedded_settings, "test")
    client = AIOKafkaClient(**options)
    await client.bootstrap()
    try:
        await client.set_topics([topics.ranking.name])
        asked.clear()
        began = time.monotonic()
        for _ in range(10):
            await client.force_metadata_update()
        assert time.monotonic() - began > 9 * RETRY_BACKOFF_MS / 1000
        assert len(asked) == 10
        await client.set_topics([topics.ranking.name, topics.scores.name])  # others are asked for at once
        assert len(asked) == 11
    finally:
        await client.close()


async def test_a_client_without_topics_asks_for_none(kafka_settings: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asked for all topics of the cluster, and once it knew its own from them, for all again and again."""
    await apply_topics(kafka_settings)
    asked: list[MetadataRequest] = []

    def noting(self: Any, request: Any, expect_response: bool = True) -> Any:
        if isinstance(request, MetadataRequest):
            asked.append(request)
        return aiokafka_patches.send(self, request, expect_response)  # as outside of the tests

    monkeypatch.setattr(AIOKafkaConnection, "send", noting)
    monkeypatch.setattr(aiokafka_compat, "METADATA_MS", 20)
    name = load_topics(kafka_settings).retrieval.name
    async with Producer(kafka_settings, client_id="test") as producer:
        await until(lambda: len(asked) >= 3)
        await producer.send_and_wait(name, b"", key=b"u")
        await until(lambda: len(asked) >= 6)
    assert all(request._topics is not None for request in asked)  # None: all
    assert {topic for request in asked for topic in request._topics} <= {name}


@asynccontextmanager
async def door_to(target: list[LocalBroker]) -> AsyncIterator[int]:
    """A port that leads to the broker `target[0]`, as a load balancer's does."""

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
        except OSError:
            pass
        finally:
            writer.close()

    async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = target[0].bootstrap.rpartition(":")
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(pipe(reader, back), pipe(there, writer))

    async with await asyncio.start_server(enter, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_a_broker_that_answers_nothing_keeps_no_other_from_being_connected(embedded_settings: Kafka) -> None:
    came, ends = asyncio.Event(), asyncio.Event()

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        await ends.wait()
        writer.close()

    client = AIOKafkaClient(**client_options(embedded_settings, "test"))
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        await client.bootstrap()
        try:
            (node,) = (broker.nodeId for broker in client.cluster.brokers())
            client.cluster._brokers[999] = BrokerMetadata(999, *server.sockets[0].getsockname(), None)
            hangs = asyncio.create_task(client._get_conn(999))
            await came.wait()
            assert await client._get_conn(node, group=ConnectionGroup.COORDINATION)
            assert not hangs.done()
            ends.set()
            assert await hangs is None
        finally:
            await client.close()


async def test_brokers_that_come_back_at_other_addresses_are_found_by_bootstrap(tmp_path: Path) -> None:
    """Clients asked only the brokers that they knew, for ever."""
    async with local_broker("embedded", folder=tmp_path) as old, local_broker("embedded", folder=tmp_path) as new:
        target = [old]
        async with door_to(target) as port:
            kafka = old.kafka_settings(Kafka(partitions=2, request_timeout_ms=3000))
            kafka = msgspec.structs.replace(kafka, bootstrap=f"127.0.0.1:{port}")
            await apply_topics(kafka)
            topic = load_topics(kafka).ranking.name
            async with Producer(kafka, client_id="test") as producer:
                await producer.send_and_wait(topic, b"old", partition=0)
                old.stop()
                target[0] = new
                await apply_topics(kafka)
                async with asyncio.timeout(WITHIN_S):
                    while True:
                        try:
                            assert await producer.send_and_wait(topic, b"new", partition=0) == 0
                            break
                        except BrokerError:
                            continue


@pytest.mark.parametrize("code", [14, 16], ids=["loading", "moved"])
async def test_a_coordinator_that_cannot_say_what_was_committed_is_asked_again(
    embedded_settings: Kafka, topics: TopicSet, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Its answer was read as "nothing was committed", and lanes were read again from their start."""
    async with Producer(embedded_settings, client_id="test") as producer:
        async with Member(embedded_settings, topics, "one") as one:
            for _ in range(5):
                await producer.send_and_wait(topics.ranking.name, b"done", partition=0)
            await until(lambda: len(one.records) == 5, "read")
        failed: list[Any] = []
        real = aiokafka_patches._send_req

        async def first_fails(self: Any, request: Any) -> Any:
            answer = await real(self, request)
            fetched = answer.topics if isinstance(request, OffsetFetchRequest) and not failed else []
            if any(offset == 5 for _, lanes in fetched for _, offset, *_ in lanes):
                failed.append(answer)
                answer.topics, answer.error_code = [], code
            return answer

        monkeypatch.setattr(aiokafka_patches, "_send_req", first_fails)
        async with Member(embedded_settings, topics, "two") as two:
            await until(lambda: two.lanes == set(range(topics.lanes)), "all lanes")
            await producer.send_and_wait(topics.ranking.name, b"new", partition=0)
            await until(lambda: b"new" in two.values, "read on")
            assert two.values == [b"new"]
        assert failed


@pytest.mark.stack
async def test_topics_deleted_and_made_again_are_served_again_from_their_start(
    kafka_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that rejoined while they were missing had no lanes for five minutes. Its commit for the old log was
    repeated until the topic was made again, and accepted then: that many records of the new one were skipped."""
    monkeypatch.setattr(aiokafka_compat, "METADATA_MS", 500)
    await apply_topics(kafka_settings)
    topics = load_topics(kafka_settings)
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_settings.bootstrap)
    await admin.start()
    try:
        async with (
            Producer(kafka_settings, client_id="test") as producer,
            Member(kafka_settings, topics, "one", finish=False) as one,
        ):
            for _ in range(50):
                await producer.send_and_wait(topics.ranking.name, b"old", partition=0)
            await until(lambda: len(one.records) == 50, "read")
            await admin.delete_topics([topic.name for topic in topics.all])
            for record in one.records:
                one.consumer.done(record)
            await until(lambda: not one.lanes, "no lanes")
            await apply_topics(kafka_settings)
            sent = [str(number).encode() for number in range(80)]
            for value in sent:
                await producer.send_and_wait(topics.ranking.name, value, partition=0)
            await until(lambda: one.values[-1:] == sent[-1:], "read on")
            assert one.values[50:] == sent
    finally:
        await admin.close()


async def test_a_tail_does_not_wait_for_offsets_that_its_log_no_longer_has(
    embedded_settings: Kafka, topics: TopicSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, said = AIOKafkaConsumer.end_offsets, list[int]()

    async def before_it_was_made_anew(self: Any, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        ends = await real(self, partitions)
        said.append(len(ends))
        return {partition: end + 1000 for partition, end in ends.items()} if len(said) == 1 else ends

    read: list[Record] = []
    async with Producer(embedded_settings, client_id="test") as producer:
        await producer.send_and_wait(topics.worker_status.name, b"status", partition=0)
    monkeypatch.setattr(AIOKafkaConsumer, "end_offsets", before_it_was_made_anew)
    async with TopicTail(embedded_settings, topics.worker_status.name, [0], "earliest", read.extend):
        assert [record.value for record in read] == [b"status"]
