"""The two-plane consumer on each broker: what is read, what is committed, and what happens when members come and go."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.group import LeaveGroupRequest
from structlog.testing import capture_logs

from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.errors import BrokerUnavailable, ConfigError
from relaygr_stream.ops.brokers.local import local_broker
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import TopicSet, load_topics
from tests.bus import insides
from tests.bus.members import Member, Stream, shared_out
from tests.conftest import AnyBroker
from tests.waiting import WITHIN_S, until


@pytest.fixture
async def topics(kafka_settings: Kafka) -> TopicSet:
    await apply_topics(kafka_settings)
    return load_topics(kafka_settings)


@pytest.fixture
async def producer(kafka_settings: Kafka) -> AsyncIterator[Producer]:
    async with Producer(kafka_settings, client_id="test") as producer:
        yield producer


async def test_what_is_sent_is_read(kafka_settings: Kafka, topics: TopicSet, producer: Producer) -> None:
    async with Member(kafka_settings, topics, "one") as one:
        await shared_out(topics, one)
        assert one.gained() == [*range(topics.lanes)]
        offset = await producer.send_and_wait(
            topics.ranking.name, b"value", key=b"key", partition=3, headers=[("name", b"\x00\xff")]
        )
        await until(lambda: len(one.records) >= 1, "read")
        (record,) = one.records
        assert record == Record(
            topics.ranking.name, 3, offset, record.timestamp_ms, b"key", b"value", (("name", b"\x00\xff"),)
        )
        assert one.consumer.position(topics.ranking.name, 3) == offset + 1
        assert one.consumer.healthy
        with pytest.raises(KeyError):
            one.consumer.position(topics.ranking.name, topics.lanes)
    assert one.history[-1] == (frozenset(), frozenset(range(topics.lanes)))


async def test_records_from_before_the_first_member_are_read(
    kafka_settings: Kafka, topics: TopicSet, producer: Producer
) -> None:
    for number in range(5):
        await producer.send_and_wait(topics.ranking.name, str(number).encode(), partition=1)
    async with Member(kafka_settings, topics, "one") as one:
        await until(lambda: len(one.records) >= 5, "read")
        assert one.values == [b"0", b"1", b"2", b"3", b"4"]


async def test_the_next_owner_starts_after_what_is_done_without_a_gap(
    kafka_settings: Kafka, topics: TopicSet, producer: Producer
) -> None:
    for number in range(6):
        await producer.send_and_wait(topics.ranking.name, str(number).encode(), partition=1)
    async with Member(kafka_settings, topics, "one", finish=False) as one:
        await until(lambda: len(one.records) >= 6, "read")
        for number in (0, 1, 2, 4):  # 3 is not done: 4 must not be committed
            one.consumer.done(one.records[number])
        assert one.consumer.undone == 2
    async with Member(kafka_settings, topics, "two") as two:
        await until(lambda: len(two.records) >= 3, "read")
        assert two.values == [b"3", b"4", b"5"]


async def test_commits_do_not_wait_for_the_end(kafka_settings: Kafka, topics: TopicSet, producer: Producer) -> None:
    """A member that is killed has lost only its last commit interval: seen by a group-less look at its offsets."""
    often = msgspec.structs.replace(kafka_settings, commit_interval_ms=50)
    looker = AIOKafkaConsumer(
        bootstrap_servers=kafka_settings.bootstrap, group_id=f"{kafka_settings.prefix}workers", enable_auto_commit=False
    )
    async with Member(often, topics, "one") as one:
        await producer.send_and_wait(topics.ranking.name, b"0", partition=1)
        await until(lambda: len(one.records) >= 1, "read")
        await looker.start()

        async def committed() -> bool:
            return bool(await looker.committed(TopicPartition(topics.ranking.name, 1)) == 1)

        try:
            await until(committed, "committed")
        finally:
            await looker.stop()
        assert one.values == [b"0"]


async def test_a_member_that_asks_has_its_speed_counted_and_nothing_is_lost(
    kafka_settings: Kafka, topics: TopicSet, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaygr_stream.bus.lanes.MEASURE_S", 0.1)
    async with Member(kafka_settings, topics, "one") as one, Member(kafka_settings, topics, "two") as two:
        await shared_out(topics, one, two)
        one.consumer.speed, two.consumer.speed = 10.0, 30.0
        async with Stream(producer, topics) as stream:
            await until(lambda: insides.states_speed(one.consumer) and insides.states_speed(two.consumer))

            def moved() -> bool:
                for member in (one, two):  # again and again, also while the group is at it
                    member.consumer.rebalance()
                return len(two.lanes) > len(one.lanes) + 1

            await until(moved, "lanes moved to the faster one")
        one.capacity, two.capacity = 1.0, 2.0**1.5  # three times as fast, to the next step
        await shared_out(topics, one, two)

        def read() -> set[tuple[str, int, bytes | None]]:
            return {(each.topic, each.lane, each.value) for each in one.records + two.records}

        await until(lambda: read() == stream.sent, "all that was sent")
        assert any(lost for _, lost in one.history)
        assert not any(lost for _, lost in two.history), "who keeps lanes does not lose them"


async def _flows_to_the_owners_of_both_topics(topics: TopicSet, *members: Member) -> None:
    """Kept lanes flow at once; a moved one as soon as its new owner has found the partition's leader."""
    start = [len(member.records) for member in members]

    def flowing(member: Member, since: int, topic: str) -> set[int]:
        return {record.lane for record in member.records[since:] if record.topic == topic}

    def flows(member: Member, since: int, topic: str) -> bool:
        return flowing(member, since, topic) >= member.lanes

    for member, since in zip(members, start, strict=True):
        for topic in (topics.pre_infer.name, topics.ranking.name):
            await until(partial(flows, member, since, topic), f"{topic} does not flow to {member.name}")
            assert flowing(member, since, topic) == member.lanes


