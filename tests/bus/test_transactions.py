"""Senders that use transactions: the markers at a log's end are no lag."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from confluent_kafka import Producer as Transactional

from relaygr_stream.bus.ages import LogEnds
from relaygr_stream.bus.contents import read_all
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.topic_files import load_topics
from tests.bus.members import Member
from tests.conftest import AnyBroker
from tests.waiting import until


@pytest.mark.parametrize("end", ["commit", "abort"])
async def test_a_log_that_ends_with_a_marker_is_read_and_committed_to_its_end(
    broker: AnyBroker, kafka_settings: Kafka, end: str
) -> None:
    if broker.kind == "embedded":
        pytest.skip("the embedded broker knows no transactions")
    kafka = kafka_settings
    await apply_topics(kafka)
    topics = load_topics(kafka)
    name, tp = topics.ranking.name, TopicPartition(topics.ranking.name, 3)

    def send() -> None:
        producer = Transactional({"bootstrap.servers": kafka.bootstrap, "transactional.id": f"{kafka.prefix}sender"})
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(name, b"one", partition=3)
        producer.flush(60)
        (producer.commit_transaction if end == "commit" else producer.abort_transaction)(60)

    async with (
        Member(kafka, topics, "one") as one,
        LogEnds(kafka, "test") as ends,
        AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, group_id=f"{kafka.prefix}workers") as observer,
    ):
        await until(lambda: len(one.lanes) == topics.lanes, "all lanes")
        await asyncio.to_thread(send)
        await until(lambda: one.values == [b"one"], "read")
        log_end = 2  # behind a record and a marker

        async def ended() -> bool:
            found = await ends.ask(name, [3])
            return 3 in found and found[3].offset == log_end

        await until(ended, "the log has a record and a marker")
        await until(lambda: one.consumer.position(name, 3) == log_end, "the marker is passed")

        async def committed() -> bool:
            return bool(await observer.committed(tp) == log_end)

        await until(committed, "committed up to the end")
        assert len(await read_all(kafka, name, [3])) == 1
