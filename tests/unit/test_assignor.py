"""Claims on the wire, and the assignment in aiokafka's group protocol."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from aiokafka.coordinator.protocol import ConsumerProtocol
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.bus.assignor import (
    MAX_USER_DATA_BYTES,
    MOST_LOADS,
    StickyLaneAssignor,
    claim_of,
    encode_claim,
)
from relaygr_stream.bus.balance import MOST_LEVEL, MemberClaim

LANE_LISTS = st.lists(st.integers(0, 9_999)).map(tuple)
CAPACITIES = st.floats(1e-3, 1e6)
LEVELS = st.lists(st.integers(0, MOST_LEVEL), max_size=90).map(tuple)
SPEEDS = st.one_of(st.just(0.0), st.floats(0, 1e12))


def test_draining_is_said_on_the_wire_and_not_by_older_members() -> None:
    claim = MemberClaim((2, 1), 3, 0.5, draining=True, warm=(7, 1), loads=(9, 0), speed=0.1)
    assert claim_of(encode_claim(claim)) == claim
    assert claim_of(msgspec.msgpack.encode([3, [1, 2], 0.5])) == MemberClaim((1, 2), 3, 0.5)
    assert claim_of(msgspec.msgpack.encode([3, [1], 0.5, True, [7]])) == MemberClaim((1,), 3, 0.5, True, (7,))


class _EarlierUserData(msgspec.Struct, array_like=True):
    """A claim as a leader of an earlier release reads it."""

    generation: int
    lanes: tuple[int, ...]
    capacity: float
    draining: bool = False
    warm: tuple[int, ...] = ()


def test_a_leader_of_an_earlier_release_reads_what_it_knows() -> None:
    said = encode_claim(MemberClaim((2, 1), 3, 0.5, draining=True, warm=(7, 1), loads=(9, 0), speed=0.1))
    assert msgspec.msgpack.decode(said, type=_EarlierUserData) == _EarlierUserData(3, (2, 1), 0.5, True, (7, 1))


def test_the_largest_claims_fit_the_wire() -> None:
    every = tuple(range(9_999, -1, -1))
    member = StickyLaneAssignor(0.1, _Member())
    member.lanes, member.warm, member.generation, member.draining = every, every, 2**53, True
    member.levels, member.speed = dict.fromkeys(every, MOST_LEVEL), 0.1
    claim = MemberClaim(every, 2**53, 0.1, draining=True, warm=every, speed=0.1)
    assert claim_of(member.metadata(["ranking"]).user_data) == claim
    member.lanes = every[-MOST_LOADS:]
    stated = claim_of(member.metadata(["ranking"]).user_data)
    assert stated is not None
    assert stated.loads == (MOST_LEVEL,) * MOST_LOADS


@given(st.builds(MemberClaim, LANE_LISTS, st.integers(0, 2**53), CAPACITIES, st.booleans(), LANE_LISTS, LEVELS, SPEEDS))
def test_claims_survive_the_wire(claim: MemberClaim) -> None:
    assert claim_of(encode_claim(claim)) == claim


@given(st.binary(max_size=200))
def test_unreadable_user_data_claims_nothing(data: bytes) -> None:
    claim = claim_of(data) or MemberClaim()
    assert all(0 <= lane < 10_000 for lane in claim.lanes)
    assert claim.capacity > 0


@pytest.mark.parametrize(
    "value",
    [
        [1, [1, 2], float("nan")],
        [1, [1, 2], float("inf")],
        [1, [1, 2], 0.0],
        [1, [1, 2], -1.0],
        [1, [-1], 1.0],
        [1, [10_000], 1.0],
        [-1, [1], 1.0],
        [2**60, [1], 1.0],
        [1, [1], 1.0, False, [-1]],
        [1, [1], 1.0, False, [10_000]],
        [1, [1], 1.0, False, "lanes"],
        [1, [1], 1.0, False, [], [-1]],
        [1, [1], 1.0, False, [], [MOST_LEVEL + 1]],
        [1, [1], 1.0, False, [], [0.5]],
        [1, [1], 1.0, False, [], [1], float("nan")],
        [1, [1], 1.0, False, [], [1], float("inf")],
        [1, [1], 1.0, False, [], [1], -1.0],
        [1, [1], 1.0, False, [], [1], 1e13],
        [1, "lanes", 1.0],
        {"lanes": [1]},
        None,
    ],
)
def test_hostile_user_data_claims_nothing(value: object) -> None:
    assert claim_of(msgspec.msgpack.encode(value)) is None


def test_too_large_user_data_claims_nothing() -> None:
    assert claim_of(encode_claim(MemberClaim((1,))) + bytes(MAX_USER_DATA_BYTES)) is None
    assert claim_of(b"\x91" * 100_000) is None


class _Cluster(SimpleNamespace):
    def partitions_for_topic(self, topic: str) -> set[int] | None:
        count = self.counts.get(topic)
        return None if count is None else set(range(count))


class _Member:
    """A member as aiokafka drives it, over the protocol's real bytes."""

    def __init__(self, capacity: float = 1.0) -> None:
        self.generation = 0
        self.assignor = StickyLaneAssignor(capacity, self)

    def on_assignment(self) -> int:
        return self.generation

    def joins(self) -> bytes:
        return bytes(self.assignor.metadata({"ranking", "pre-infer"}).encode())

    def gets(self, assignment: bytes, generation: int) -> dict[str, list[int]]:
        self.generation = generation
        decoded = ConsumerProtocol.ASSIGNMENT.decode(assignment)
        self.assignor.on_assignment(decoded)
        return dict(decoded.assignment)