async def _joins_and_leaves(often: Kafka, topics: TopicSet, producer: Producer) -> list[Member]:
    """Two members join one, and two of the three leave; returns all."""
    lanes = topics.lanes
    async with Stream(producer, topics) as stream, Member(often, topics, "one") as one:
        await shared_out(topics, one)
        members = [one]
        for name in ("two", "three"):
            before = {member.name: member.lanes for member in members}
            joined = Member(often, topics, name)
            await joined.consumer.start()
            members.append(joined)
            await shared_out(topics, *members)
            moved = sum(len(before[member.name] - member.lanes) for member in members[:-1])
            assert moved <= math.ceil(lanes / len(members))
            assert all(member.lanes <= before[member.name] for member in members[:-1])
            await _flows_to_the_owners_of_both_topics(topics, *members)
        left = members.pop(1)
        before = {member.name: member.lanes for member in members}
        await left.consumer.stop()
        await shared_out(topics, *members)
        assert all(member.lanes >= before[member.name] for member in members)
        await _flows_to_the_owners_of_both_topics(topics, *members)
        await stream.stop()
        everyone = [*members, left]
        await until(
            lambda: (
                stream.sent
                <= {(record.topic, record.lane, record.value) for member in everyone for record in member.records}
            ),
            "all read",
        )
        await members[1].consumer.stop()
    return everyone


@pytest.mark.stack
async def test_joins_and_leaves(kafka_settings: Kafka, topics: TopicSet, producer: Producer) -> None:
    """Few lanes move, both topics of each together; kept ones go on in order; nothing is missed; no commit fails."""
    often = msgspec.structs.replace(
        kafka_settings, commit_interval_ms=20
    )  # the more commits, the likelier a race with a join
    lanes = topics.lanes
    with capture_logs() as logs:
        everyone = await _joins_and_leaves(often, topics, producer)
    assert not [line for line in logs if line["event"] == "commit refused"]
    for member in everyone:
        for topic in (topics.pre_infer.name, topics.ranking.name):
            for lane in range(lanes):
                offsets = [record.offset for record in member.records if (record.topic, record.lane) == (topic, lane)]
                if any(lane in gained for gained, _ in member.history[1:]):
                    continue  # given back to it: what was read in between by another may come again
                assert offsets == sorted(set(offsets)), f"{member.name} read {topic}/{lane} out of order or twice"


