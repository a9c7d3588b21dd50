"""Following a topic without a group, on each broker."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka.conn import AIOKafkaConnection
from aiokafka.protocol.fetch import FetchRequest

from relaygr_stream.bus import embedded
from relaygr_stream.bus.aiokafka_compat import MOST_AT_ONCE
from relaygr_stream.bus.contents import read_back
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import RELAXED_MS, TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.errors import BrokerUnavailable
from relaygr_stream.ops.brokers.local import LocalBroker, local_broker
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import load_topics
from tests import needs
from tests.conftest import AnyBroker
from tests.waiting import WITHIN_S, until


async def test_earliest_has_everything_when_started_and_follows(kafka_settings: Kafka) -> None:
    await apply_topics(kafka_settings)
    topic = load_topics(kafka_settings).worker_status.name
    read: list[Record] = []
    async with Producer(kafka_settings, client_id="test") as producer:
        for number in range(20):
            await producer.send_and_wait(topic, str(number).encode(), key=b"worker")
        async with TopicTail(kafka_settings, topic, [0], "earliest", read.extend):
            assert [record.value for record in read] == [str(number).encode() for number in range(20)]
            await producer.send_and_wait(topic, b"20", key=b"worker")
            await until(lambda: len(read) == 21, "followed")


async def test_earliest_on_an_empty_topic_starts_at_once(kafka_settings: Kafka) -> None:
    await apply_topics(kafka_settings)
    topic = load_topics(kafka_settings).worker_status.name
    read: list[Record] = []
    async with TopicTail(kafka_settings, topic, [0], "earliest", read.extend):
        assert read == []


async def test_recent_has_the_newest_and_follows_however_long_the_log(
    kafka_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaygr_stream.bus.tail.RECENT_RECORDS", 5)
    await apply_topics(kafka_settings)
    topic = load_topics(kafka_settings).worker_status.name
    read: list[Record] = []
    async with Producer(kafka_settings, client_id="test") as producer:
        async with TopicTail(kafka_settings, topic, [0], "recent", read.extend):
            assert read == []
        for number in range(20):
            await producer.send_and_wait(topic, str(number).encode(), key=b"worker")
        async with TopicTail(kafka_settings, topic, [0], "recent", read.extend):
            assert [record.offset for record in read] == list(range(15, 20))
            await producer.send_and_wait(topic, None, key=b"worker")
            await until(lambda: len(read) == 6, "followed")
            assert read[-1].value is None


async def test_a_log_is_read_back_in_growing_chunks(kafka_settings: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaygr_stream.bus.contents.FIRST_CHUNK", 5)
    await apply_topics(kafka_settings)
    topic = load_topics(kafka_settings).worker_status.name
    assert [chunk async for chunk in read_back(kafka_settings, topic)] == []
    async with Producer(kafka_settings, client_id="test") as producer:
        for number in range(20):
            await producer.send_and_wait(topic, str(number).encode(), key=b"worker")
    chunks = [[record.offset for record in chunk] async for chunk in read_back(kafka_settings, topic)]
    assert chunks == [list(range(15, 20)), list(range(5, 15)), list(range(5))]


async def test_latest_has_what_comes_after_the_start_and_only_its_partitions(kafka_settings: Kafka) -> None:
    await apply_topics(kafka_settings)
    topic = load_topics(kafka_settings).scores.name
    read: list[Record] = []
    async with Producer(kafka_settings, client_id="test") as producer:
        await producer.send_and_wait(topic, b"before", partition=3)
        async with TopicTail(kafka_settings, topic, [3], "latest", read.extend) as tail:
            await producer.send_and_wait(topic, b"elsewhere", partition=4)
            await producer.send_and_wait(topic, b"after", partition=3)
            await tail.catch_up()
            assert [record.value for record in read] == [b"after"]


@pytest.mark.parametrize(("how", "every_s"), [({"relaxed": True}, RELAXED_MS / 1e3), ({"pause_s": 0.3}, 0.3)], ids=str)
async def test_a_tail_that_may_be_late_reads_many_at_a_time_and_misses_none(
    kafka_settings: Kafka, how: dict[str, Any], every_s: float
) -> None:
    await apply_topics(kafka_settings)
    topic = load_topics(kafka_settings).scores.name
    read: list[Record] = []
    calls = 0

    def take(records: list[Record]) -> None:
        nonlocal calls
        calls += 1
        read.extend(records)

    async with (
        Producer(kafka_settings, client_id="test") as producer,
        TopicTail(kafka_settings, topic, [3, 4], "latest", take, **how) as tail,
    ):
        began = time.monotonic()
        for number in range(40):
            await producer.send_and_wait(topic, str(number).encode(), partition=3 + number % 2)
            await asyncio.sleep(0.03)  # another tail has each one by then
        assert calls <= 2 * (1 + (time.monotonic() - began) / every_s)  # of two partitions
        await tail.catch_up()
        assert sorted(int(record.value or b"") for record in read) == list(range(40))
        await tail.catch_up()
        assert len(read) == 40


def _own_kafka(folder: Path) -> AbstractAsyncContextManager[LocalBroker]:
    needs.kafka_home()  # a broker named by RELAYGR_TEST_BOOTSTRAP is not ours to restart
    return local_broker("kafka", folder=folder)


@pytest.mark.kafka  # the embedded broker forgets its topics, and does not tell readers that their offsets are gone
async def test_a_tail_outlives_a_restart_of_its_broker(tmp_path: Path) -> None:
    async with _own_kafka(tmp_path) as own:
        kafka = own.kafka_settings(Kafka(partitions=2, request_timeout_ms=5000))
        await apply_topics(kafka)
        topic = load_topics(kafka).scores.name
        read: list[Record] = []
        async with TopicTail(kafka, topic, [0], "latest", read.extend) as tail:
            async with Producer(kafka, client_id="test") as producer:
                for number in range(3):
                    await producer.send_and_wait(topic, str(number).encode(), partition=0)
            await until(lambda: len(read) == 3, "read")
            own.stop()
            await asyncio.sleep(0.3)
            await own.start()
            async with Producer(kafka, client_id="test") as producer:
                await producer.send_and_wait(topic, b"later", partition=0)
            await until(lambda: read[-1].value == b"later", "read after the restart")
            assert not tail.failed.done()


async def test_no_broker_is_said_at_once(kafka_settings: Kafka) -> None:
    nowhere = msgspec.structs.replace(kafka_settings, bootstrap="127.0.0.1:1")
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        await TopicTail(nowhere, "topic", [0], "latest", lambda records: None).start()


async def test_an_exception_in_the_callback_is_seen_and_raised_by_who_catches_up(kafka_settings: Kafka) -> None:
    await apply_topics(kafka_settings)
    topic = load_topics(kafka_settings).scores.name

    def break_down(records: list[Record]) -> None:
        raise ArithmeticError("a bug of the reader's")

    async with (
        Producer(kafka_settings, client_id="test") as producer,
        TopicTail(kafka_settings, topic, [0], "latest", break_down) as tail,
    ):
        await producer.send_and_wait(topic, b"0", partition=0)
        await asyncio.wait({tail.failed}, timeout=WITHIN_S)
        with pytest.raises(ArithmeticError):
            tail.failed.result()
        await producer.send_and_wait(topic, b"1", partition=0)  # which nobody will read
        with pytest.raises(ArithmeticError):
            await asyncio.wait_for(tail.catch_up(), WITHIN_S)


async def test_many_tiny_records_are_handed_out_in_bounded_numbers(kafka_settings: Kafka) -> None:
    """The rest waits as bytes: half a million in one answer to a fetch would be a gigabyte of objects."""
    await apply_topics(kafka_settings)
    topic = load_topics(kafka_settings).ranking.name
    at_once: list[int] = []
    count = 3 * MOST_AT_ONCE
    async with Producer(kafka_settings, client_id="test") as producer:
        sent = [await producer.send(topic, b"", partition=0) for _ in range(count)]
        await asyncio.gather(*sent)
    async with TopicTail(kafka_settings, topic, [0], "earliest", lambda records: at_once.append(len(records))):
        await until(lambda: sum(at_once) == count, "all read")
    assert max(at_once) <= MOST_AT_ONCE


@pytest.mark.parametrize("relaxed", [False, True])
async def test_fetches_wait_as_the_broker_at_hand_needs_it(
    broker: AnyBroker, kafka_settings: Kafka, monkeypatch: pytest.MonkeyPatch, relaxed: bool
) -> None:
    """The embedded broker answers no waiting fetch early: by default the first latencies of a newcomer were 100 ms."""
    waits: set[int] = set()
    send = AIOKafkaConnection.send

    def noting(self: Any, request: Any, expect_response: bool = True) -> Any:
        if isinstance(request, FetchRequest):
            waits.add(request._max_wait_ms)
        return send(self, request, expect_response)

    monkeypatch.setattr(AIOKafkaConnection, "send", noting)
    await apply_topics(kafka_settings)
    topic = load_topics(kafka_settings).worker_status.name
    async with TopicTail(kafka_settings, topic, [0], "latest", lambda records: None, relaxed=relaxed):
        await until(lambda: bool(waits), "a fetch")
    long = RELAXED_MS if relaxed else kafka_settings.tail_max_wait_ms
    assert waits == {embedded.EMBEDDED_FETCH_WAIT_MS if broker.kind == "embedded" and not relaxed else long}
