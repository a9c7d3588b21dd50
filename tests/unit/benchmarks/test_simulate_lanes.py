"""Lanes by measured load: hardly more moves, far more even, and noise moves none."""

from __future__ import annotations

import pytest
from simulate_lanes import judged, largest_of, through_changes, unchanged

CHANGES = 60


@pytest.mark.parametrize("speeds", [(1,), (1, 2)])
@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_lanes_by_load_are_even_and_move_as_seldom(skew: float, speeds: tuple[int, ...]) -> None:
    found = {
        "numbers": through_changes("numbers", skew, speeds, CHANGES, seed=1),
        "measured loads": through_changes("measured loads", skew, speeds, CHANGES, seed=1),
    }
    assert judged(found, skew, speeds) == []  # type: ignore[arg-type]  # literals
    assert largest_of(found["measured loads"]) < 1.2


@pytest.mark.parametrize("seed", range(4))
def test_noise_moves_no_lane(seed: int) -> None:
    assert unchanged(0.0, (1, 2), 200, seed) == (0, 0)
    moves, twice = unchanged(1.0, (1, 2), 200, seed)
    assert moves <= 4, "what was just below the bound"
    assert twice == 0
