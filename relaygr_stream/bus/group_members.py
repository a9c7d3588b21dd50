"""Asks the broker who is in a consumer group, and finds the members that are not of this program.

A group's broker lets others in: a consumer of the KIP-848 protocol (the broker's own assignor then decides), a process
that reads other topics, or a consumer that names our assignor. Each takes lanes that nobody serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import structlog
from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.errors import KafkaError, NoError, for_code
from aiokafka.protocol.admin import DescribeGroupsRequest
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactString,
    Int8,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)  # fmt: skip

from relaygr_stream.bus.assignor import StickyLaneAssignor, claim_of
from relaygr_stream.settings.schema import Kafka

log = structlog.get_logger(__name__)

#: The broker is asked so often who is in a group: more seldom in large groups, whose members all ask, for an answer
#: takes about 300 bytes for each member. Sooner after an assignment, until the group is settled.
LOOK_S: Final = 5.0
LOOK_S_A_MEMBER: Final = 0.05
UNSETTLED_S: Final = 0.5
NEVER_S: Final = 1e6
#: Most strangers that a message names.
NAMED: Final = 3
#: The state in which a broker tells what members subscribe to.
STABLE: Final = "Stable"
#: The state of a classic group that does not exist, and the answer for a group of another type.
DEAD: Final = "Dead"
NOT_CLASSIC: Final = "it is no classic group, and the broker does not name its members"
#: Kafka's code for a group that is not of the type asked for.
GROUP_ID_NOT_FOUND: Final = 69
#: MemberType of a member that uses the classic protocol, as ours do.
CLASSIC: Final = 0

_TOPICS: Final = CompactArray(
    ("topic_id_high", Int64), ("topic_id_low", Int64), ("topic", CompactString()),
    ("partitions", CompactArray(Int32)), ("tags", TaggedFields),
)  # fmt: skip
_ASSIGNMENT: Final = Schema(("topics", _TOPICS), ("tags", TaggedFields))


class _ConsumerGroupDescribeResponse(Response):  # type: ignore[misc]  # aiokafka is untyped
    """KIP-848's description of a group, in the first version that tells a member's type (Kafka 4.0)."""

    API_KEY = 69
    API_VERSION = 1
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("groups", CompactArray(
            ("error_code", Int16), ("error_message", CompactString()), ("group", CompactString()),
            ("state", CompactString()), ("group_epoch", Int32), ("assignment_epoch", Int32),
            ("assignor", CompactString()),
            ("members", CompactArray(
                ("member_id", CompactString()), ("instance_id", CompactString()), ("rack_id", CompactString()),
                ("member_epoch", Int32), ("client_id", CompactString()), ("client_host", CompactString()),
                ("topics", CompactArray(CompactString())), ("topic_regex", CompactString()),
                ("assignment", _ASSIGNMENT), ("target", _ASSIGNMENT), ("member_type", Int8), ("tags", TaggedFields),
            )),
            ("authorized_operations", Int32), ("tags", TaggedFields),
        )),
        ("tags", TaggedFields),
    )  # fmt: skip


class _ConsumerGroupDescribeStruct(RequestStruct):  # type: ignore[misc]
    FLEXIBLE_VERSION = True
    API_KEY = 69
    API_VERSION = 1
    RESPONSE_TYPE = _ConsumerGroupDescribeResponse
    SCHEMA = Schema(
        ("groups", CompactArray(CompactString())), ("include_authorized_operations", Boolean), ("tags", TaggedFields)
    )


class _ConsumerGroupDescribeRequest(Request[_ConsumerGroupDescribeStruct]):  # type: ignore[misc]
    API_KEY = 69

    def __init__(self, group: str) -> None:
        self._group = group

    def build(self, request_struct_class: type[_ConsumerGroupDescribeStruct]) -> _ConsumerGroupDescribeStruct:
        return request_struct_class([self._group], False, {})


class Stranger(NamedTuple):
    """A member that is not of this program, as the broker knows it. why: how it differs, in words."""

    member_id: str
    client_id: str
    host: str
    why: str

    def __str__(self) -> str:
        return f"member {self.member_id!r} (client id {self.client_id!r}, host {self.host.lstrip('/')}) {self.why}"


class GroupView(NamedTuple):
    """A group as its broker describes it. settled: members and subscriptions are known. trouble: the strangers in
    words; "" if there are none. members: how many there are."""

    settled: bool
    trouble: str
    members: int


class GroupWatch:
    """Asks who is in a member's group. `strangers`: who is not of this program, in words; "" while nobody is."""

    def __init__(self, kafka: Kafka, group: str, member: str, topics: Sequence[str]) -> None:
        self._kafka = kafka
        self._group = group
        self._member = member
        self._topics = topics
        self.strangers = ""
        self.assigned: Final = asyncio.Event()  # set it at each assignment, to have the group looked at then

    async def run(self, consumer: Any) -> None:
        """Ask after each assignment and every LOOK_S, for ever. consumer: the AIOKafkaConsumer that is the member."""
        while True:
            pause_s = await self._look(consumer)
            self.assigned.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self.assigned.wait()

    async def who_refuses(self, consumer: Any) -> None:
        """Find out who is in a group that does not take this member; for LOOK_S at most, while the group settles."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                while await self._look(consumer) == UNSETTLED_S:  # noqa: ASYNC110  # no event tells of the broker's side
                    await asyncio.sleep(UNSETTLED_S)

    async def _look(self, consumer: Any) -> float:
        """Ask once. Returns after how many seconds to ask again."""
        coordinator = consumer._coordinator.coordinator_id
        if coordinator is None:
            return UNSETTLED_S
        try:
            async with asyncio.timeout(self._kafka.request_timeout_ms / 1000):
                # Not on the coordinator's own connection, where the answer would wait behind that to a join.
                view = await group_view(consumer._client, coordinator, self._group, self._topics)
        except (KafkaError, OSError):  # of which readiness and the other clients tell; a TimeoutError is an OSError
            return LOOK_S
        except NotImplementedError:  # a broker without this request
            return NEVER_S
        if not view.settled:
            return UNSETTLED_S
        if view.trouble and view.trouble != self.strangers:
            log.error("the group has strangers", group=self._group, member=self._member, error=view.trouble)
        elif self.strangers and not view.trouble:
            log.warning("the group has no strangers any more", group=self._group, member=self._member)
        self.strangers = view.trouble
        return max(LOOK_S, LOOK_S_A_MEMBER * view.members)


async def group_view(client: Any, coordinator: int, group: str, topics: Sequence[str]) -> GroupView:
    """Describe the group. client: an AIOKafkaClient. coordinator: the node to ask. topics: what our members read.

    Raises aiokafka's errors, NotImplementedError if the broker cannot describe groups.
    """
    answer = await client.send(coordinator, DescribeGroupsRequest([group]))
    error_code, _, state, _, protocol, members = answer.groups[0][:6]
    error = for_code(error_code)
    if error is not NoError and state != DEAD:
        raise error(group)
    if state == DEAD:  # to its members, a group is dead only if it is of another type
        return await _other_type(client, coordinator, group)
    # The embedded broker tells no protocol, and nothing else of its members.
    strangers = list(_strangers(protocol, members, frozenset(topics))) if state == STABLE and protocol else []
    return GroupView(state == STABLE, _told(group, strangers), len(members))


async def _other_type(client: Any, coordinator: int, group: str) -> GroupView:
    try:
        answer = await client.send(coordinator, _ConsumerGroupDescribeRequest(group))
    except NotImplementedError:
        return GroupView(True, _told(group, [], NOT_CLASSIC), 1)
    error_code, *_, members, _, _ = answer.groups[0]
    if error_code == GROUP_ID_NOT_FOUND:  # between two types, or gone: a member notices that by its heartbeat
        return GroupView(False, "", 1)
    if error_code:  # such as no right to describe what the other reads
        return GroupView(True, _told(group, [], NOT_CLASSIC), 1)
    strangers = [
        Stranger(member[0], member[4], member[5], "uses group.protocol=consumer")
        for member in members
        if member[10] != CLASSIC
    ]
    why = "its broker assigns the lanes, for a consumer with group.protocol=consumer was in it"
    return GroupView(True, _told(group, strangers, why), len(members))


def _strangers(protocol: str, members: Iterable[Sequence[Any]], topics: frozenset[str]) -> Iterator[Stranger]:
    for member_id, client_id, host, metadata, _ in members:
        why = _why_strange(protocol, metadata, topics)
        if why:
            yield Stranger(member_id, client_id, host, why)


def _why_strange(protocol: str, metadata: bytes, topics: frozenset[str]) -> str:
    """How a member differs from ours; "" if it does not. metadata: what it joined with."""
    if protocol != StickyLaneAssignor.name:
        return f"uses the assignor {protocol!r}"
    try:
        joined = ConsumerProtocol.METADATA.decode(metadata)
        read = frozenset(joined.subscription)
    except Exception as error:  # foreign bytes: whatever aiokafka's decoder raises
        return f"joined with bytes that are no subscription ({type(error).__name__})"
    if read != topics:
        return f"reads {', '.join(sorted(map(str, read))) or 'nothing'}"
    return "" if claim_of(joined.user_data) is not None else "states no claim on lanes, as this program's members do"


def _told(group: str, strangers: Sequence[Stranger], why: str = "") -> str:
    if not (strangers or why):
        return ""
    named = "; ".join(map(str, strangers[:NAMED]))
    more = f"; and {len(strangers) - NAMED} more" if len(strangers) > NAMED else ""
    return (
        f"group {group} has members that are not this program's, and lanes may go to them: {named or why}{more}. Stop "
        f"them, or choose another group name; an ACL on the group keeps others out (docs/reference/security.md)"
    )
