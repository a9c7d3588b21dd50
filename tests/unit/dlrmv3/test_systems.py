"""The engine without a bus: it answers as a worker does, and keeps prefix KV of earlier visits."""

from __future__ import annotations

from pathlib import Path

import pytest
from relaygr_lab.dlrmv3.model import Shape
from relaygr_lab.dlrmv3.systems import Engine
from relaygr_lab.dlrmv3.workload import Workload

from relaygr_stream.errors import Overloaded
from relaygr_stream.settings.schema import Relay, Settings
from relaygr_stream.settings.worker import Model, Worker
from relaygr_stream.wire.features import FeatureSchema
from relaygr_stream.wire.messages import HITS

WORKLOAD = Workload(users=30, candidates=8, scale=0.02)
SHAPE = Shape(layers=1, dim=32)
MIB = 1 << 20


async def test_a_user_who_returns_finds_prefix_kv_and_one_that_is_too_late_is_refused(tmp_path: Path) -> None:
    checkpoint = SHAPE.save(WORKLOAD.users, 0, tmp_path / "model")
    settings = Settings(
        relay=Relay(slo_ms=60_000.0, max_prefix_tokens=512, max_suffix_tokens=16),
        worker=Worker(hbm_bytes=8 * MIB, dram_bytes=8 * MIB, audit_share=0.0),
        model=Model(checkpoint=str(checkpoint)),
    )
    schema = FeatureSchema(SHAPE.config(WORKLOAD.users).features)
    measured = WORKLOAD.requests[1]
    first, second = [one for one in measured if one.user == measured[0].user][:2]
    async with Engine(settings) as engine:
        assert await engine.rank(WORKLOAD.item(first, "r", schema), 60.0) == "full"
        assert await engine.rank(WORKLOAD.item(second, "r", schema), 60.0) == "hbm"
        await engine.announce(WORKLOAD.item(first, "warm-up", schema))
        assert await engine.rank(WORKLOAD.item(second, "warm-up", schema), 60.0) in HITS
        assert engine.bytes_per_token >= 4 * 2 * SHAPE.dim  # float32, K and V of a layer
        assert engine.costs.full_ms(100, 8) > 0
        with pytest.raises(Overloaded):
            await engine.rank(WORKLOAD.item(second, "late", schema), 1e-6)
