"""Noise has the quantiles it was given, lasts as long as it says, and is shared by what is slow together."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from relaygr_lab.simulate.bus import BusLatency, Paths, Way
from relaygr_lab.simulate.device import SimulatedModel
from relaygr_lab.simulate.noise import Lasting, Noise
from relaygr_lab.simulate.timeline import Clock

from relaygr_stream.errors import ConfigError
from tests.unit.simulate.scenes import COSTS, fleet_of, scenario

FAR_S = 1.0  # apart, where noise lasts 10 ms


def lasting(seconds: float = 0.01, seed: int = 1) -> Lasting:
    return Lasting(seconds, np.random.default_rng(seed))


@pytest.mark.parametrize("gap_s", [0.002, 0.01, 0.03])
def test_values_so_far_apart_correlate_as_said(gap_s: float) -> None:
    process = lasting()
    values = np.array([process.at(gap_s * step) for step in range(1, 40_000)])
    assert values.std() == pytest.approx(1.0, abs=0.05)
    assert np.corrcoef(values[1:], values[:-1])[0, 1] == pytest.approx(math.exp(-gap_s / 0.01), abs=0.03)


def test_what_does_not_last_is_new_each_time() -> None:
    fleeting = lasting(0.0)
    values = np.array([fleeting.at(1.0) for _ in range(20_000)])
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.03


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=30))
def test_time_never_goes_back(times_ms: list[int]) -> None:
    process = lasting()
    latest = 0
    before = process.at(0.0)
    for ms in times_ms:
        value = process.at(ms / 1e3)
        assert (value == before) == (ms <= latest)
        latest, before = max(latest, ms), value


def test_noise_has_the_quantiles_given() -> None:
    noise = Noise((0.5, 1.0, 3.0), lasting())
    drawn = [noise.draw(FAR_S * step) for step in range(1, 20_000)]
    assert np.quantile(drawn, [0.25, 0.5, 0.75]) == pytest.approx([0.75, 1.0, 2.0], abs=0.05)
    assert Noise((1.5,), lasting()).draw(1.0) == 1.5


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=9).map(sorted), st.integers(0, 50))
def test_noise_stays_within_its_quantiles(factors: list[float], seed: int) -> None:
    noise = Noise(factors, lasting(seed=seed))
    for step in range(50):
        assert factors[0] * (1 - 1e-12) <= noise.draw(FAR_S * step) <= factors[-1] * (1 + 1e-12)


def test_a_way_has_its_quantiles_and_keeps_order() -> None:
    way = Way(BusLatency(1.0, 5.0), lasting())
    taken = [(way.arrival(sent := FAR_S * step) - sent) * 1e3 for step in range(1, 50_000)]
    assert np.quantile(taken, [0.5, 0.99]) == pytest.approx([1.0, 5.0], rel=0.05)
    arrivals = [way.arrival(1e6 + sent / 1e4) for sent in range(1000)]
    assert arrivals == sorted(arrivals)
    assert Way(BusLatency(0.0, 0.0), lasting()).arrival(1.0) == 1.0


def test_a_latency_that_lasts_negative_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="lasts -1 ms"):
        BusLatency(1.0, 5.0, -1.0)


def test_to_a_worker_and_back_are_slow_together_events_are_not() -> None:
    paths = Paths(BusLatency(1.0, 5.0), BusLatency(2.0, 4.0), np.random.default_rng(3))
    ways = (paths.to_worker, paths.to_client, paths.to_trigger)
    there, back, events = np.log([[way.arrival(step) - step for way in ways] for step in range(1, 5000)]).T
    assert np.corrcoef(there, back)[0, 1] == pytest.approx(1.0)
    assert abs(np.corrcoef(there, events)[0, 1]) < 0.1
    assert np.exp(np.median(back)) * 1e3 == pytest.approx(2.0, rel=0.05)


def test_lanes_of_one_worker_share_their_paths_those_of_two_do_not() -> None:
    fleet = fleet_of(scenario())
    by_owner: dict[str, set[int]] = {}
    for lane in fleet.lanes:
        assert lane.owner is not None
        by_owner.setdefault(lane.owner.name, set()).add(id(lane.paths))
    assert [len(ways) for ways in by_owner.values()] == [1, 1, 1]
    assert len(set().union(*by_owner.values())) == 3


def test_answers_take_their_own_way_back() -> None:
    slow = scenario(answers=BusLatency(30.0, 30.0))
    fleet, late = fleet_of(scenario()), fleet_of(slow)
    fleet.run()
    late.run()
    assert min(request.latency_s for request in late.requests) > 0.03
    assert min(request.latency_s for request in fleet.requests) < 0.03


QUIET = msgspec.structs.replace(COSTS, extend_factors=(1.0,), score_factors=(1.0,))


def test_a_device_that_stood_idle_takes_longer_once() -> None:
    clock = Clock()
    model = SimulatedModel(msgspec.structs.replace(QUIET, cold_ms=2.0), clock, np.random.default_rng(1))
    took = []
    for pause_s in (1.0, 0.0, 0.0, 1.0):
        clock.now += pause_s
        before = model.busy_s
        model.score([])
        took.append((model.busy_s - before) * 1e3)
    assert took == pytest.approx([2.5, 0.5, 0.5, 2.5])


def test_each_answer_takes_the_worker_its_time() -> None:
    scene = scenario(mode="full", bus=BusLatency(0.0, 0.0))
    handing_out = replace(scene, costs=msgspec.structs.replace(QUIET, answer_ms=10.0))
    quick, slow = (fleet_of(replace(one, seconds=1.0)) for one in (scene, handing_out))
    quick.run()
    slow.run()
    assert min(r.latency_s for r in slow.requests) > 0.01 + QUIET.score([(0, 100)]) / 1e3
    assert min(r.latency_s for r in quick.requests) < min(r.latency_s for r in slow.requests)


def test_operations_after_each_other_are_slow_together() -> None:
    clock = Clock()
    noisy = msgspec.structs.replace(QUIET, score_factors=(0.5, 1.0, 4.0), lasting_ms=10.0)
    model = SimulatedModel(noisy, clock, np.random.default_rng(1))
    took = []
    for _ in range(5000):
        before = model.busy_s
        model.score([])
        took.append(model.busy_s - before)
    assert np.corrcoef(took[1:], took[:-1])[0, 1] > 0.8  # half a millisecond apart
    assert abs(np.corrcoef(took[200:], took[:-200])[0, 1]) < 0.15  # a tenth of a second
