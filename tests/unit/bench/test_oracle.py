"""The oracle queue against closed forms, with tolerances from the number of requests, and against itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from relaygr_lab.bench import oracle
from relaygr_lab.bench.modes import CACHE, FULL_ANY, FULL_LANE, RELAY
from relaygr_lab.bench.oracle import Floats, Shape, by_lane, first_come, largest_rate, relayed
from relaygr_lab.simulate.costs import KV, DeviceCosts

BATCHES = 20
FEW = 2500  # requests of an oracle: enough for what differs by a tenth
COSTS = DeviceCosts(
    source="made up",
    kv=KV(2, 4, 64, 64, "float32"),
    prefill_ms=(0.5, 0.01, 2e-6),
    score_ms=(1.0, 0.01, 1e-6),
    reload_bytes_per_s=1e10,
    spill_bytes_per_s=1e10,
)
SHAPE = Shape(length=1024, revisit=0.5, rows=40, growth=3.0, delay_ms=150.0, slo_ms=50.0, workers=4)


def mean_and_error(values: Floats) -> tuple[float, float]:
    """The mean behind the start, and four standard errors of it, by means of batches: waits in a queue correlate."""
    batches = values[len(values) // 10 :]
    means = batches[: len(batches) // BATCHES * BATCHES].reshape(BATCHES, -1).mean(axis=1)
    return float(means.mean()), 4 * float(means.std(ddof=1)) / math.sqrt(BATCHES)


def erlang_wait(rate: float, service: float, servers: int) -> float:
    """The mean wait of M/M/c."""
    load = rate * service
    below = sum(load**k / math.factorial(k) for k in range(servers))
    last = load**servers / math.factorial(servers) / (1 - load / servers)
    return last / (below + last) * service / (servers - load)


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.85])
def test_one_server_waits_as_pollaczek_and_khinchine_say(busy: float) -> None:
    rng = np.random.default_rng(3)
    arrivals = np.cumsum(rng.exponential(1 / busy, 100_000))
    constant, varied = np.ones(100_000), rng.choice([0.25, 2.5], 100_000, p=[2 / 3, 1 / 3])
    for service in (constant, varied):
        wait, error = mean_and_error(first_come(arrivals, service, 1) - service)
        expected = busy * float((service**2).mean()) / 2 / (1 - busy)  # M/D/1: ρ/(2(1-ρ)) services
        assert wait == pytest.approx(expected, abs=error)
        assert error < expected / 3


@pytest.mark.parametrize("servers", [2, 4, 8])
def test_several_servers_wait_as_erlang_says_and_constant_services_about_half(servers: int) -> None:
    rng = np.random.default_rng(4)
    rate = 0.85 * servers
    arrivals = np.cumsum(rng.exponential(1 / rate, 200_000))
    exponential = rng.exponential(1.0, 200_000)
    wait, error = mean_and_error(first_come(arrivals, exponential, servers) - exponential)
    assert wait == pytest.approx(erlang_wait(rate, 1.0, servers), abs=error)
    # Lee and Longton: M/G/c waits (1 + c²)/2 of M/M/c, an approximation within a few percent for constant services.
    wait, error = mean_and_error(first_come(arrivals, np.ones(200_000), servers) - 1.0)
    assert wait == pytest.approx(erlang_wait(rate, 1.0, servers) / 2, abs=error + 0.06 * wait)


requests = st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.01, 5.0)), min_size=1, max_size=60)


@given(requests, st.integers(1, 4))
def test_without_head_start_and_prefix_the_relay_is_first_come(given: list[tuple[float, float]], servers: int) -> None:
    gaps, service = (np.array(column) for column in zip(*given, strict=True))
    arrivals = np.cumsum(gaps)
    nothing = np.zeros(len(arrivals))
    assert relayed(arrivals, arrivals, nothing, service, servers) == pytest.approx(
        first_come(arrivals, service, servers), abs=1e-6
    )


@given(requests, st.floats(0.0, 20.0), st.integers(1, 4))
def test_a_relayed_request_takes_its_hit_at_least_and_no_server_works_ahead(
    given: list[tuple[float, float]], delay: float, servers: int
) -> None:
    gaps, prefix = (np.array(column) for column in zip(*given, strict=True))
    announced = np.cumsum(gaps)
    hit = np.full(len(announced), 0.5)
    ranked = announced + delay
    latency = relayed(announced, ranked, prefix, hit, servers)
    assert (latency >= 0.5 - 1e-9).all()
    assert (latency >= prefix + hit - delay - 1e-9).all()
    work = float((prefix + hit).sum())
    assert float((ranked + latency).max()) - announced[0] >= work / servers - 1e-6


def test_lanes_wait_alone() -> None:
    arrivals, service = np.array([0.0, 0.0, 1.0]), np.array([3.0, 3.0, 1.0])
    assert by_lane(arrivals, service, np.array([0, 1, 0])).tolist() == [3.0, 3.0, 3.0]


def test_the_modes_stand_in_the_order_of_what_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "REQUESTS", FEW)
    lane, anyone, cache, relay = (largest_rate(mode, COSTS, SHAPE) for mode in (FULL_LANE, FULL_ANY, CACHE, RELAY))
    assert 0 < lane < anyone < cache < relay
    lengths = np.array([float(SHAPE.length)])
    (busy_ms,) = 0.5 * SHAPE.first_ms(COSTS, lengths) + SHAPE.hit_ms(COSTS, lengths)
    capacity = 1e3 * 4 / busy_ms
    assert relay < capacity * 1.05


def test_nothing_is_served_where_full_inference_alone_takes_longer_than_the_slo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(oracle, "REQUESTS", FEW)
    longer = Shape(length=8192, revisit=0.0, rows=40, growth=3.0, delay_ms=150.0, slo_ms=50.0, workers=4)
    assert largest_rate(FULL_ANY, COSTS, longer) == 0.0
    assert largest_rate(RELAY, COSTS, longer) > 0.0
