"""Costs travel through files, and are what was measured."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from relaygr_lab.simulate.calibrate import Samples, calibrate, fit_relative
from relaygr_lab.simulate.costs import DeviceCosts

from relaygr_stream.errors import ConfigError, InputError
from relaygr_stream.models.kv import KVLayout
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Model
from tests.unit.simulate.scenes import COSTS, scenario


def test_a_file_says_what_was_written_whatever_the_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quoted = msgspec.structs.replace(COSTS, source='a "quoted" \\ source\nof 2 µs')
    path = tmp_path / "costs.toml"
    path.write_text(quoted.as_toml(), encoding="utf-8")
    monkeypatch.setattr(io, "text_encoding", lambda encoding, _=2: encoding or "ascii")  # which pathlib asks
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


def small_settings(factory: str = "") -> Settings:
    model = Model(factory=factory, layers=1, dim=16, heads=2, dqk=8, dv=8, vocab=100)
    return msgspec.structs.replace(scenario({"relay.max_prefix_tokens": "256"}).settings, model=model)


def test_calibration_measures_the_configured_model() -> None:
    reports: list[tuple[int, int]] = []
    costs = calibrate(small_settings(), 128, 32, rounds=12, report=lambda done, of: reports.append((done, of)))
    assert reports == [(done, 12) for done in range(1, 13)]
    assert costs.kv.layout().bytes_per_token == 1 * 2 * 16 * 4
    assert costs.extend(0, 128) > 0 and costs.score([(128, 32)]) > 0
    assert costs.step_ms > 0 and costs.reload_bytes_per_s > 1e6
    assert "cpu" in costs.source


def test_calibration_takes_a_state_and_refuses_prefixes_that_cannot_grow() -> None:
    costs = calibrate(small_settings("examples.models.retention:make"), 128, 32, rounds=12)
    assert costs.kv.layout() == KVLayout.of_state(1 * 2 * 8 * 8, torch.float32)
    with pytest.raises(ConfigError, match="incremental = False, and the simulation"):
        calibrate(small_settings("examples.models.contextual:make"), 128, 32, rounds=12)


def test_the_rarest_are_among_the_quantiles() -> None:
    samples = Samples()
    for number in range(1000):
        tokens = float(number % 97)
        samples.add((1.0, tokens, tokens * tokens), (1.0 + 0.1 * tokens) * (1.0 if number % 50 else 5.0))
    _, factors = samples.fit()
    assert factors[97] / factors[50] == pytest.approx(1.0, abs=0.2)
    assert factors[-1] / factors[50] == pytest.approx(5.0, abs=1.0)  # one in fifty
