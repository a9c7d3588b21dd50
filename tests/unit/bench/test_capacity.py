from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from relaygr_lab.bench import capacity
from relaygr_lab.bench.capacity import (
    RequestCost,
    Traffic,
    device_ms,
    most_length,
    most_rate,
    predicted_rate,
)
from relaygr_lab.bench.modes import CACHE, FULL, RELAY, Mode

from relaygr_stream.wire.messages import CostModel

COSTS = CostModel(c0=4.0, c1=0.018, c2=4e-6, c3=5e-5)
TRAFFIC = Traffic(length=512, revisit=0.5, growth=3, candidates=40, delay_ms=150)
COST = RequestCost.of(COSTS, TRAFFIC)


def test_prefix_and_hit_add_up_to_the_fitted_full_inference() -> None:
    assert COST.full == pytest.approx(COSTS.full_ms(512, 40))


def test_an_extension_costs_what_the_longer_prefix_costs_more() -> None:
    shorter = RequestCost.of(COSTS, replace(TRAFFIC, length=509))
    assert COST.extension == pytest.approx(COST.prefix - shorter.prefix)


def test_the_bound_is_the_issues_formula() -> None:
    """Full cost ÷ ((1 - reuse) · pre-infer + extension + hit), with the extension weighed by the reuse."""
    ratio = most_rate(RELAY, COST, 0.9, 1) / most_rate(FULL, COST, 0.9, 1)
    assert ratio == pytest.approx(COST.full / (0.1 * COST.prefix + 0.9 * COST.extension + COST.hit))


def test_without_returns_the_relay_does_the_same_work() -> None:
    assert device_ms(RELAY, COST, 0.0) == pytest.approx(COST.full)
    assert device_ms(FULL, COST, 0.9) == pytest.approx(COST.full)


@given(st.floats(0, 0.99), st.floats(0, 0.99))
def test_more_returns_never_cost_more(one: float, other: float) -> None:
    less, more = sorted((one, other))
    for mode in (CACHE, RELAY):
        assert device_ms(mode, COST, more) <= device_ms(mode, COST, less) + 1e-9


def test_waits_are_those_of_a_queue() -> None:
    rng = np.random.default_rng(1)
    gaps, service = rng.exponential(10.0, 500), rng.uniform(1, 12, 500)
    waits, expected = capacity.waits_of(gaps, service), [0.0]
    for i in range(499):
        expected.append(max(0.0, expected[-1] + service[i] - gaps[i + 1]))
    assert waits == pytest.approx(expected)


@pytest.mark.parametrize("mode", [FULL, CACHE, RELAY])
@pytest.mark.parametrize("revisit", [0.0, 0.5, 0.9])
def test_guesses_lie_within_the_bounds_and_grow_with_the_slo(mode: Mode, revisit: float) -> None:
    traffic = replace(TRAFFIC, revisit=revisit)
    rates = [predicted_rate(mode, COST, traffic, slo, 10.0, 1) for slo in (30, 50, 100, 400)]
    assert rates == sorted(rates)
    assert rates[-1] <= most_rate(mode, COST, revisit, 1) * 1.05  # the simulated share of returns is a sample
    assert predicted_rate(mode, COST, traffic, 100, 10.0, 4) == pytest.approx(4 * rates[2])


def test_lengths_end_where_the_device_or_the_slack_does() -> None:
    full = most_length(FULL, COSTS, TRAFFIC, 1.0, 1, 50.0, 8192)
    assert RequestCost.of(COSTS, replace(TRAFFIC, length=full)).full == pytest.approx(50.0, rel=1e-3)
    relay = most_length(RELAY, COSTS, TRAFFIC, 1.0, 1, 50.0, 8192)
    assert RequestCost.of(COSTS, replace(TRAFFIC, length=relay)).full == pytest.approx(200.0, rel=1e-3)
    busy = most_length(FULL, COSTS, TRAFFIC, 100.0, 1, 50.0, 8192)
    assert RequestCost.of(COSTS, replace(TRAFFIC, length=busy)).full == pytest.approx(10.0, rel=1e-3)
    assert most_length(RELAY, COSTS, TRAFFIC, 0.001, 1, 1e6, 8192) == 8192