class _Group:
    """The coordinator's part."""

    def __init__(self, **counts: int) -> None:
        self.cluster = _Cluster(counts={name.replace("_", "-"): count for name, count in counts.items()})
        self.generation = 0

    def rebalance(self, members: dict[str, _Member], **strangers: bytes) -> dict[str, dict[str, list[int]]]:
        self.generation += 1
        sent = {name: member.joins() for name, member in members.items()} | strangers
        metadata = {name: ConsumerProtocol.METADATA.decode(data) for name, data in sent.items()}
        leader = members[sorted(members)[0]].assignor
        assignments = leader.assign(self.cluster, metadata)
        return {name: member.gets(assignments[name].encode(), self.generation) for name, member in members.items()}


def test_both_topics_of_a_lane_have_one_owner() -> None:
    group = _Group(ranking=16, pre_infer=16)
    members = {name: _Member() for name in "abc"}
    for _ in range(3):
        for assigned in group.rebalance(members).values():
            assert assigned["ranking"] == assigned["pre-infer"]
        members[f"joined-{len(members)}"] = _Member(capacity=2.0)


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("warm", [False, True])
def test_one_that_was_away_has_its_former_lanes_again(workers: int, warm: bool) -> None:
    """Without a word of its own, too: the others give up what they got last, which is what it had."""
    group = _Group(ranking=16, pre_infer=16)
    members: dict[str, _Member] = {}
    for number in range(workers):  # as a fleet starts: one after the other
        members[f"w{number}"] = _Member()
        group.rebalance(members)
    for away in sorted(members):
        before = {name: member.assignor.lanes for name, member in members.items()}
        del members[away]
        group.rebalance(members)
        group.rebalance(members)  # what happens meanwhile is forgotten
        members[away] = _Member()
        members[away].assignor.warm = before[away] if warm else ()
        group.rebalance(members)
        moved = sum(len(set(before[name]) - set(member.assignor.lanes)) for name, member in members.items())
        assert moved <= 16 % workers, "one for each lane that rounding leaves over"


@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
def test_those_that_know_their_former_lanes_have_them_again_after_all_were_away(order: str) -> None:
    group = _Group(ranking=15, pre_infer=15)
    former = {"a": (0, 5, 6, 7, 8), "b": (1, 2, 3, 4, 9), "c": (10, 11, 12, 13, 14)}
    members: dict[str, _Member] = {}
    for name in order:
        members[name] = _Member()
        members[name].assignor.warm = former[name]
        group.rebalance(members)
    assert {name: set(member.assignor.lanes) for name, member in members.items()} == {
        name: set(lanes) for name, lanes in former.items()
    }


def test_a_member_that_missed_an_assignment_knows() -> None:
    group = _Group(ranking=8, pre_infer=8)
    one, two = _Member(), _Member()
    group.rebalance({"one": one, "two": two})
    group.rebalance({"one": one, "two": two})
    assert (one.assignor.continuous, two.assignor.continuous) == (True, True)
    group.rebalance({"one": one})
    group.rebalance({"one": one, "two": two})
    assert (one.assignor.continuous, two.assignor.continuous) == (True, False)


def test_lanes_that_only_one_topic_has_are_not_shared_out() -> None:
    member = _Member()
    assigned = _Group(ranking=8, pre_infer=6).rebalance({"one": member})["one"]
    assert assigned == {"ranking": list(range(6)), "pre-infer": list(range(6))}
    assert member.assignor.lanes == tuple(range(6))


def test_a_missing_topic_means_no_lanes() -> None:
    assert _Group(ranking=8).rebalance({"one": _Member()})["one"] == {"ranking": [], "pre-infer": []}


def test_a_member_with_hostile_user_data_gets_no_lanes() -> None:
    group = _Group(ranking=8, pre_infer=8)
    one = _Member()
    group.rebalance({"one": one})
    before = one.assignor.lanes
    stranger = ConsumerProtocol.METADATA(0, ["pre-infer", "ranking"], b"\xdf\xff\xff\xff\xff")
    group.rebalance({"one": one}, hostile=stranger.encode())
    assert one.assignor.lanes == before == tuple(range(8))


def test_members_that_read_other_topics_take_no_lanes_of_ours() -> None:
    group = _Group(ranking=8, pre_infer=8, retrieval=8)
    one, claim = _Member(), encode_claim(MemberClaim())
    other = ConsumerProtocol.METADATA(0, ["retrieval"], claim)
    group.rebalance({"one": one}, trigger=other.encode())
    assert one.assignor.lanes == tuple(range(8))


def test_loads_count_and_a_member_of_an_earlier_release_keeps_its_number() -> None:
    group = _Group(ranking=16, pre_infer=16)
    members = {name: _Member() for name in "ab"}
    group.rebalance(members)
    early, late = members["a"].assignor, members["b"].assignor
    early.levels = dict.fromkeys(early.lanes, 1) | {early.lanes[0]: 1 + 3 * 8}  # eight times the others
    late.levels = dict.fromkeys(late.lanes, 1)
    old = ConsumerProtocol.METADATA(0, ["pre-infer", "ranking"], msgspec.msgpack.encode([0, [], 1.0]))
    group.rebalance(members, old=old.encode())
    numbers = {name: len(member.assignor.lanes) for name, member in members.items()}
    assert numbers["a"] < numbers["b"], "31 in all: about ten each, of which one lane is eight"
    assert 16 - sum(numbers.values()) >= 4
