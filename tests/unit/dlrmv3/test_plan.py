"""What a bench can afford: queries of a run, where a search begins and ends, and why it found nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relaygr_lab.dlrmv3.loadgen import FEWEST, allowed_late
from relaygr_lab.dlrmv3.plan import (
    LEAST_QPS,
    RUNS,
    STEP,
    TOLERANCE,
    affordable,
    fewest_queries,
    payable,
    search_of,
    slowness,
    why_none,
)
from relaygr_lab.dlrmv3.report import Run

rates = st.floats(0.6, 500.0)


@given(late=st.integers(0, 40))
def test_the_fewest_queries_allow_so_many_late_ones(late: int) -> None:
    queries = fewest_queries(late)
    assert allowed_late(queries) == late
    assert allowed_late(queries - 1) == late - 1


def test_the_fewest_of_all_are_loadgens() -> None:
    assert [fewest_queries(late) for late in (0, 1)] == [FEWEST, 662]


@given(of_modes=st.lists(rates, min_size=1, max_size=4), seconds=st.floats(1.0, 1e5), most=st.integers(FEWEST, 3000))
def test_a_run_has_the_most_queries_that_the_budget_pays_for(of_modes: list[float], seconds: float, most: int) -> None:
    queries = affordable(of_modes, seconds, FEWEST, most)
    taken_s = RUNS * sum(1 / rate for rate in of_modes)
    assert FEWEST <= queries <= most
    assert queries == fewest_queries(allowed_late(queries)), "further queries would allow no further late one"
    assert queries == FEWEST or queries * taken_s <= seconds * (1 + 1e-9)
    more = fewest_queries(allowed_late(queries) + 1)
    assert more > most or more * taken_s > seconds * (1 - 1e-9)


def test_queries_that_were_asked_for_are_kept() -> None:
    assert affordable([10.0], 1.0, 700, 700) == affordable([10.0], 1e6, 700, 700) == 700


@given(guess=st.floats(0.0, 500.0), off=st.floats(0.02, 5.0), seconds=st.floats(30.0, 5000.0))
def test_a_search_finds_a_rate_however_far_its_beginning_is_off(guess: float, off: float, seconds: float) -> None:
    """And without a rate above the floor it says so, having tried the floor."""
    search = search_of(guess, FEWEST, seconds, most_runs=30)
    limit = off * max(guess, 1.0)
    while (rate := search.next()) is not None:
        assert rate >= LEAST_QPS
        assert FEWEST / rate < seconds
        search.record(rate, rate <= limit)
    if limit < search.low:
        assert search.passed is None
        assert search.failed == search.low
    elif limit < search.high:
        assert search.passed is not None
        assert search.passed <= limit < search.passed * TOLERANCE * (1 + 1e-9)
        assert len(search.tried) <= 12


@given(
    guess=st.floats(0.0, 500.0),
    limit=st.floats(0.1, 500.0),
    seconds=st.floats(30.0, 5000.0),
    early=st.floats(0.02, 1.0),
)
def test_a_search_stays_within_its_time_and_finds_a_rate_that_it_can_pay_for(
    guess: float, limit: float, seconds: float, early: float
) -> None:
    """early: the part of its queries that a run has which fails."""
    search, left = search_of(guess, FEWEST, seconds, most_runs=30), seconds
    lowest = math.inf
    while (rate := payable(search, FEWEST, left)) is not None:
        lowest = min(lowest, rate)
        left -= FEWEST / rate * (1.0 if rate <= limit else early)
        search.record(rate, rate <= limit)
        assert left >= -1e-6
    if search.passed is None:
        assert lowest > limit
        assert left <= 0 or lowest <= TOLERANCE * max(LEAST_QPS, FEWEST / left) * (1 + 1e-9)


def test_steps_widen() -> None:
    search = search_of(100.0, FEWEST, 1e4, most_runs=10)
    tried = []
    for _ in range(3):
        rate = search.next()
        assert rate is not None
        tried.append(rate)
        search.record(rate, False)
    assert tried == pytest.approx([100.0, 100.0 / STEP, 100.0 / STEP**3])


def test_slowness_is_that_of_the_median_request() -> None:
    assert slowness([20.0, 30.0, 400.0], [10.0, 20.0, 20.0]) == 2.0


def run(qps: float, ranked: int, late: int, queries: int = FEWEST) -> Run:
    return Run(
        mode="engine", qps=qps, queries=queries, valid=False, p99_ms=99.0, outcomes={"hbm": ranked}, errors={},
        late=late, off_ms=(0.0, 0.0), folder="f",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([], "does not pay for one run of 459 queries"),
        ([run(9.0, 30, 3), run(4.0, 20, 1)], "at 4/s 1 of 20 queries took over 80 ms (5.0%), of 459 only 0 may"),
        ([run(9.0, 30, 3), run(4.0, 400, 1)], "early stopping: at 4/s 1 of 400"),
        ([run(4.0, 20, 1)], "lower than 4.0/s the budget does not pay for"),
        ([run(LEAST_QPS, 20, 1)], "no lower rate is searched"),
    ],
)
def test_a_mode_without_a_rate_says_why(runs: list[Run], words: str) -> None:
    line = why_none(runs, 4.0, FEWEST, 80.0)
    assert words in line
    assert "\n" not in line
