"""How `make bench-scenarios` judges what the planner says of one pool."""

from __future__ import annotations

import pytest
from relaygr_lab.simulate.groups import Outcome, Told
from scenarios import judged

from relaygr_stream.wire.planner_status import SharedGroup


def day(within: int, *, shared: bool = False) -> Outcome:
    told = {name: Told(1000, within, 1.0) for name in ("feed", "search")}
    return Outcome(told, (), SharedGroup(scenarios=("feed", "search")) if shared else None)


@pytest.mark.parametrize(
    ("moving", "mixed", "proposed", "broken"),
    [
        (900, 930, 3, 0),
        (900, 930, 1, 1),
        (900, 905, 0, 0),
        (930, 900, 0, 0),
        (930, 900, 2, 1),
        (930, 900, 1, 0),
    ],
    ids=["ahead, proposed", "ahead, on one day of three", "a tie", "behind", "behind, proposed", "on one day of three"],
)
def test_the_planner_is_to_propose_one_pool_where_it_is_ahead(
    moving: int, mixed: int, proposed: int, broken: int
) -> None:
    days = [day(moving, shared=number < proposed) for number in range(3)]
    assert len(judged({"moving": days, "mixed": [day(mixed)] * 3})) == broken
