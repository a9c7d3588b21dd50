"""The lane assignment: properties over random claims and over histories of joins and leaves."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.bus.balance import MOST_LEVEL, MemberClaim, assign_lanes

LANES = st.integers(0, 70)
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
LEVELS = st.lists(st.integers(0, MOST_LEVEL), max_size=90).map(tuple)
SPEEDS = st.one_of(st.just(0.0), st.floats(0, 1e12))
MEASURED = CLAIMS.flatmap(
    lambda claims: st.fixed_dictionaries(
        {
            name: st.builds(dataclasses.replace, st.just(claim), loads=LEVELS, speed=SPEEDS)
            for name, claim in claims.items()
        }
    )
)


@given(LANES, MEASURED)
def test_every_lane_has_one_owner(lanes: int, claims: dict[str, MemberClaim]) -> None:
    result = assign_lanes(lanes, claims)
    assert set(result) == set(claims)
    assert sorted(lane for owned in result.values() for lane in owned) == list(range(lanes))


@given(LANES, MEASURED)
def test_each_member_has_a_lane_where_there_are_enough(lanes: int, claims: dict[str, MemberClaim]) -> None:
    """A worker without lanes measures nothing, so one that a standstill made look slow would never get any again."""
    counts = [len(owned) for owned in assign_lanes(lanes, claims).values()]
    assert min(counts) >= 1 or lanes < len(claims)


@given(LANES, CLAIMS)
def test_no_move_would_lessen_the_largest_share(lanes: int, claims: dict[str, MemberClaim]) -> None:
    result = assign_lanes(lanes, claims)
    for giver, owned in result.items():
        for taker in result.keys() - {giver}:
            with_one_more = (len(result[taker]) + 1) / claims[taker].capacity
            assert with_one_more >= len(owned) / claims[giver].capacity * (1 - 1e-6) or len(owned) <= 1


@given(LANES, CLAIMS)
def test_equal_members_have_equal_numbers_of_lanes(lanes: int, claims: dict[str, MemberClaim]) -> None:
    alike = {name: dataclasses.replace(claim, capacity=2.0) for name, claim in claims.items()}
    counts = [len(owned) for owned in assign_lanes(lanes, alike).values()]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("more", ["a", "b", "c"])
def test_the_lane_that_rounding_leaves_over_stays_where_it_is(more: str) -> None:
    counts = {member: 3 + (member == more) for member in "abc"}
    free = iter(range(10))
    held = {member: frozenset(next(free) for _ in range(count)) for member, count in counts.items()}
    assert assign_lanes(10, {member: MemberClaim(tuple(lanes), 1) for member, lanes in held.items()}) == held


@given(LANES, MEASURED, st.randoms())
def test_the_order_of_members_does_not_matter(lanes: int, claims: dict[str, MemberClaim], random: object) -> None:
    shuffled = list(claims.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert assign_lanes(lanes, dict(shuffled)) == assign_lanes(lanes, claims)


@given(LANES, MEASURED, st.data())
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


@given(LANES, MEASURED, st.lists(st.integers(0, MOST_LEVEL), min_size=70, max_size=70))
def test_an_assignment_comes_to_rest_when_nothing_changes(
    lanes: int, claims: dict[str, MemberClaim], levels: list[int]
) -> None:
    """A lane moves once an assignment, and each move lessens what is uneven: so it ends, within a few of them."""
    before: dict[str, frozenset[int]] | None = None
    for generation in range(9, 40):
        now = assign_lanes(lanes, claims)
        if now == before:
            return
        claims = {
            name: dataclasses.replace(
                claim,
                lanes=tuple(sorted(now[name])),
                generation=generation,
                loads=tuple(levels[lane] for lane in sorted(now[name])),
            )
            for name, claim in claims.items()
        }
        before = now
    pytest.fail("lanes move for ever")


@given(LANES, CLAIMS)
def test_no_lane_moves_without_need(lanes: int, claims: dict[str, MemberClaim]) -> None:
    """Whoever ends with more lanes than it held gave none away, unless to whom it was warm with."""
    claims = {name: dataclasses.replace(claim, warm=()) for name, claim in claims.items()}
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


def test_the_later_generation_wins() -> None:
    stale = MemberClaim(tuple(range(8)), generation=3)
    current = MemberClaim(tuple(range(4)), generation=4)
    for names in (("a", "b"), ("b", "a")):
        result = assign_lanes(8, dict(zip(names, (stale, current), strict=True)))
        assert result[names[1]] == frozenset(range(4))


@pytest.mark.parametrize("speed", [5e-324, 1e-9, 1.0, 1e12])
def test_a_wrong_speed_takes_at_most_what_sixteen_members_get(speed: float) -> None:
    honest = {f"h{number}": MemberClaim(speed=10.0) for number in range(3)}
    counts = {name: len(owned) for name, owned in assign_lanes(190, honest | {"x": MemberClaim(speed=speed)}).items()}
    assert all(10 <= counts[name] <= 64 for name in honest), counts


@pytest.mark.parametrize("levels", [(1,) * 16, (MOST_LEVEL,) * 16, (MOST_LEVEL,) + (1,) * 15])
def test_wrong_loads_count_until_the_next_owner_has_measured(levels: tuple[int, ...]) -> None:
    names = ["h0", "h1", "h2", "x"]
    owned = assign_lanes(64, {name: MemberClaim() for name in names})
    for generation in range(1, 4):
        claims = {
            name: MemberClaim(tuple(sorted(owned[name])), generation, loads=(20,) * len(owned[name])) for name in names
        }
        if generation == 1:
            claims["x"] = dataclasses.replace(claims["x"], loads=levels)
        owned = assign_lanes(64, claims)
    assert {len(lanes) for lanes in owned.values()} == {16}


@pytest.mark.parametrize("members", [2, 5])
def test_a_lane_that_is_too_heavy_for_anyone_stays_and_others_leave_its_owner(members: int) -> None:
    claims = {name: MemberClaim() for name in "abcde"[:members]}
    owned = assign_lanes(64, claims)
    hot = min(owned["a"])
    for generation in range(1, 6):
        before = owned
        claims = {
            name: MemberClaim(tuple(sorted(lanes)), generation, loads=tuple(1 + 80 * (lane == hot) for lane in lanes))
            for name, lanes in ((name, sorted(lanes)) for name, lanes in owned.items())
        }
        owned = assign_lanes(64, claims)
        if generation > 1:
            assert owned == before
    assert owned["a"] == {hot}


def test_devices_of_one_kind_are_alike_and_a_faster_one_gets_more() -> None:
    def numbers(*speeds: float) -> list[int]:
        claims = {f"{number}": MemberClaim(speed=speed) for number, speed in enumerate(speeds)}
        return [len(owned) for owned in assign_lanes(60, claims).values()]

    assert numbers(9.2, 10.0, 10.9) == [20, 20, 20]
    assert numbers(10.0, 19.0, 0.0) == [15, 30, 15], "an unknown speed is the median"
    claims = {"by hand": MemberClaim(capacity=3.0), "measured": MemberClaim(speed=123.0)}
    assert {name: len(owned) for name, owned in assign_lanes(60, claims).items()} == {"by hand": 45, "measured": 15}
