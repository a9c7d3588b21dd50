from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relaygr_lab.bench.statistics import (
    allowed_bad,
    bad_share_bounds,
    fewest_samples,
    passes,
    ratio_bounds,
    samples_for,
)

from relaygr_stream.workload.quantiles import quantile
from tests.properties import examples


@given(st.lists(st.floats(0, 100), min_size=100, max_size=400), st.floats(0, 100))
def test_a_sample_passes_exactly_when_its_nearest_rank_p99_is_within_the_slo(values: list[float], slo: float) -> None:
    p99 = quantile(values, 0.99)
    assert p99 is not None
    assert passes(len(values), sum(value > slo for value in values)) == (p99 <= slo)


def test_nothing_measured_passes_nothing() -> None:
    assert not passes(0, 0)


def test_numbers_of_samples() -> None:
    assert fewest_samples() == 100
    assert samples_for(0.95) == 299
    assert [allowed_bad(n) for n in (99, 100, 199, 200)] == [0, 1, 1, 2]


def test_bounds_of_no_bad_request_are_the_closed_form() -> None:
    low, high = bad_share_bounds(100, 0)
    assert low == 0.0
    assert high == pytest.approx(1 - 0.025 ** (1 / 100), abs=1e-9)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_bounds_enclose_the_observed_share(case: tuple[int, int]) -> None:
    requests, bad = case
    low, high = bad_share_bounds(requests, bad)
    assert 0 <= low <= bad / requests <= high <= 1


def chance_of(bad: int, requests: int, share: float) -> float:
    """Of a binomial."""
    log_p = math.lgamma(requests + 1) - math.lgamma(bad + 1) - math.lgamma(requests - bad + 1)
    return math.exp(log_p + bad * math.log(share) + (requests - bad) * math.log1p(-share))


@settings(max_examples=examples(25))
@given(st.integers(20, 100), st.floats(0.001, 0.2))
def test_bounds_cover_the_truth_as_often_as_they_say(requests: int, share: float) -> None:
    covered = 0.0
    for bad in range(requests + 1):
        if (chance := chance_of(bad, requests, share)) >= 1e-9:
            low, high = bad_share_bounds(requests, bad)
            covered += chance * (low <= share <= high)
    assert covered >= 0.95 - 1e-6


@settings(max_examples=examples(10))
@given(st.integers(10, 25), st.integers(10, 25), st.floats(0.02, 0.5), st.floats(0.02, 0.5))
def test_bounds_of_a_ratio_cover_the_truth_as_often_as_they_say(ours: int, theirs: int, p: float, q: float) -> None:
    covered, left = 0.0, 1.0
    for bad in range(ours + 1):
        for others in range(theirs + 1):
            if (chance := chance_of(bad, ours, p) * chance_of(others, theirs, q)) >= 1e-5:
                low, high = ratio_bounds(ours, bad, theirs, others)
                covered += chance * (low <= p / q <= high)
                left -= chance
    assert covered + left >= 0.95 - 1e-6


def test_bounds_of_a_ratio() -> None:
    assert ratio_bounds(95, 9, 76, 17) == pytest.approx((0.17, 1.01), abs=0.01)
    assert ratio_bounds(100, 0, 100, 0) == (0.0, math.inf)
    with pytest.raises(ValueError, match="0 and 5 requests"):
        ratio_bounds(0, 0, 5, 1)


def test_without_requests_nothing_is_known() -> None:
    assert bad_share_bounds(0, 0) == (0.0, 1.0)
