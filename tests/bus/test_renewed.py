"""A background task of aiokafka's ends by an error that aiokafka does not expect: it is seen, and what it did goes on,
with nothing lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import TopicAuthorizationFailedError

from relaygr_stream.bus import ages, renewed
from relaygr_stream.bus.ages import LogEnds
from relaygr_stream.bus.aiokafka_compat import client_options
from relaygr_stream.bus.producer import Outgoing, Producer
from relaygr_stream.bus.renewed import ClientUser, Renewed, background_tasks, renewals
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.errors import AccessDenied, BrokerError
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import TopicSet, load_topics
from tests.bus import insides
from tests.bus.insides import fail_fetcher, fail_sender
from tests.bus.members import Member, shared_out
from tests.waiting import WITHIN_S, until

READER = "the lanes' reader"


@pytest.fixture
async def topics(embedded_settings: Kafka) -> TopicSet:
    await apply_topics(embedded_settings)
    return load_topics(embedded_settings)


@pytest.fixture
async def producer(embedded_settings: Kafka, topics: TopicSet) -> AsyncIterator[Producer]:
    async with Producer(embedded_settings, client_id="test") as producer:
        yield producer


def cancel(name: str) -> Callable[[Any], None]:
    def break_it(client: Any) -> None:
        background_tasks(client)[name].cancel()

    return break_it


async def made_anew(part: str, times: int) -> None:
    await until(lambda: renewals[part] >= times, f"{part} made anew {times} times")


async def has_read(member: Member, records: int) -> None:
    await until(lambda: len(member.records) >= records, f"{records} read")


def refuse(client: Any) -> None:
    """The next read is refused, before it takes anything."""

    async def getmany(*_: Any, **__: Any) -> None:
        raise TopicAuthorizationFailedError("ranking")

    client.getmany = getmany


READER_ENDS = [fail_fetcher, cancel("fetcher"), cancel("positions"), cancel("metadata of the consumer")]


async def test_all_background_tasks_are_known(embedded_settings: Kafka, topics: TopicSet) -> None:
    """aiokafka keeps them to itself: a release that names one otherwise must not go unnoticed."""
    async with Producer(embedded_settings, client_id="test") as producer, Member(embedded_settings, topics, "one") as m:
        assert set(background_tasks(insides.renewed(producer).client)) == {"sender", "metadata of the producer"}
        reader = {"fetcher", "positions", "metadata of the consumer"}
        assert set(background_tasks(insides.renewed(m.consumer).client)) == reader
        group = {"fetcher", "coordinator", "metadata of the consumer"}
        assert set(background_tasks(insides.member(m.consumer))) == group


@pytest.mark.parametrize("break_it", [*READER_ENDS, refuse])
async def test_lanes_are_read_on(
    embedded_settings: Kafka, topics: TopicSet, producer: Producer, break_it: Callable[[Any], None]
) -> None:
    async with Member(embedded_settings, topics, "one") as one:
        await shared_out(topics, one)
        before = renewals[READER]
        for turn in range(2):
            break_it(insides.renewed(one.consumer).client)
            for lane in range(topics.lanes):
                for number in range(10):
                    await producer.send(topics.ranking.name, f"{turn}-{lane}-{number}".encode(), partition=lane)
            await made_anew(READER, before + turn + 1)
            await has_read(one, (turn + 1) * topics.lanes * 10)
        sent = [f"{turn}-{lane}-{n}".encode() for lane in range(topics.lanes) for turn in range(2) for n in range(10)]
        read = sorted(one.records, key=lambda record: record.lane)
        assert [record.value for record in read] == sent, "each once, in order"
        await until(lambda: one.consumer.healthy, "healthy again")
        assert one.gained() == [*range(topics.lanes)], "the lanes never went"


async def test_a_reader_that_always_ends_ends_the_consumer(
    embedded_settings: Kafka, topics: TopicSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewed, "PAUSES_S", (0.0,))
    async with Member(embedded_settings, topics, "one") as one:
        await shared_out(topics, one)
        reader = insides.renewed(one.consumer)

        async def fail_each() -> None:
            failed = None
            while True:
                if reader.client is not failed:
                    failed = reader.client
                    fail_fetcher(failed)
                await asyncio.sleep(0.01)

        failing = asyncio.create_task(fail_each())
        with pytest.raises(BrokerError, match=r"lanes' reader has ended 5 times in a row: its fetcher .*KeyError"):
            await asyncio.wait_for(asyncio.shield(one.consumer.failed), WITHIN_S)
        failing.cancel()
        assert not one.consumer.healthy


async def test_a_reader_that_is_always_refused_ends_the_consumer_and_says_why(
    embedded_settings: Kafka, topics: TopicSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewed, "PAUSES_S", (0.0,))
    real = AIOKafkaConsumer.getmany

    async def getmany(consumer: AIOKafkaConsumer, *partitions: Any, **options: Any) -> Any:
        if options["timeout_ms"]:  # not the membership's
            raise TopicAuthorizationFailedError("ranking")
        return await real(consumer, *partitions, **options)

    async with Member(embedded_settings, topics, "one") as one:
        await shared_out(topics, one)
        monkeypatch.setattr(AIOKafkaConsumer, "getmany", getmany)
        with pytest.raises(AccessDenied, match=r"lanes' reader has ended 5 times in a row: .* lacks an ACL"):
            await asyncio.wait_for(asyncio.shield(one.consumer.failed), WITHIN_S)


@pytest.mark.parametrize("name", ["coordinator", "fetcher", "metadata of the consumer"])
async def test_a_member_that_cannot_go_on_ends_the_consumer(
    embedded_settings: Kafka, topics: TopicSet, name: str
) -> None:
    async with Member(embedded_settings, topics, "one") as one:
        await shared_out(topics, one)
        background_tasks(insides.member(one.consumer))[name].cancel()
        with pytest.raises(BrokerError, match=f"cannot take part in group .*workers: its {name} task ended"):
            await asyncio.wait_for(asyncio.shield(one.consumer.failed), WITHIN_S)


async def test_a_heartbeat_that_fails_unexpectedly_ends_the_consumer_with_a_typed_error(
    embedded_settings: Kafka, topics: TopicSet
) -> None:
    async with Member(embedded_settings, topics, "one") as one:
        await shared_out(topics, one)
        insides.fail_heartbeat(insides.member(one.consumer))
        with pytest.raises(BrokerError, match=r"cannot take part in group .*KeyError"):
            await asyncio.wait_for(asyncio.shield(one.consumer.failed), WITHIN_S)


@pytest.mark.parametrize("break_it", [fail_sender, cancel("sender"), cancel("metadata of the producer")])
async def test_a_producer_sends_on(embedded_settings: Kafka, topics: TopicSet, break_it: Callable[[Any], None]) -> None:
    name = topics.ranking.name
    async with Producer(embedded_settings, client_id="test") as producer:
        first = await producer.send_and_wait(name, b"0", partition=1)
        before = renewals["a producer"]
        break_it(insides.renewed(producer).client)
        with_it = await asyncio.wait_for(
            asyncio.gather(producer.send(name, b"1", partition=1), return_exceptions=True), 30
        )
        if isinstance(with_it[0], asyncio.Future):  # it got in before the end was seen: then it is told
            await asyncio.wait({with_it[0]}, timeout=WITHIN_S)
            assert with_it[0].done()
        await until(lambda: renewals["a producer"] > before, "made anew")
        settled: list[int | BrokerError] = []

        def settle(_: int, outcome: int | BrokerError) -> None:
            settled.append(outcome)

        await producer.send_together(name, [Outgoing(None, b"2")], partition=1, settled=settle)
        assert await producer.send_and_wait(name, b"3", partition=1) > first
        await until(lambda: settled, "settled")
        assert not isinstance(settled[0], BrokerError)
        assert producer.trouble is None


@pytest.mark.parametrize("break_it", READER_ENDS)
async def test_a_tail_reads_on(
    embedded_settings: Kafka, topics: TopicSet, producer: Producer, break_it: Callable[[Any], None]
) -> None:
    read: list[Record] = []
    async with TopicTail(embedded_settings, topics.scores.name, [0], "latest", read.extend) as tail:
        part = insides.renewed(tail).part
        before = renewals[part]
        for number in range(4):
            await producer.send_and_wait(topics.scores.name, str(number).encode(), partition=0)
            if number % 2:
                made = renewals[part]
                break_it(insides.renewed(tail).client)
                await made_anew(part, made + 1)
        await until(lambda: len(read) >= 4, "read")
        assert [record.value for record in read] == [b"0", b"1", b"2", b"3"]
        assert renewals[part] == before + 2
        assert not tail.failed.done()


@pytest.mark.parametrize("break_it", READER_ENDS[1:])  # it fetches nothing
async def test_ends_are_told_on(
    embedded_settings: Kafka, topics: TopicSet, break_it: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ages, "ANSWER_S", 60.0)
    async with LogEnds(embedded_settings, "test") as ends:
        part = insides.renewed(ends).part
        before = renewals[part]
        break_it(insides.renewed(ends).client)
        await made_anew(part, before + 1)
        assert set(await ends.ask(topics.ranking.name, range(topics.lanes))) == set(range(topics.lanes))


async def test_a_replacement_that_fails_unexpectedly_is_tried_again(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewed, "PAUSES_S", (0.0,))
    troubles: list[str | None] = []

    class User(ClientUser):
        async def begin_client(self, client: Any) -> None:
            troubles.append(reader.trouble)
            if len(troubles) in (2, 3):
                insides.unexpected()

        def make_client(self) -> AIOKafkaConsumer:
            return AIOKafkaConsumer(**client_options(embedded_settings, "test"), group_id=None)

    reader = Renewed(embedded_settings, "a test's reader", User())
    await reader.start()
    first = reader.client
    reader.renew("for this test")
    await until(lambda: reader.client is not first and reader.trouble is None, "replaced")
    expected = "which aiokafka does not expect"
    assert [trouble and (expected in trouble) for trouble in troubles] == [None, False, True, True]
    assert not insides.closed(await reader.present())
    await reader.stop()
