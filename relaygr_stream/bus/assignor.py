"""The sticky, capacity-weighted assignment of lanes to members, and its adapter to aiokafka's group protocol.

A lane is a partition number of every topic that the group reads; one member owns it in all of them. The assignment is a
pure function of the members' claims. How many lanes move follows from the shares; which ones, from where the prefix KV
are: a member that came back names its former lanes, and who must give lanes up gives those it got last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Final, Protocol

import msgspec
from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata
from msgspec import Meta

from relaygr_stream.wire.versions import NOT_DECODED

#: Largest user data that is decoded: twice 10,000 lanes at 3 bytes each and their frame fit.
MAX_USER_DATA_BYTES: Final = 64 * 1024
MAX_GENERATION: Final = 2**53
PROTOCOL_VERSION: Final = 0


@dataclass(frozen=True)
class MemberClaim:
    """A member's input to an assignment: its lanes, the one owned longest first, the generation of their assignment,
    and its relative capacity."""

    lanes: tuple[int, ...] = ()
    generation: int = 0
    capacity: float = 1.0
    draining: bool = False  # the member is about to leave and reads no more records
    warm: tuple[int, ...] = ()  # lanes whose prefix KV it had when it started, that with the most first


def assign_lanes(lanes: int, claims: Mapping[str, MemberClaim]) -> dict[str, frozenset[int]]:
    """Assign the lanes 0…lanes−1 to the members (the keys of `claims`).

    Each lane has exactly one owner. A draining member gets no lanes, unless all members drain. A staying member gets
    its share lanes·capacity/Σcapacity, rounded down or up. A lane moves only if its owner left or has more than its
    share: with equal capacities, at most ⌈lanes/n⌉ lanes move when one of n members joins or leaves. Of those that can
    move, a member gets its warm ones; then owners give up what they got last. Of two claims to a lane, the later
    generation counts. A lane that was added goes to the owner of the lane whose users it gets, as far as shares allow.
    The result depends only on the arguments, not on the members' order.
    """
    staying = {member: claim for member, claim in claims.items() if not claim.draining}
    if 0 < len(staying) < len(claims):
        return {**dict.fromkeys(claims, frozenset[int]()), **assign_lanes(lanes, staying)}
    if not claims:
        return {}
    members = sorted(claims)
    held = _resolve(lanes, claims, members)
    quota = _quotas(lanes, claims, held, members)
    _add_split(lanes, held, quota)
    _move_warm(lanes, claims, held, quota)
    kept = {member: held[member][: quota[member]] for member in members}
    free = sorted(set(range(lanes)).difference(*kept.values()))
    result = {}
    for member in members:
        missing = quota[member] - len(kept[member])
        result[member] = frozenset(kept[member] + free[:missing])
        free = free[missing:]
    return result


def _resolve(lanes: int, claims: Mapping[str, MemberClaim], members: Sequence[str]) -> dict[str, list[int]]:
    """The lanes of each member after conflicting claims are resolved, in the order of its claim."""
    holder: dict[int, str] = {}
    for member in members:
        for lane in claims[member].lanes:
            if not 0 <= lane < lanes:
                continue
            if lane not in holder or claims[member].generation > claims[holder[lane]].generation:
                holder[lane] = member
    return {
        member: [lane for lane in dict.fromkeys(claims[member].lanes) if holder.get(lane) == member]
        for member in members
    }


def _add_split(lanes: int, held: Mapping[str, list[int]], quota: Mapping[str, int]) -> None:
    """Give lanes that were just added, in `held`, to the owners of the lanes that they split.

    Lanes grow to a multiple: a user of lane n of 64 is one of lane n modulo 16 of 16. So the users stay where they are.
    """
    holder = {lane: member for member, owned in held.items() for lane in owned}
    most = max(holder, default=lanes)
    before = next((count for count in range(most + 1, lanes) if lanes % count == 0), lanes)
    for lane in range(before, lanes):
        member = holder.get(lane % before)
        if member is not None and len(held[member]) < quota[member]:
            held[member].append(lane)


def _move_warm(
    lanes: int, claims: Mapping[str, MemberClaim], held: Mapping[str, list[int]], quota: Mapping[str, int]
) -> None:
    """Move warm lanes, in `held`, to members below their quota, from members above theirs and from no one."""
    holder = {lane: member for member, owned in held.items() for lane in owned}
    for member, owned in held.items():
        for lane in claims[member].warm:
            if len(owned) >= quota[member]:
                break
            giver = holder.get(lane)
            if lane >= lanes or (giver is not None and len(held[giver]) <= quota[giver]):
                continue
            if giver is not None:
                held[giver].remove(lane)
            owned.append(lane)
            holder[lane] = member


def _quotas(
    lanes: int, claims: Mapping[str, MemberClaim], held: Mapping[str, list[int]], members: Sequence[str]
) -> dict[str, int]:
    """The number of lanes of each member; the sum is `lanes`."""
    # Exact fractions: with rounding, two leaders of a group could disagree, or the sum could be wrong.
    capacity = {member: Fraction(claims[member].capacity) for member in members}
    total = sum(capacity.values())
    share = {member: lanes * capacity[member] / total for member in members}
    quota = {member: int(share[member]) for member in members}
    # The lanes left over by rounding down go first to members that hold more than their rounded share (their lanes need
    # not move), then to the largest remainders.
    claimants = sorted(
        members,
        key=lambda member: (len(held[member]) <= quota[member], quota[member] - share[member], member),
    )
    for member in claimants[: lanes - sum(quota.values())]:
        quota[member] += 1
    return quota


_Lanes = Annotated[tuple[Annotated[int, Meta(ge=0, lt=10_000)], ...], Meta(max_length=10_000)]


class _UserData(msgspec.Struct, array_like=True):
    """A member's claim on the wire (a MessagePack array, to which later versions may append fields)."""

    generation: Annotated[int, Meta(ge=0, le=MAX_GENERATION)]
    lanes: _Lanes
    capacity: Annotated[float, Meta(gt=0, le=1e6)]
    draining: bool = False
    warm: _Lanes = ()


_decode_claim = msgspec.msgpack.Decoder(_UserData).decode


def encode_claim(claim: MemberClaim) -> bytes:
    """The claim as user data."""
    return msgspec.msgpack.encode(_UserData(claim.generation, claim.lanes, claim.capacity, claim.draining, claim.warm))


def claim_of(data: bytes | None) -> MemberClaim | None:
    """The claim in a member's user data; None if it is none: the member is not of this program."""
    if not data or len(data) > MAX_USER_DATA_BYTES:
        return None
    try:
        claim = _decode_claim(data)
    except NOT_DECODED:
        return None
    return MemberClaim(claim.lanes, claim.generation, claim.capacity, claim.draining, claim.warm)


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
        self.warm: tuple[int, ...] = ()  # part of every claim
        self.generation = 0
        self.continuous = False
        self.lanes: tuple[int, ...] = ()

    def metadata(self, topics: Iterable[str]) -> Any:
        """This member's claim, sent when it joins."""
        claim = MemberClaim(self.lanes, self.generation, self._capacity, self.draining, self.warm)
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
