"""The picture of a rollout: its points, and a file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from relaygr_lab.demo.rollout import POINT_S, draw, points
from relaygr_lab.rollouts import Sample, changed


@pytest.fixture(autouse=True)
def _cache_here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path_factory.getbasetemp() / "matplotlib"))


SAMPLES = [Sample(100 + number / 10, number % 2 == 0, float(number)) for number in range(400)]


def test_a_point_is_the_mean_of_its_seconds() -> None:
    lost = [Sample(99.0, hit=False, latency_ms=1.0), Sample(139.9, hit=False, latency_ms=math.nan)]
    at, hits, p50, p99 = points([*SAMPLES, *lost], 100.0)
    assert at == [(number + 0.5) * POINT_S for number in range(10)]
    assert hits[:-1] == [0.5] * 9
    assert hits[-1] == pytest.approx(20 / 41)
    assert (p50[0], p99[0]) == (19.0, 39.0)


def test_a_rollout_becomes_a_png(tmp_path: Path) -> None:
    change = changed("rollout", SAMPLES, 120.0, 100.0)
    figure = draw(SAMPLES, [(120.0, "rollout begins"), (130.0, "100%")], 100.0, change)
    figure.savefig(tmp_path / "r.png", format="png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "1: rollout begins 2: 100%" in " ".join(figure.get_suptitle().split())
