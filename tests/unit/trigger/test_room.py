"""What an owner has pinned, and what it was sent since it said so, is one room for all its lanes: where a request does
not fit, another worker gets it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.wire.topic_files import lane_of
from tests.unit.trigger.parts import lane_status, worker_status
from tests.unit.trigger.view import TOKENS, View

#: Of a prefix of TOKENS.
NBYTES = 10 * TOKENS


def view(*pinned: int, budget: int) -> View:
    """`a` owns a lane for each of these pinned bytes, with so large a part of the room each; `b` the next, with all."""
    made = View()
    made.owners.take(worker_status(
        *(lane_status(lane=lane, budget=budget, pinned=nbytes) for lane, nbytes in enumerate(pinned)), name="a"
    ))  # fmt: skip
    made.state("b", (4, 5))
    return made


def reasons(made: View, *lanes: int) -> list[str]:
    return [made.ask(lane=lane, rank_in_ms=1500.0).reason for lane in lanes]


def test_a_lane_takes_what_the_others_do_not() -> None:
    assert reasons(view(0, 0, 0, budget=NBYTES), 0, 0, 0, 0) == ["admitted"] * 3 + ["delegated"]


def test_what_one_lane_took_is_gone_for_all() -> None:
    assert reasons(view(0, 0, 0, budget=NBYTES), 0, 1, 1, 2) == ["admitted"] * 3 + ["delegated"]


def test_what_the_lanes_hold_is_gone_whoever_asked_for_it() -> None:
    assert reasons(view(0, 2 * NBYTES, budget=2 * NBYTES), 0, 0, 0) == ["admitted"] * 2 + ["delegated"]
    assert reasons(view(0, 1, budget=NBYTES), 0, 0) == ["admitted", "delegated"]


def test_what_was_sent_counts_until_a_status_has_it() -> None:
    made = view(0, 0, budget=NBYTES)
    assert reasons(made, 0, 1, 0) == ["admitted", "admitted", "delegated"]
    made.now += 1.0
    made.owners.take(worker_status(*(lane_status(lane=lane, budget=NBYTES) for lane in (0, 1)), name="a"))
    assert reasons(made, 0) == ["admitted"], "their rankings have come"


def test_without_another_worker_the_owner_gets_it_and_refuses_it_itself() -> None:
    made = View()
    made.state("a", (0, 1), of_lanes={"budget": 0})
    assert reasons(made, 0, 1) == ["admitted", "admitted"]


def of_lanes(count: int, room: int, asked: list[tuple[int, int]]) -> list[str]:
    """What becomes of requests, (user, tokens) each, where two workers of this room have so many lanes."""
    made = View(count)
    for number, name in enumerate("ab"):  # lane n of more lanes is with the worker of the lane that it splits
        made.state(name, tuple(range(number, count, 2)), of_lanes={"budget": room // (count // 2)})
    return [
        made.ask(tokens, user=f"u{user}", lane=lane_of(f"u{user}", count), rank_in_ms=1500.0).reason
        for user, tokens in asked
    ]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 50)), max_size=40),
    st.integers(1, 200),
    st.sampled_from([2, 4]),
)
def test_with_more_lanes_no_request_is_refused_that_fewer_admit(
    asked: list[tuple[int, int]], part: int, factor: int
) -> None:
    """A lane's part of the room is smaller, and is no bound of its own."""
    room = 32 * part  # divides by the lanes of a worker: what each states is whole bytes
    assert of_lanes(16 * factor, room, asked) == of_lanes(16, room, asked)


def test_the_room_of_many_lanes_ends_where_it_ends() -> None:
    found = of_lanes(64, 32 * 100, [(number, 50) for number in range(40)])
    assert found.count("admitted") == 12, "six prefixes of 500 bytes in each worker"
