"""A group that keeps its SLO with fewer workers than its demand asks for: shown by as many windows as it takes."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.ops.planner.demand import demand_of
from relaygr_stream.ops.planner.plan import DAY, MOST_FACTOR, Memory, decide
from relaygr_stream.ops.planner.seen import GroupSeen, Observation, WorkerSeen
from relaygr_stream.ops.planner.tried import ENOUGH, FORGET_S, Tried
from relaygr_stream.settings.scenarios import Scenario

SLOW = Scenario(name="feed", slo_ms=5000.0, lead_ms=15000.0)
PERIOD_S = 10.0


def window(answers: int, demand: float, late: int = 0, workers: int = 2) -> GroupSeen:
    """A group of so many workers that answers so much in a period, which needs so many workers by the formula."""
    each = [answers // workers + (index < answers % workers) for index in range(workers)]
    seen = tuple(
        WorkerSeen(name=f"w{index}", answers=count, late=late if index == 0 else 0, busy=0.6)
        for index, count in enumerate(each)
    )
    low, high = 0.0, 1e5
    for _ in range(60):  # the score's time with which the formula asks for it
        middle = (low + high) / 2
        group = GroupSeen(workers=seen, per_second=answers / PERIOD_S, prefix_ms=middle, score_ms=middle / 10)
        low, high = (middle, high) if demand_of(group, SLOW) < demand else (low, middle)
    return group


def after(windows: list[GroupSeen]) -> tuple[Memory, list[float]]:
    """The factor after each."""
    memory, factors = Memory(), []
    for index, group in enumerate(windows):
        memory, _ = decide(memory, Observation(at_s=index * PERIOD_S, groups={"feed": group}), [SLOW])
        factors.append(memory.factor["feed"])
    return memory, factors


def test_a_slow_scenario_shows_it_too() -> None:
    """Six answers a window, as only a window of 200 did."""
    _, factors = after([window(6, 2.6)] * 40)
    assert factors[ENOUGH // 6] == pytest.approx(1.0)
    assert factors[-1] == pytest.approx(2 / 2.6, rel=0.01)


@given(answers=st.lists(st.integers(0, 150), min_size=1, max_size=30), demand=st.floats(2.1, 5.0))
def test_it_is_lowered_once_the_answers_of_all_windows_suffice(answers: list[int], demand: float) -> None:
    """The first observation ends a window of which no length is known."""
    found, factors = 0, []
    memory = Memory()
    for index, count in enumerate(answers):
        group = window(count, demand) if count else GroupSeen(workers=window(1, demand).workers)
        memory, _ = decide(memory, Observation(at_s=index * PERIOD_S, groups={"feed": group}), [SLOW])
        # the average asks for more than there is only where this window does
        found += count if index and count and demand_of(group, SLOW) > 2 and memory.demand["feed"] > 2 else 0
        factors.append(memory.factor["feed"])
        if found < ENOUGH:
            assert factors[-1] == pytest.approx(1.0)
    assert all(factor >= 1 / MOST_FACTOR for factor in factors)
    assert min(factors) >= (2 / demand) * 0.99


@given(late=st.integers(4, 40), demand=st.floats(2.1, 5.0))
def test_who_is_late_more_often_than_the_slo_allows_is_not_lowered(late: int, demand: float) -> None:
    _, factors = after([window(100, demand, late=late)] * 12)
    assert min(factors) == pytest.approx(1.0)


def test_a_tide_that_has_gone_shows_nothing_though_the_average_remembers_it() -> None:
    _, factors = after([window(20, 3.0)] * 3 + [window(100, 0.5)] * 12)
    assert min(factors) == pytest.approx(1.0)


def test_the_least_demand_among_the_windows_counts() -> None:
    """Evidence of an ebb does not show that a flood fits."""
    _, factors = after([window(30, 2.2)] * 7 + [window(30, 4.0)] * 20)
    lowered = next(factor for factor in factors if factor < 0.99)
    assert lowered >= 2 / 2.3


def test_windows_that_overlap_and_a_repeated_look_count_once() -> None:
    tried = Tried(since_s=0.0)
    group = window(100, 2.6)
    assert tried.and_of(group, 1.3, 5.0, PERIOD_S / 2).answers == pytest.approx(50)
    assert tried.and_of(group, 1.3, 5.0, 0.0) == tried
    assert tried.and_of(group, 1.3, 99.0, 99.0).answers == pytest.approx(100)
    assert tried.and_of(msgspec.structs.replace(group, per_second=0.0), 1.3, 5.0, 5.0).least == math.inf


def test_what_is_older_than_a_day_is_dropped() -> None:
    tried = Tried(since_s=0.0, answers=199.0, least=1.3)
    assert tried.and_of(window(100, 2.6), 1.3, FORGET_S + 1, PERIOD_S) == Tried(since_s=FORGET_S + 1)
    assert DAY.patience_s < FORGET_S
