"""Models of other families through the whole relay with real processes: relayed scores are those of full inference."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from relaygr_stream.client import RelayClient
from relaygr_stream.lab.workload.driver import drive
from relaygr_stream.models.api import relative_deviation
from relaygr_stream.settings.schema import Kafka
from tests.e2e.fleet import Fleet, Results, hurried, traffic

ROOT = Path(__file__).parents[2]


@pytest.mark.stack
@pytest.mark.timeout(180)
@pytest.mark.parametrize("family", ["retention", "contextual"])
async def test_a_family_is_relayed(family: str, embedded_settings: Kafka, tmp_path: Path) -> None:
    async with Fleet(embedded_settings, tmp_path) as fleet:
        model = replace(fleet.settings.model, path=str(ROOT), factory=f"examples.models.{family}:make")
        fleet.use(replace(fleet.settings, model=model))
        fleet.start("trigger", "trigger")
        fleet.start("worker", "w1")
        await fleet.ready("trigger", "w1")
        await fleet.lanes_settled("w1")
        relayed, full = Results(), Results()
        items = traffic(seconds=6, rate=15)
        async with RelayClient(settings=fleet.settings) as client:
            await drive(client, items, timeout=20.0, on_result=relayed)
            await drive(client, hurried(items, 4), timeout=20.0, mode="full", announce=False, on_result=full)
        assert not relayed.errors()
        assert not full.errors()
        assert fleet.statuses["w1"].model_version.startswith(f"{family}-")
        for request, result in relayed.by_id.items():
            truth = full.by_id[request].scores
            assert result.scores is not None
            assert truth is not None
            assert relative_deviation(result.scores, truth) <= 1e-5
        hits = [key for key, result in relayed.by_id.items() if key in fleet.admitted and result.outcome != "full"]
        assert hits, "no admitted request was served from a prefix hit"
