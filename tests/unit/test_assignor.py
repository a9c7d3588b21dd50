"""The lane assignment: properties over random claims and over histories of joins and leaves."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import msgspec
import pytest
from aiokafka.coordinator.protocol import ConsumerProtocol
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.bus.assignor import (
    MAX_USER_DATA_BYTES,
    MemberClaim,
    StickyLaneAssignor,
    assign_lanes,
    claim_of,
    encode_claim,
)

LANES = st.integers(0, 70)
LANE_LISTS = st.lists(st.integers(0, 9_999)).map(tuple)
CAPACITIES = st.floats(1e-3, 1e6)
CLAIMS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=3),
    st.builds(
        MemberClaim,
        lanes=st.lists(st.integers(0, 80), max_size=80).map(tuple),
        generation=st.integers(0, 5),
        capacity=CAPACITIES,
        warm=st.lists(st.integers(0, 80), max_size=80).map(tuple),
    ),
    min_size=1,
    max_size=9,
)


@given(LANES, CLAIMS)
def test_every_lane_has_one_owner(lanes: int, claims: dict[str, MemberClaim]) -> None:
    result = assign_lanes(lanes, claims)
    assert set(result) == set(claims)
    assert sorted(lane for owned in result.values() for lane in owned) == list(range(lanes))


@given(LANES, CLAIMS)
def test_shares_follow_capacity(lanes: int, claims: dict[str, MemberClaim]) -> None:
    result = assign_lanes(lanes, claims)
    total = math.fsum(claim.capacity for claim in claims.values())
    for member, owned in result.items():
        share = lanes * claims[member].capacity / total
        assert math.floor(share - 1e-6) <= len(owned) <= math.ceil(share + 1e-6)


@pytest.mark.parametrize("more", ["a", "b", "c"])
def test_the_lane_that_rounding_leaves_over_stays_where_it_is(more: str) -> None:
    counts = {member: 3 + (member == more) for member in "abc"}
    free = iter(range(10))
    held = {member: frozenset(next(free) for _ in range(count)) for member, count in counts.items()}
    assert assign_lanes(10, {member: MemberClaim(tuple(lanes), 1) for member, lanes in held.items()}) == held


@given(LANES, CLAIMS, st.randoms())
def test_the_order_of_members_does_not_matter(lanes: int, claims: dict[str, MemberClaim], random: object) -> None:
    shuffled = list(claims.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert assign_lanes(lanes, dict(shuffled)) == assign_lanes(lanes, claims)


@given(LANES, CLAIMS, st.data())
def test_who_drains_gets_no_lanes_unless_all_do(
    lanes: int, claims: dict[str, MemberClaim], data: st.DataObject
) -> None:
    draining = data.draw(st.sets(st.sampled_from(sorted(claims))))
    said = {name: dataclasses.replace(claim, draining=name in draining) for name, claim in claims.items()}
    result = assign_lanes(lanes, said)
    assert sorted(lane for owned in result.values() for lane in owned) == list(range(lanes))
    assert result.keys() == claims.keys()
    if draining != set(claims):
        assert not any(result[name] for name in draining)


def test_draining_is_said_on_the_wire_and_not_by_older_members() -> None:
    claim = MemberClaim((2, 1), 3, 0.5, draining=True, warm=(7, 1))
    assert claim_of(encode_claim(claim)) == claim
    assert claim_of(msgspec.msgpack.encode([3, [1, 2], 0.5])) == MemberClaim((1, 2), 3, 0.5)


@given(LANES, CLAIMS)
def test_an_assignment_stays_when_nothing_changes(lanes: int, claims: dict[str, MemberClaim]) -> None:
    first = assign_lanes(lanes, claims)
    again = {
        member: MemberClaim(tuple(first[member]), 9, claim.capacity, warm=claim.warm)
        for member, claim in claims.items()
    }
    assert assign_lanes(lanes, again) == first


@given(LANES, CLAIMS)
def test_no_lane_moves_without_need(lanes: int, claims: dict[str, MemberClaim]) -> None:
    """Whoever ends with more lanes than it held gave none away."""
    result = assign_lanes(lanes, claims)
    for member, owned in result.items():
        held = {
            lane
            for lane in claims[member].lanes
            if lane < lanes
            and not any(
                lane in other.lanes
                and (other.generation, _reversed(name)) > (claims[member].generation, _reversed(member))
                for name, other in claims.items()
            )
        }
        assert owned <= held or held <= owned


def _reversed(member: str) -> list[int]:
    """Sorts names the other way round: of two equal generations the first name wins."""
    return [-ord(letter) for letter in member] + [1]


@given(st.integers(1, 130), st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=30))
def test_joins_and_leaves_move_few_lanes(lanes: int, history: list[tuple[bool, int]]) -> None:
    members = {"first": assign_lanes(lanes, {"first": MemberClaim()})["first"]}
    generation = 1
    for number, (join, pick) in enumerate(history):
        before = {lane: member for member, owned in members.items() for lane in owned}
        if join or len(members) == 1:
            name = f"{pick}-{number}"
            claims = {member: MemberClaim(tuple(sorted(owned)), generation) for member, owned in members.items()} | {
                name: MemberClaim()
            }
            bound = math.ceil(lanes / len(claims))
        else:
            bound = math.ceil(lanes / len(members))
            leaver = sorted(members)[pick % len(members)]
            claims = {
                member: MemberClaim(tuple(sorted(owned)), generation)
                for member, owned in members.items()
                if member != leaver
            }
        members = assign_lanes(lanes, claims)
        after = {lane: member for member, owned in members.items() for lane in owned}
        generation += 1
        assert sum(before[lane] != after[lane] for lane in range(lanes)) <= bound


@given(LANES, CLAIMS)
def test_what_is_warm_changes_which_lanes_move_and_never_how_many(lanes: int, claims: dict[str, MemberClaim]) -> None:
    cold = {name: dataclasses.replace(claim, warm=()) for name, claim in claims.items()}
    with_warm, without = assign_lanes(lanes, claims), assign_lanes(lanes, cold)
    assert {name: len(owned) for name, owned in with_warm.items()} == {
        name: len(owned) for name, owned in without.items()
    }


def test_the_largest_claims_fit_the_wire() -> None:
    every = tuple(range(9_999, -1, -1))
    claim = MemberClaim(every, 2**53, 0.1, draining=True, warm=every)
    assert claim_of(encode_claim(claim)) == claim


def test_the_later_generation_wins() -> None:
    stale = MemberClaim(tuple(range(8)), generation=3)
    current = MemberClaim(tuple(range(4)), generation=4)
    for names in (("a", "b"), ("b", "a")):
        result = assign_lanes(8, dict(zip(names, (stale, current), strict=True)))
        assert result[names[1]] == frozenset(range(4))


@given(st.builds(MemberClaim, LANE_LISTS, st.integers(0, 2**53), CAPACITIES, st.booleans(), LANE_LISTS))
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