async def test_lanes_take_what_is_done_with_them_when_they_move(
    kafka_settings: Kafka, topics: TopicSet, producer: Producer
) -> None:
    rarely = msgspec.structs.replace(kafka_settings, commit_interval_ms=600_000)
    for lane in range(topics.lanes):
        await producer.send_and_wait(topics.ranking.name, b"0", partition=lane)
    async with Member(rarely, topics, "one") as one:
        await until(lambda: len(one.records) == topics.lanes, "read")
        async with Member(rarely, topics, "two") as two:
            await shared_out(topics, one, two)
            for lane in range(topics.lanes):
                await producer.send_and_wait(topics.ranking.name, b"1", partition=lane)
            await until(lambda: len(two.records) >= len(two.lanes), "read")
            assert set(two.values) == {b"1"}


async def test_capacity_weighs(kafka_settings: Kafka, topics: TopicSet) -> None:
    async with (
        Member(kafka_settings, topics, "one", capacity=3.0) as one,
        Member(kafka_settings, topics, "two", capacity=1.0) as two,
    ):
        await shared_out(topics, one, two)
        assert len(one.lanes) == 3 * len(two.lanes)


@pytest.mark.stack
async def test_a_member_without_progress_gives_its_lanes_up_and_comes_back(
    kafka_settings: Kafka, topics: TopicSet
) -> None:
    impatient = msgspec.structs.replace(kafka_settings, max_poll_interval_ms=1000)
    stuck = False
    async with (
        Member(impatient, topics, "one", progressing=lambda: not stuck) as one,
        Member(kafka_settings, topics, "two") as two,
    ):
        await shared_out(topics, one, two)
        stuck = True
        await until(lambda: not one.lanes, "given up")
        await shared_out(topics, two)
        stuck = False
        await until(lambda: bool(one.lanes), "back")
        await shared_out(topics, one, two)


async def test_a_drain_waits_for_work_and_the_next_owner_repeats_none(
    kafka_settings: Kafka, topics: TopicSet, producer: Producer
) -> None:
    async with Member(kafka_settings, topics, "one", finish=False) as one:
        await shared_out(topics, one)
        await producer.send_and_wait(topics.ranking.name, b"0", partition=1)
        await until(lambda: len(one.records) >= 1, "read")
        assert not await one.consumer.drain(0.05)
        asyncio.get_running_loop().call_later(0.1, one.consumer.done, one.records[0])
        assert await one.consumer.drain(10.0)
        await producer.send_and_wait(topics.ranking.name, b"1", partition=1)
        async with Member(kafka_settings, topics, "two") as two:
            await until(lambda: len(two.records) >= 1, "read")
            assert (one.values, two.values) == ([b"0"], [b"1"])


async def test_who_drains_is_given_no_lanes(kafka_settings: Kafka, topics: TopicSet, producer: Producer) -> None:
    """It reads nothing any more: what it was given stood still until it had left."""
    async with Member(kafka_settings, topics, "one", finish=False) as one:
        await shared_out(topics, one)
        await producer.send_and_wait(topics.ranking.name, b"0", partition=1)
        await until(lambda: len(one.records) == 1, "read")
        drain = asyncio.create_task(one.consumer.drain(60.0))
        async with Member(kafka_settings, topics, "two") as two:
            await until(lambda: two.lanes == set(range(topics.lanes)), "all lanes with the one that stays")
            assert not one.lanes
            await drain


