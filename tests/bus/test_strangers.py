"""Members that are not of this program in our groups: each is named, and the consumer says so until it has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberMetadata
from confluent_kafka import Consumer

from relaygr_stream.bus.assignor import StickyLaneAssignor
from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.errors import BrokerError
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.topic_files import TopicSet, load_topics
from tests.bus.members import Member
from tests.conftest import AnyBroker
from tests.waiting import until


@pytest.fixture
async def topics(broker: AnyBroker, kafka_settings: Kafka) -> TopicSet:
    if broker.kind == "embedded":
        pytest.skip("the embedded broker describes no groups")
    await apply_topics(kafka_settings)
    return load_topics(kafka_settings)


@asynccontextmanager
async def librdkafka(kafka: Kafka, topics: Sequence[str], **options: str) -> AsyncIterator[None]:
    """A consumer of another library in the workers' group, which polls."""
    consumer = Consumer({
        "bootstrap.servers": kafka.bootstrap, "group.id": f"{kafka.prefix}workers", "client.id": "debugger", **options
    })  # fmt: skip
    consumer.subscribe(list(topics))
    going = True

    async def poll() -> None:
        while going:
            await asyncio.to_thread(consumer.poll, 0.1)

    polling = asyncio.create_task(poll())
    try:
        yield
    finally:
        going = False
        await polling
        await asyncio.to_thread(consumer.close)


@asynccontextmanager
async def python(kafka: Kafka, topics: Sequence[str], assignor: Any) -> AsyncIterator[None]:
    consumer = AIOKafkaConsumer(
        *topics,
        bootstrap_servers=kafka.bootstrap,
        group_id=f"{kafka.prefix}workers",
        client_id="debugger",
        partition_assignment_strategy=[assignor],
    )
    await consumer.start()
    try:
        yield
    finally:
        await consumer.stop()


class Garbage(AbstractPartitionAssignor):  # type: ignore[misc]  # aiokafka is untyped
    """Has our assignor's name, states no claim, and gives everything to whoever comes first."""

    name = StickyLaneAssignor.name

    @classmethod
    def assign(cls, cluster: Any, members: Any) -> Any:
        return RangePartitionAssignor.assign(cluster, members)

    @classmethod
    def metadata(cls, topics: Any) -> Any:
        return ConsumerProtocolMemberMetadata(0, sorted(topics), b"\xc1garbage")

    @classmethod
    def on_assignment(cls, assignment: Any) -> None:
        pass


def names_it(consumer: LaneConsumer, why: str) -> bool:
    told = consumer.trouble or ""
    return "'debugger'" in told and "127.0.0.1" in told and why in told and not consumer.healthy


@pytest.mark.parametrize("first", ["ours", "theirs"])
async def test_a_consumer_of_the_new_protocol(kafka_settings: Kafka, topics: TopicSet, first: str) -> None:
    kafka = kafka_settings
    stranger = librdkafka(kafka, [topics.ranking.name], **{"group.protocol": "consumer"})
    why = "uses group.protocol=consumer"
    if first == "ours":
        async with Member(kafka, topics, "one") as one:
            await until(lambda: len(one.lanes) == topics.lanes, "all lanes")
            async with stranger:
                await until(lambda: names_it(one.consumer, why), "the stranger is named")
            await until(lambda: one.consumer.trouble is None, "the stranger is gone")
            await until(lambda: len(one.lanes) == topics.lanes, "all lanes again")
        return
    async with stranger, Member(kafka, topics, "one") as one:
        await until(lambda: names_it(one.consumer, why), "the stranger is named")


@pytest.mark.parametrize(
    ("topic", "why"), [("ranking", "states no claim on lanes"), ("retrieval", "retrieval")], ids=["claim", "topics"]
)
@pytest.mark.parametrize("first", ["ours", "theirs"])
async def test_a_member_with_our_assignors_name(
    kafka_settings: Kafka, topics: TopicSet, first: str, topic: str, why: str
) -> None:
    read = [topics.pre_infer.name, topics.ranking.name] if topic == "ranking" else [topics.retrieval.name]
    if first == "ours":
        async with Member(kafka_settings, topics, "one") as one:
            async with python(kafka_settings, read, Garbage):
                await until(lambda: names_it(one.consumer, why), "the stranger is named")
                await until(lambda: len(one.lanes) == topics.lanes, "a stranger gets no lanes")
            await until(lambda: one.consumer.trouble is None, "the stranger is gone")
        return
    async with python(kafka_settings, read, Garbage), Member(kafka_settings, topics, "one") as one:
        await until(lambda: names_it(one.consumer, why), "the stranger is named")


@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
async def test_a_consumer_with_another_assignor_is_named_by_who_cannot_join(
    kafka_settings: Kafka, topics: TopicSet, assignor: str
) -> None:
    options = {"partition.assignment.strategy": assignor}
    async with librdkafka(kafka_settings, [topics.ranking.name], **options):
        error: BrokerError | None = None

        async def refused() -> bool:
            nonlocal error
            try:
                async with Member(kafka_settings, topics, "one"):
                    return False
            except BrokerError as raised:
                error = raised
                return True

        async with asyncio.timeout(30):  # it may take a moment until the other has joined
            while not await refused():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert f"'debugger', host 127.0.0.1) uses the assignor '{assignor}'" in str(error)
