"""What an owner has pinned, and what it was sent since it said so, is one room for all its lanes: where a request does
not fit, another worker gets it."""

from __future__ import annotations

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
