"""A record that the client library cannot unpack stops nobody: what is around it is read, a stand-in in its place."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import MessageSizeTooLargeError
from aiokafka.producer import message_accumulator
from aiokafka.producer import producer as producer_module
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from aiokafka.record.util import calc_crc32c
from confluent_kafka import Producer as ForeignProducer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from structlog.testing import capture_logs

from relaygr_stream.bus import unreadable
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.ops.brokers.local import LocalBroker
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.records import HEADER_UNREADABLE, Record
from relaygr_stream.wire.topic_files import load_topics
from tests.bus.members import Member, shared_out
from tests.conftest import AnyBroker, Brokers
from tests.waiting import WITHIN_S, until


class NotUtf8(str):
    """A header's name as a producer in another language may send it."""

    def encode(self, *_: Any, **__: Any) -> bytes:
        return b"\xff\xfe"


class Mislabelled(_DefaultRecordBatchBuilderPy):  # type: ignore[misc]  # untyped
    """Says of what is not compressed that it is; its checksum is right."""

    codec = 0

    def build(self) -> bytearray:
        batch = bytearray(super().build())
        struct.pack_into(">h", batch, 21, self.codec)
        struct.pack_into(">I", batch, 17, calc_crc32c(bytes(batch[21:])))
        return batch


@asynccontextmanager
async def hostile_producer(
    kafka: Kafka, builder: type[_DefaultRecordBatchBuilderPy] = _DefaultRecordBatchBuilderPy
) -> AsyncIterator[AIOKafkaProducer]:
    """aiokafka's batches are written in C, which checks names; in Python it does not."""
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap)
    await producer.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for module in (producer_module, message_accumulator):
                patch.setattr(module, "DefaultRecordBatchBuilder", builder)
            yield producer
    finally:
        await producer.stop()


async def poison(kafka: Kafka, topic: str, partition: int) -> int:
    async with hostile_producer(kafka) as producer:
        sent = await producer.send_and_wait(topic, b"bad", partition=partition, headers=[(NotUtf8("x"), b"v")])
        return int(sent.offset)


async def test_lanes_are_read_around_unreadable_records(kafka_settings: Kafka) -> None:
    await apply_topics(kafka_settings)
    topics = load_topics(kafka_settings)
    ranking = topics.ranking.name
    bad: list[int] = []
    async with Producer(kafka_settings, client_id="test") as producer:
        for number in range(3):  # before anybody reads: one fetch brings them all
            await producer.send_and_wait(ranking, f"1-{number}".encode(), partition=1)
            bad.append(await poison(kafka_settings, ranking, 1))
            bad.append(await poison(kafka_settings, ranking, 1))
            await producer.send_and_wait(ranking, f"2-{number}".encode(), partition=2)
        async with Member(kafka_settings, topics, "one") as one:
            await shared_out(topics, one)
            await until(lambda: len(one.records) == 12, "read")
            bad.append(await poison(kafka_settings, ranking, 1))
            await producer.send_and_wait(ranking, b"1-3", partition=1)
            await producer.send_and_wait(ranking, b"2-3", partition=2)
            await until(lambda: len(one.records) == 15, "read on")
            assert not one.consumer.failed.done()
            assert one.consumer.undone == 0
            for lane in (1, 2):
                mine = [record for record in one.records if record.lane == lane]
                assert [record.offset for record in mine] == list(range(len(mine))), "in order, each once"
                values = [record.value for record in mine if record.value is not None]
                assert values == [f"{lane}-{number}".encode() for number in range(4)]
            stand_ins = [record for record in one.records if record.value is None]
            assert [record.offset for record in stand_ins] == bad
            assert {name for record in stand_ins for name, _ in record.headers} == {HEADER_UNREADABLE}


async def test_a_tail_reads_around_unreadable_records_from_the_start_and_later(kafka_settings: Kafka) -> None:
    await apply_topics(kafka_settings)
    topic = load_topics(kafka_settings).scores.name
    read: list[Record] = []
    async with Producer(kafka_settings, client_id="test") as producer:
        await producer.send_and_wait(topic, b"0", partition=0)
        await poison(kafka_settings, topic, 0)
        await producer.send_and_wait(topic, b"2", partition=0)
        async with TopicTail(kafka_settings, topic, [0, 1], "earliest", read.extend) as tail:
            assert [record.value for record in read] == [b"0", None, b"2"]
            await poison(kafka_settings, topic, 1)
            await producer.send_and_wait(topic, b"1-1", partition=1)
            await until(lambda: len(read) == 5, "followed")
            assert [record.value for record in read if record.lane == 1] == [None, b"1-1"]
            assert not tail.failed.done()


def keep_compressed(kafka: Kafka, topic: str) -> None:
    """Apache Kafka then stores what it is sent as it is: a cluster of others, or one set up before us."""
    entry = ConfigEntry("compression.type", "producer", incremental_operation=AlterConfigOpType.SET)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    (changed,) = admin.incremental_alter_configs(
        [ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])]
    ).values()
    changed.result(timeout=WITHIN_S)


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_what_a_foreign_client_compressed_is_read(kafka_settings: Kafka, broker: AnyBroker, codec: str) -> None:
    await apply_topics(kafka_settings)
    topics = load_topics(kafka_settings)
    if broker.kind == "kafka":
        await asyncio.to_thread(keep_compressed, kafka_settings, topics.ranking.name)
    foreign = ForeignProducer({"bootstrap.servers": kafka_settings.bootstrap, "compression.type": codec})
    values = [bytes([number]) * 3000 for number in range(20)]
    for value in values:
        foreign.produce(topics.ranking.name, value, partition=1)
    assert await asyncio.to_thread(foreign.flush, 30) == 0
    async with Member(kafka_settings, topics, "one") as one:
        await until(lambda: len(one.records) == len(values), "read")
        assert [record.value for record in one.records] == values


