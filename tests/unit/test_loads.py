"""The loads of lanes that a member states: averages of their rates, known after a while."""

from __future__ import annotations

import pytest

from relaygr_stream.bus.balance import MOST_LEVEL
from relaygr_stream.bus.loads import AVERAGE_S, LEAST_S, PRIOR_RECORDS, LaneLoads, level_of

STEP_S = 5.0


def read(loads: LaneLoads, rates: dict[int, float], seconds: float, begin: float = 0.0) -> None:
    for step in range(int(seconds / STEP_S) + 1):
        at = step * STEP_S
        loads.note({lane: int(rate * at) for lane, rate in rates.items()}, begin + at)


def test_rates_are_known_after_a_while_and_not_before() -> None:
    loads = LaneLoads()
    read(loads, {0: 2.0, 1: 20.0}, LEAST_S - STEP_S)
    assert not loads.levels
    loads = LaneLoads()
    read(loads, {0: 2.0, 1: 20.0}, LEAST_S)
    assert loads.levels == {0: level_of(2.0), 1: level_of(20.0)}


def test_a_rush_of_seconds_changes_little_and_one_of_minutes_much() -> None:
    loads = LaneLoads()
    read(loads, {0: 10.0}, 2 * AVERAGE_S)
    calm = loads.levels[0]
    read(loads, {0: 40.0}, 2 * STEP_S, begin=2 * AVERAGE_S)
    assert calm <= loads.levels[0] <= calm + 3
    read(loads, {0: 40.0}, 3 * AVERAGE_S, begin=3 * AVERAGE_S)
    assert loads.levels[0] >= level_of(40.0) - 2


def test_a_lane_that_was_lost_is_measured_anew() -> None:
    loads = LaneLoads()
    read(loads, {0: 10.0, 1: 10.0}, LEAST_S)
    loads.note({0: 1000}, LEAST_S + 1)
    loads.note({0: 1000, 1: 10**9}, LEAST_S + 2)
    assert set(loads.levels) == {0}


@pytest.mark.parametrize("positions", [[5, 3, 0], [0, 10**15, 2 * 10**15]])
def test_a_log_that_begins_anew_or_leaps_gives_a_level_in_bounds(positions: list[int]) -> None:
    loads = LaneLoads()
    for number, position in enumerate(positions):
        loads.note({0: position}, number * LEAST_S)
    assert 1 <= loads.levels[0] <= MOST_LEVEL


def test_few_records_tell_nothing() -> None:
    loads = LaneLoads()
    read(loads, dict.fromkeys(range(16), 0.1), AVERAGE_S)
    assert set(loads.levels.values()) <= {1, 2}
    assert level_of(PRIOR_RECORDS / AVERAGE_S) == 1 + 8
    busy = LaneLoads()
    read(busy, {0: 1.1 * PRIOR_RECORDS / AVERAGE_S}, AVERAGE_S)
    assert busy.telling
    assert not LaneLoads().telling
