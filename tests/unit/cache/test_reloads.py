"""What a copy in DRAM is worth: how fast copies come back, and how many are forgotten first."""

from __future__ import annotations

import pytest

from relaygr_stream.cache.eviction import PRIOR_BYTES_PER_S, Reloads


def test_speed_is_that_of_the_last_reloads_by_their_bytes() -> None:
    reloads = Reloads()
    assert reloads.predict_ms(int(PRIOR_BYTES_PER_S)) == pytest.approx(1000)
    reloads.reloaded(3000, 1e-6)
    reloads.reloaded(1000, 1e-6)
    assert reloads.predict_ms(1000) == pytest.approx(0.5e-3, rel=0.03)
    for _ in range(200):
        reloads.reloaded(1000, 4e-6)
    assert reloads.predict_ms(1000) == pytest.approx(4e-3, rel=1e-3)


def test_risk_is_the_share_forgotten_and_changes_with_the_times() -> None:
    reloads = Reloads()
    assert reloads.risk == 0
    for _ in range(3000):
        reloads.reloaded(1, 1e-9)
        reloads.evicted()
        reloads.evicted()
        reloads.evicted()
    assert reloads.risk == pytest.approx(0.75, abs=0.01)
    for _ in range(4000):
        reloads.reloaded(1, 1e-9)
    assert reloads.risk < 0.01
