from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.lab.bench.cells import LEAST_LENGTH, LENGTH_STEP, World
from relaygr_stream.lab.bench.warm_up import FULL_SHARE, longest_working
from relaygr_stream.wire.messages import CostModel

COSTS = CostModel(c0=2.0, c1=0.018, c2=4e-6, c3=5e-5)
WORLD = World(costs=COSTS, slo_ms=50.0, delay_ms=150.0, candidates=40, growth=3.0, workers=1, longest=8160)


def full_ms(length: int) -> float:
    return WORLD.cost(length, 0.0).full


def test_a_full_inference_of_that_length_takes_its_share_and_of_the_next_one_more() -> None:
    length = longest_working(WORLD)
    assert length % LENGTH_STEP == 0
    assert full_ms(length) <= FULL_SHARE * WORLD.slo_ms < full_ms(length + LENGTH_STEP)


@given(st.floats(1.0, 4.0))
def test_what_took_longer_than_fitted_shortens_it(slower: float) -> None:
    at = longest_working(WORLD)
    shorter = longest_working(WORLD, slower * full_ms(at), at)
    assert shorter <= at
    assert shorter == LEAST_LENGTH or slower * full_ms(shorter) <= FULL_SHARE * WORLD.slo_ms * (1 + 1e-9)


@pytest.mark.parametrize(("slow_ms", "expected"), [(0.001, longest_working(WORLD)), (math.inf, LEAST_LENGTH)])
def test_nothing_lengthens_it_and_without_answers_it_is_the_least(slow_ms: float, expected: int) -> None:
    assert longest_working(WORLD, slow_ms, longest_working(WORLD)) == expected
