"""The quadratic through points: exact where there is one, else the nearest of those without a negative coefficient."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.engine.cost_model import LEAST_MS, relative_quadratic
from tests.properties import examples

XS = [0.0625 * 1.3**step for step in range(12)]
SHAPES: list[Callable[[float], float]] = [
    lambda x: 5 - 2 * x,
    lambda x: 1 + 8 * math.sqrt(x),
    lambda x: 0.1 + x**3,
    lambda x: 3.0,
]


@settings(max_examples=examples(60))
@given(st.floats(LEAST_MS, 5), st.floats(0, 50), st.floats(0, 50))
def test_points_of_a_quadratic_give_it_back(a: float, b: float, c: float) -> None:
    """Where none is below LEAST_MS, under which times are all taken for alike."""
    fitted = relative_quadratic([(x, a + b * x + c * x * x) for x in XS])
    for x in XS:
        assert fitted[0] + fitted[1] * x + fitted[2] * x * x == pytest.approx(a + b * x + c * x * x, rel=1e-5)


def squared_errors(fitted: tuple[float, ...], points: list[tuple[float, float]]) -> float:
    return sum(((fitted[0] + fitted[1] * x + fitted[2] * x * x) / ms - 1) ** 2 for x, ms in points)


@pytest.mark.parametrize("seed", range(40))
def test_no_other_quadratic_without_negative_coefficients_is_nearer(seed: int) -> None:
    rng = random.Random(seed)
    shape = rng.choice(SHAPES)
    points = [(x, max(0.05, shape(x)) * rng.uniform(0.8, 1.2)) for x in XS]
    fitted = relative_quadratic(points)
    assert min(fitted) >= 0
    best = squared_errors(fitted, points)
    for index in range(3):
        for step in (-1e-3, 1e-3):
            other = list(fitted)
            other[index] = max(0.0, other[index] + step)
            # One coefficient is dropped at a time, which may end a little beside the very best.
            assert squared_errors(tuple(other), points) > 0.98 * best


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_least_squares_say_where_no_coefficient_is_negative(seed: int) -> None:
    rng = random.Random(seed)
    points = [(x, (1 + 5 * x + 3 * x * x) * rng.uniform(0.97, 1.03)) for x in XS]
    x, ms = np.array(points).T
    expected = np.linalg.lstsq(np.vander(x, 3, increasing=True) / ms[:, None], np.ones_like(ms), rcond=None)[0]
    if (expected >= 0).all():
        assert relative_quadratic(points) == pytest.approx(tuple(expected), rel=1e-6)


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.one_of(st.just(0.0), st.floats(1e-9, 1e6))), min_size=1, max_size=12)
)
def test_points_that_do_not_determine_it_are_no_error(points: list[tuple[float, float]]) -> None:
    assert all(0 <= each < math.inf for each in relative_quadratic([*points, points[0]]))
