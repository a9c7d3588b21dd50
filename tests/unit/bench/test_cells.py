from __future__ import annotations

from dataclasses import replace

import msgspec

from relaygr_stream.lab.bench.cells import Cell
from relaygr_stream.lab.bench.modes import RELAY
from tests.unit.bench.reports import WORLD

#: As fitted when all requests had 512 tokens: right there, and wild at any other length.
WILD = replace(WORLD, costs=msgspec.structs.replace(WORLD.costs, c1=0.0, c2=WORLD.costs.c1 / 512))


def begun(*costs: object) -> float:
    cell = Cell("length", RELAY, 0.5, 10.0, 1.2)
    cell.begin_search(costs)  # type: ignore[arg-type]
    return cell.searches[0].guess


def test_a_guess_at_another_length_is_not_made_from_one_wild_fit() -> None:
    assert begun(WILD) < 0.8 * begun(WORLD)
    assert begun(WORLD, WORLD, WILD) == begun(WORLD)


def test_a_repeat_begins_where_the_last_one_ended() -> None:
    cell = Cell("length", RELAY, 0.5, 10.0, 1.2)
    cell.begin_search([WORLD])
    cell.searches[0].record(1760, passed=True)
    cell.begin_search([WILD])
    assert cell.searches[1].guess == 1760
