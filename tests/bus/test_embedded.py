"""What the embedded broker does otherwise than Apache Kafka, and how members of a group get along with it."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.group import JoinGroupRequest, LeaveGroupRequest

from relaygr_stream.bus.assignor import StickyLaneAssignor
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.topic_files import TopicSet, load_topics
from tests.bus.members import Member, shared_out

#: Far above what a rebalance takes; the broker waited for one and a half of it.
LONG_MS = 120_000


@pytest.fixture
async def topics(embedded_settings: Kafka) -> TopicSet:
    await apply_topics(embedded_settings)
    return load_topics(embedded_settings)


@pytest.mark.parametrize("leaves", [0, 1])
async def test_lanes_of_a_member_that_leaves_do_not_wait_for_its_session(
    embedded_settings: Kafka, topics: TopicSet, leaves: int
) -> None:
    """Neither the leader's nor the other's, also in the first generation, which this broker counts from 0."""
    long = msgspec.structs.replace(embedded_settings, session_timeout_ms=LONG_MS)
    members = [Member(long, topics, name) for name in ("one", "two")]
    await asyncio.gather(*(member.consumer.start() for member in members))
    await shared_out(topics, *members)
    left_at = time.monotonic()
    await members.pop(leaves).consumer.stop()
    await shared_out(topics, *members)
    assert time.monotonic() - left_at < LONG_MS / 2000
    await members[0].consumer.stop()


@pytest.mark.stack
async def test_a_group_that_its_leader_left_last_takes_members_again(
    embedded_settings: Kafka, topics: TopicSet
) -> None:
    """It stayed the leader of the empty group: nobody assigned lanes any more, and no worker became ready."""
    members = []
    for name in ("one", "two"):  # one after the other: the generation is above 0, and "one" leads
        members.append(Member(embedded_settings, topics, name))
        await members[-1].consumer.start()
    await shared_out(topics, *members)
    for member in reversed(members):
        await member.consumer.stop()
    async with Member(embedded_settings, topics, "three") as three:
        await shared_out(topics, three)


class _Alone:
    """A member that was assigned nothing yet."""

    def on_assignment(self) -> int:
        return 0


@pytest.mark.stack
async def test_a_leader_that_left_during_a_rebalance_is_replaced(embedded_settings: Kafka, topics: TopicSet) -> None:
    """As a client of another program may leave, or two at the same moment."""
    group, metadata = f"{embedded_settings.prefix}workers", StickyLaneAssignor(1.0, _Alone()).metadata(
        [topics.pre_infer.name, topics.ranking.name]
    )  # fmt: skip
    admin = AIOKafkaAdminClient(bootstrap_servers=embedded_settings.bootstrap)
    await admin.start()
    try:
        node, member = await admin.find_coordinator(group), ""
        for _ in range(2):  # the first answer names the member
            protocols = [(StickyLaneAssignor.name, metadata.encode())]
            request = JoinGroupRequest(group, 4000, 4000, member, None, "consumer", protocols)
            joined = await admin._client.send(node, request)
            member = joined.member_id
        assert joined.leader_id == member
        assert (await admin._client.send(node, LeaveGroupRequest(group, member))).error_code == 0
    finally:
        await admin.close()
    async with (
        Member(embedded_settings, topics, "one") as one,
        Member(embedded_settings, topics, "two") as two,
    ):
        await shared_out(topics, one, two)
