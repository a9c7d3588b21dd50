"""Costs travel through files, and noise has the quantiles it was given."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from relaygr_stream.errors import InputError
from relaygr_stream.simulate.bus import Bus, BusLatency, Log
from relaygr_stream.simulate.calibrate import calibrate, fit_relative
from relaygr_stream.simulate.costs import DeviceCosts, Noise
from tests.unit.simulate.scenes import COSTS, scenario


def test_a_file_says_what_was_written(tmp_path: Path) -> None:
    quoted = msgspec.structs.replace(COSTS, source='a "quoted" \\ source\nof two lines')
    path = tmp_path / "costs.toml"
    path.write_text(quoted.as_toml())
    assert DeviceCosts.read(path) == quoted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "not TOML"),
        ("source = 'x'", "kv"),
        (COSTS.as_toml().replace("step_ms = 0.1", "step_ms = -1"), "step_ms"),
        (COSTS.as_toml().replace("step_ms", "stepms"), "stepms"),
    ],
)
def test_a_bad_file_is_told_by_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "costs.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        DeviceCosts.read(path)
    with pytest.raises(InputError, match=r"missing\.toml"):
        DeviceCosts.read(tmp_path / "missing.toml")


def test_noise_has_the_quantiles_given() -> None:
    noise = Noise((0.5, 1.0, 3.0), np.random.default_rng(1))
    drawn = [noise.draw() for _ in range(20_000)]
    assert np.quantile(drawn, [0.25, 0.5, 0.75]) == pytest.approx([0.75, 1.0, 2.0], abs=0.05)
    assert Noise((1.5,), np.random.default_rng(1)).draw() == 1.5


def test_the_bus_keeps_order_and_its_quantiles() -> None:
    bus = Bus(BusLatency(1.0, 5.0), np.random.default_rng(1))
    drawn = [bus.draw() * 1e3 for _ in range(50_000)]
    assert np.quantile(drawn, [0.5, 0.99]) == pytest.approx([1.0, 5.0], rel=0.05)
    log = Log(bus)
    arrivals = [log.arrival(sent / 1e4) for sent in range(1000)]
    assert arrivals == sorted(arrivals)
    assert Bus(BusLatency(0.0, 0.0), np.random.default_rng(1)).draw() == 0.0


def test_the_fit_finds_coefficients_and_drops_negative_ones() -> None:
    rng = np.random.default_rng(5)
    n = rng.uniform(10, 1000, 400)
    features = np.stack([np.ones_like(n), n, n * n], axis=1)
    truth = np.array([0.5, 0.01, 1e-5])
    noisy = features @ truth * rng.normal(1.0, 0.02, 400)
    assert fit_relative(features, noisy) == pytest.approx(truth, rel=0.1)
    falling = fit_relative(features, 5.0 + 1e-3 * n)
    assert (falling >= 0).all()
    assert falling[:2] == pytest.approx([5.0, 1e-3], rel=0.01)


def test_calibration_measures_the_configured_model() -> None:
    flags = {"model.layers": "1", "model.dim": "16", "model.heads": "2", "model.dqk": "8", "model.dv": "8"}
    settings = scenario(
        {**flags, "model.vocab": "100", "relay.max_prefix_tokens": "256"}, traffic={"max_prefix": 512}
    ).settings
    costs = calibrate(settings, 128, 32, rounds=12)
    assert costs.kv.layout().bytes_per_token == 1 * 2 * 16 * 4
    assert costs.extend(0, 128) > 0 and costs.score([(128, 32)]) > 0
    assert costs.step_ms > 0 and costs.reload_bytes_per_s > 1e6
    assert "cpu" in costs.source
