"""What a bench of rollouts makes of the rankings that it saw: hits against those before, until they have recovered."""

from __future__ import annotations

import math

import pytest
from relaygr_lab.rollouts import WINDOW, Sample, changed

RATE = 100


def samples(*hits: bool, start_s: float = 0.0, latency_ms: float = 10.0) -> list[Sample]:
    return [Sample(start_s + number / RATE, hit, latency_ms) for number, hit in enumerate(hits)]


def test_a_change_that_nobody_sees() -> None:
    found = changed("c", samples(*[True] * 2000), began_s=10.0, before_s=0.0)
    assert found.least == pytest.approx(1.0)
    assert (found.before, found.below_s) == (1.0, 0.0)
    assert (found.lost, found.rankings) == (0, 1000)


def test_hits_that_fall_to_half_and_come_back() -> None:
    """Half of those before, until three seconds after its start."""
    usual = [True] * 1000
    found = changed("c", samples(*usual, *[True, False] * 150, *usual), began_s=10.0, before_s=0.0)
    assert found.least == pytest.approx(0.5)
    whole = WINDOW / RATE  # the last window with too many misses ends so long behind them, less those it may have
    assert 3.0 < found.below_s < 3.0 + whole
    assert found.before == 1.0


def test_shares_are_of_the_hits_before_and_not_of_what_came_earlier() -> None:
    earlier, before = [False] * 500, [True, True, True, False] * 250
    found = changed("c", samples(*earlier, *before, *before), began_s=15.0, before_s=5.0)
    assert found.before == 0.75
    assert found.least == pytest.approx(1.0)


def test_a_lost_ranking_is_counted_and_is_no_hit() -> None:
    lost = [Sample(20.0 + number, hit=False, latency_ms=math.nan) for number in range(3)]
    found = changed("c", [*samples(*[True] * 2000), *lost], began_s=10.0, before_s=0.0)
    assert found.lost == 3
    assert (found.p99_before_ms, found.p99_ms) == (10.0, 10.0)