async def test_what_cannot_be_unpacked_holds_up_nobody(kafka_settings: Kafka, broker: AnyBroker) -> None:
    if broker.kind != "embedded":
        pytest.skip("Apache Kafka unpacks what it takes, and refuses what it cannot")
    await apply_topics(kafka_settings)
    topics = load_topics(kafka_settings)
    ranking = topics.ranking.name
    async with (
        Producer(kafka_settings, client_id="test") as producer,
        TopicTail(kafka_settings, ranking, [0, 1], "latest", (tailed := list[Record]()).extend) as tail,
        Member(kafka_settings, topics, "one") as one,
    ):
        await shared_out(topics, one)
        for codec in (1, 2, 3, 4):
            async with hostile_producer(kafka_settings, type("Bad", (Mislabelled,), {"codec": codec})) as hostile:
                await hostile.send_and_wait(ranking, b"not compressed", partition=0)
            await producer.send_and_wait(ranking, b"good", partition=0)
            await producer.send_and_wait(ranking, b"good", partition=1)
        for records in (one.records, tailed):
            await until(lambda records=records: len(records) == 12, "read")  # type: ignore[misc]
            assert [record.value for record in records if record.lane == 0] == [None, b"good"] * 4
            assert [record.value for record in records if record.lane == 1] == [b"good"] * 4
        assert not tail.failed.done()
        assert not one.consumer.failed.done()


def change_on_disk(folder: Path, partition: str, value: bytes) -> None:
    """As a failing disk might: the broker sends what is there, and only its reader looks at the checksum."""
    (log,) = folder.glob(f"relaygr-kafka-*/data/{partition}/*.log")  # others' folders may vanish while they are read
    content = log.read_bytes()
    with log.open("r+b") as file:
        file.seek(content.index(value))
        file.write(b"X")


async def test_a_batch_changed_on_disk_is_read_around(
    kafka_settings: Kafka, broker: AnyBroker, brokers: Brokers
) -> None:
    if not (isinstance(broker, LocalBroker) and broker.kind == "kafka"):
        pytest.skip("needs a broker whose log's files are at hand: the embedded one keeps its log in memory")
    await apply_topics(kafka_settings)
    topics = load_topics(kafka_settings)
    ranking = topics.ranking.name
    producer = AIOKafkaProducer(bootstrap_servers=kafka_settings.bootstrap)
    async with producer:
        await producer.send_and_wait(ranking, b"first", partition=1)
        batch = producer.create_batch()
        for value in (b"one", b"two", b"three"):
            batch.append(key=None, value=value, timestamp=None)
        await (await producer.send_batch(batch, ranking, partition=1))
        await producer.send_and_wait(ranking, b"last", partition=1)
        change_on_disk(brokers.folder, f"{ranking}-1", b"two")
        async with Member(kafka_settings, topics, "one") as one:
            await shared_out(topics, one)
            await until(lambda: len(one.records) == 5, "read")
            assert [record.value for record in one.records] == [b"first", None, None, None, b"last"]
            assert [record.offset for record in one.records] == list(range(5))
            assert all(b"changed" in dict(record.headers)[HEADER_UNREADABLE] for record in one.records[1:4])
            assert not one.consumer.failed.done()


async def test_what_is_small_only_while_compressed_is_refused(kafka_settings: Kafka, broker: AnyBroker) -> None:
    if broker.kind != "kafka":
        pytest.skip("the embedded broker does not unpack what it stores")
    await apply_topics(kafka_settings)
    ranking = load_topics(kafka_settings).ranking
    producer = AIOKafkaProducer(
        bootstrap_servers=kafka_settings.bootstrap,
        compression_type="gzip",
        max_request_size=1 << 30,
        max_batch_size=1 << 24,
    )
    consumer = AIOKafkaConsumer(ranking.name, bootstrap_servers=kafka_settings.bootstrap, auto_offset_reset="earliest")
    async with producer, consumer:
        with pytest.raises(MessageSizeTooLargeError):
            await producer.send_and_wait(ranking.name, bytes(4 * ranking.max_message_bytes), partition=0)
        await producer.send_and_wait(ranking.name, bytes(1000), partition=0)  # compressed all the same: welcome
        assert (await consumer.getone()).value == bytes(1000)


async def test_what_was_unreadable_before_is_no_news_to_who_looks_again(
    kafka_settings: Kafka, broker: AnyBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each `relaygr status` warned of the same record, which a broker left behind that came back."""
    if broker.kind != "embedded":
        pytest.skip("Apache Kafka refuses such a record for a compacted topic")
    await apply_topics(kafka_settings)
    monkeypatch.setattr(unreadable, "limited", LogLimiter().limited)  # other tests' lines do not count
    topic, read = load_topics(kafka_settings).worker_status.name, list[Record]()
    await poison(kafka_settings, topic, 0)
    with capture_logs() as lines:
        async with TopicTail(kafka_settings, topic, [0], "recent", read.extend):
            assert [record.value for record in read] == [None]
            assert [line["log_level"] for line in lines if line["event"] == "record unreadable"] == ["debug"]
            await poison(kafka_settings, topic, 0)
            await until(lambda: len(read) == 2, "followed")
    assert [line["log_level"] for line in lines if line["event"] == "record unreadable"] == ["debug", "warning"]
