from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from relaygr_lab.bench.cells import Cell
from relaygr_lab.bench.modes import RELAY

from tests.unit.bench.reports import WORLD, probe

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


@pytest.mark.parametrize(("longest", "carried", "last"), [(8000, 500, 480), (968, 10_000, 960)])
def test_no_length_is_probed_twice(longest: int, carried: int, last: int) -> None:
    cell = Cell("length", RELAY, 0.5, 10.0, 1.05)
    cell.begin_search([replace(WORLD, longest=longest)])
    tried: list[int] = []
    while (point := cell.next()) is not None:
        tried.append(point[0])
        cell.record(probe(RELAY, point[1], passed=point[0] <= carried, length=point[0]))
    assert len(set(tried)) == len(tried)
    assert cell.values == [last]
    assert cell.settled is (carried < longest)


def test_a_rate_that_is_given_is_tried_whatever_the_costs_say() -> None:
    """Beyond one and a half times a baseline's own capacity less was sent than the report said."""
    cell = Cell("rate", RELAY, 0.5, 512, 1.2, start=1e4, most=1)
    cell.begin_search([WORLD])
    assert cell.next() == (512, 1e4)


@pytest.mark.parametrize("most_rate", [0.7, 5.0])
def test_no_search_goes_beyond_the_most_rate_or_the_most_probes(most_rate: float) -> None:
    cell = Cell("rate", RELAY, 0.5, 512, 1.2, start=1e6, most=3, most_rate=most_rate)
    cell.begin_search([WORLD])
    search, tried = cell.searches[0], []
    while (point := cell.next()) is not None:
        tried.append(point[1])
        search.record(point[1], passed=True)
    assert tried == [most_rate]
    assert not search.settled, "a larger rate might pass, too"
    failing = Cell("rate", RELAY, 0.5, 512, 1.2, start=4.0, most=3)
    failing.begin_search([WORLD])
    while (point := failing.next()) is not None:
        failing.searches[0].record(point[1], passed=False)
    assert len(failing.searches[0].tried) == 3
    assert not failing.searches[0].settled