async def test_health_is_no_matter_of_the_clock(
    kafka_settings: Kafka, topics: TopicSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Member(kafka_settings, topics, "one") as one:
        await shared_out(topics, one)
        await until(lambda: one.consumer.healthy, "healthy")
        real = time.time
        for step_s in (3600.0, -3600.0):
            monkeypatch.setattr(time, "time", lambda step_s=step_s: real() + step_s)
            assert one.consumer.healthy


@pytest.mark.stack
async def test_a_record_of_a_lane_lost_meanwhile_counts_for_nothing(
    kafka_settings: Kafka, topics: TopicSet, producer: Producer
) -> None:
    for lane in range(topics.lanes):
        await producer.send_and_wait(topics.ranking.name, b"0", partition=lane)
    async with Member(kafka_settings, topics, "one", finish=False) as one:
        await until(lambda: len(one.records) == topics.lanes, "read")
        async with Member(kafka_settings, topics, "two", finish=False) as two:
            await shared_out(topics, one, two)
            await until(lambda: len(two.records) == len(two.lanes), "read again by their new owner")
            for record in one.records:
                if record.lane in two.lanes:
                    one.consumer.done(record)
            assert one.consumer.undone == len(one.lanes)
        # Two left without finishing: its lanes come back, and their records with them.
        await until(lambda: len(one.records) == topics.lanes + len(two.records), "read again")


async def test_a_member_put_out_of_the_group_comes_back_from_the_committed_offsets(
    broker: AnyBroker, kafka_settings: Kafka, topics: TopicSet, producer: Producer
) -> None:
    """As after a long stop of its process: its lanes may have been another's, so none of them simply goes on."""
    if broker.kind == "embedded":
        pytest.skip("on the embedded broker a group that was empty counts no generation: there a lone member goes on")
    for lane in range(topics.lanes):
        await producer.send_and_wait(topics.ranking.name, b"0", partition=lane)
    async with Member(kafka_settings, topics, "one", finish=False) as one:
        await until(lambda: len(one.records) == topics.lanes, "read")
        await _put_out(kafka_settings, one)
        await until(lambda: len(one.records) == 2 * topics.lanes, "read again")
        lost = one.history.index((frozenset(), frozenset(range(topics.lanes))))
        assert one.gained(end=lost) == one.gained(lost + 1) == [*range(topics.lanes)]


async def _put_out(kafka: Kafka, member: Member) -> None:
    """Leave the group in the member's name, behind its back."""
    group, name = insides.identity(insides.member(member.consumer))
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        request = LeaveGroupRequest(group, name)
        response = await admin._client.send(await admin.find_coordinator(group), request)
        assert response.error_code == 0
    finally:
        await admin.close()


async def test_an_exception_in_a_callback_ends_the_consumer_visibly(
    kafka_settings: Kafka, topics: TopicSet, producer: Producer
) -> None:
    class Broken:
        progressing = True

        def on_records(self, records: list[Record]) -> None:
            raise ArithmeticError("a bug in the worker")

        def on_lanes(self, gained: frozenset[int], lost: frozenset[int]) -> None:
            pass

    consumer = LaneConsumer(
        kafka_settings,
        topics=[topics.ranking.name],
        group=f"{kafka_settings.prefix}workers",
        member="one",
        user=Broken(),
    )
    async with consumer:
        assert consumer.healthy
        await producer.send_and_wait(topics.ranking.name, b"0", partition=1)
        with pytest.raises(ArithmeticError):
            await asyncio.wait_for(consumer.failed, WITHIN_S)
        assert not consumer.healthy


@pytest.mark.stack
async def test_lanes_that_no_broker_lets_begin_are_no_good_health(tmp_path: Path) -> None:
    async with local_broker("embedded", folder=tmp_path) as broker:
        kafka = broker.kafka_settings(Kafka(prefix="begin.", partitions=2, request_timeout_ms=2000))
        await apply_topics(kafka)
        topics = load_topics(kafka)
        async with Member(kafka, topics, "one") as one:
            broker.stop()  # the lanes are assigned, where they start is not known yet
            assert not one.lanes
            await until(lambda: not one.consumer.healthy, "not healthy")
            await broker.start()
            await apply_topics(kafka)  # the embedded broker forgets them
            await until(lambda: one.consumer.healthy and one.lanes == set(range(2)), "healthy again")


async def test_no_broker_is_said_at_once(kafka_settings: Kafka, topics: TopicSet) -> None:
    nowhere = msgspec.structs.replace(kafka_settings, bootstrap="127.0.0.1:1")
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        await Member(nowhere, topics, "one").consumer.start()


async def test_clashing_timings_are_refused(kafka_settings: Kafka, topics: TopicSet) -> None:
    with pytest.raises(ConfigError, match=r"session_timeout_ms = 500 .*heartbeat_interval_ms = 250"):
        Member(msgspec.structs.replace(kafka_settings, session_timeout_ms=500), topics, "one")


async def test_a_session_timeout_below_the_brokers_bound_is_explained(
    broker: AnyBroker, kafka_settings: Kafka, topics: TopicSet
) -> None:
    if broker.kind == "embedded":
        pytest.skip("the embedded broker accepts any session timeout")
    short = msgspec.structs.replace(kafka_settings, session_timeout_ms=150, heartbeat_interval_ms=50)
    with pytest.raises(ConfigError, match=r"group\.min\.session\.timeout\.ms"):
        await Member(short, topics, "one").consumer.start()
