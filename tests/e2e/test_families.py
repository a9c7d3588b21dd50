"""Models of other families through the whole relay with real processes: relayed scores are those of full inference."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from relaygr_stream.client import RelayClient
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.workload.driver import drive
from tests import needs
from tests.e2e.fleet import TEST_SETTINGS, Results, check_relayed, hurried, serving_fleet, traffic

ROOT = Path(__file__).parents[2]


@pytest.mark.stack
@pytest.mark.parametrize(
    ("family", "version"), [("retention", "retention-"), ("contextual", "contextual-"), ("gpt2", "GPT2Model-")]
)
async def test_a_family_is_relayed(family: str, version: str, embedded_settings: Kafka, tmp_path: Path) -> None:
    if family == "gpt2":
        needs.module("transformers")
    model = replace(TEST_SETTINGS.model, path=str(ROOT), factory=f"examples.models.{family}:make")
    async with serving_fleet(embedded_settings, tmp_path, "w1", model=model) as fleet:
        relayed, full = Results(), Results()
        items = traffic(seconds=4, rate=15)
        async with RelayClient(settings=fleet.settings) as client:
            await drive(client, items, timeout=20.0, on_result=relayed)
            await drive(client, hurried(items, 4), timeout=60.0, mode="full", announce=False, on_result=full)
        assert fleet.statuses["w1"].model_version.startswith(version)
        check_relayed(fleet, relayed, full)
