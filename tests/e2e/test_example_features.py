"""examples/features.py: its client against its model, through a whole relay on the embedded broker."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from relaygr_stream.cli.main import main
from relaygr_stream.settings.schema import Kafka
from tests.e2e.fleet import TEST_SETTINGS, serving_fleet

ROOT = Path(__file__).parents[2]
FACTORY = "examples.features:make"


@pytest.mark.stack
async def test_it_prints_a_hit_with_the_scores_of_full_inference(embedded_settings: Kafka, tmp_path: Path) -> None:
    model = replace(TEST_SETTINGS.model, path=str(ROOT), factory=FACTORY)
    environment = os.environ | {
        "RELAYGR_KAFKA_BOOTSTRAP": embedded_settings.bootstrap,
        "RELAYGR_KAFKA_PREFIX": embedded_settings.prefix,
        "RELAYGR_KAFKA_PARTITIONS": str(embedded_settings.partitions),
    }
    async with serving_fleet(embedded_settings, tmp_path, "w1", model=model) as fleet:
        assert fleet.statuses["w1"].model_version.startswith("features-example-")
        said: list[str] = []
        while not said or said[0] not in ("prefix KV found: hbm", "prefix KV found: joined"):  # a busy machine
            asked = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "examples.features", cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE
            )
            out, _ = await asked.communicate()
            assert asked.returncode == 0
            said = out.decode().splitlines()
            assert said[1].startswith("best three: ")
            assert said[2] == "as full inference: True"


def test_its_model_passes_the_check() -> None:
    done = CliRunner().invoke(main, ["model", "check", FACTORY, "--set", f"model.path={ROOT}"])
    assert done.exit_code == 0, done.output
    assert "features are read                          passed" in done.output
