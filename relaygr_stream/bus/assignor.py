"""A member's claim on the wire, and the adapter of the assignment (balance.py) to aiokafka's group protocol.

A lane is a partition number of every topic that the group reads; one member owns it in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Protocol

import msgspec
from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata
from msgspec import Meta

from relaygr_stream.bus.balance import MOST_LEVEL, MemberClaim, assign_lanes
from relaygr_stream.wire.versions import NOT_DECODED

#: Largest user data that is decoded: twice 10,000 lanes at 3 bytes each and their frame fit.
MAX_USER_DATA_BYTES: Final = 64 * 1024
#: A member of more lanes states no loads: so many are even by their number, and earlier releases read no longer claims.
MOST_LOADS: Final = 1000
MAX_GENERATION: Final = 2**53
PROTOCOL_VERSION: Final = 0


_Lanes = Annotated[tuple[Annotated[int, Meta(ge=0, lt=10_000)], ...], Meta(max_length=10_000)]
_Levels = Annotated[tuple[Annotated[int, Meta(ge=0, le=MOST_LEVEL)], ...], Meta(max_length=10_000)]


class _UserData(msgspec.Struct, array_like=True):
    """A member's claim on the wire (a MessagePack array, to which later versions may append fields)."""

    generation: Annotated[int, Meta(ge=0, le=MAX_GENERATION)]
    lanes: _Lanes
    capacity: Annotated[float, Meta(gt=0, le=1e6)]
    draining: bool = False
    warm: _Lanes = ()
    loads: _Levels = ()
    speed: Annotated[float, Meta(ge=0, le=1e12)] = 0.0


_decode_claim = msgspec.msgpack.Decoder(_UserData).decode


def encode_claim(claim: MemberClaim) -> bytes:
    """The claim as user data."""
    fields = claim.generation, claim.lanes, claim.capacity, claim.draining, claim.warm, claim.loads, claim.speed
    return msgspec.msgpack.encode(_UserData(*fields))


def claim_of(data: bytes | None) -> MemberClaim | None:
    """The claim in a member's user data; None if it is none: the member is not of this program."""
    if not data or len(data) > MAX_USER_DATA_BYTES:
        return None
    try:
        claim = _decode_claim(data)
    except NOT_DECODED:
        return None
    return MemberClaim(**msgspec.structs.asdict(claim))


class AssignedMember(Protocol):
    """The member whose side of the assignment this is."""

    def on_assignment(self) -> int:
        """Called first at each assignment; returns the group's generation."""


class StickyLaneAssignor(AbstractPartitionAssignor):  # type: ignore[misc]  # aiokafka is untyped
    """One member's side of the assignment. aiokafka accepts this instance where it usually gets a class.

    `lanes` (the one owned longest first) and `generation` are of its last assignment. `continuous`: whether that
    directly followed the member's former one. If not, another member may have owned the lanes meanwhile, even the ones
    that this member has again.
    """

    name: str = "relaygr-sticky-lanes"

    def __init__(self, capacity: float, member: AssignedMember) -> None:
        self._capacity = capacity
        self._member = member
        self.draining = False  # part of the claim at the next assignment
        self.warm: tuple[int, ...] = ()  # part of every claim, as the next two
        self.levels: Mapping[int, int] = {}  # of our lanes' loads, as far as they are known
        self.speed = 0.0
        self.generation = 0
        self.continuous = False
        self.lanes: tuple[int, ...] = ()

    def metadata(self, topics: Iterable[str]) -> Any:
        """This member's claim, sent when it joins."""
        loads = tuple(self.levels.get(lane, 0) for lane in self.lanes) if len(self.lanes) <= MOST_LOADS else ()
        stated = self.lanes, self.generation, self._capacity, self.draining, self.warm, loads, self.speed
        claim = MemberClaim(*stated)
        return ConsumerProtocolMemberMetadata(PROTOCOL_VERSION, sorted(topics), encode_claim(claim))

    def assign(self, cluster: Any, members: Mapping[str, Any]) -> dict[str, Any]:
        """The whole group's assignment; called on the member that leads it.

        Members that read the same topics share their lanes. One without a claim, which is not of this program, gets
        none (group_members.py tells of it, and of members that read other topics).
        """
        topics = {member: tuple(sorted(set(metadata.subscription))) for member, metadata in members.items()}
        lanes: dict[str, frozenset[int]] = {}
        for read in set(topics.values()):
            found = {member: claim_of(metadata.user_data) for member, metadata in members.items()}
            claims = {member: claim for member, claim in found.items() if claim is not None and topics[member] == read}
            # Unequal counts are refused at start; while one topic is being enlarged, only common lanes can be assigned.
            counts = [len(cluster.partitions_for_topic(topic) or ()) for topic in read]
            lanes |= assign_lanes(min(counts, default=0), claims)
        return {
            member: ConsumerProtocolMemberAssignment(
                PROTOCOL_VERSION, [(topic, sorted(lanes.get(member, ()))) for topic in topics[member]], b""
            )
            for member in members
        }

    def on_assignment(self, assignment: Any) -> None:
        """Record this member's new assignment."""
        generation = self._member.on_assignment()
        self.continuous = generation == self.generation + 1
        self.generation = generation
        partitions = [frozenset(partitions) for _, partitions in assignment.assignment]
        owned = frozenset.intersection(*partitions) if partitions else frozenset()
        order = dict.fromkeys((*self.lanes, *self.warm, *sorted(owned)))
        self.lanes = tuple(lane for lane in order if lane in owned)
