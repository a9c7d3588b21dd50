"""Lengths follow from a cost file and the SLO alone."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from relaygr_lab.bench.cells import LENGTH_STEP
from relaygr_lab.bench.lengths import FULL_SHARE, ROWS, costs_named, grid_length

from relaygr_stream.cli.main import main
from relaygr_stream.errors import ConfigError


@pytest.mark.parametrize("name", ["npu", "h100", "cpu"])
@pytest.mark.parametrize("slo_ms", [50.0, 100.0])
def test_full_inference_of_the_unit_takes_its_share_of_the_slo_and_of_the_next_length_more(
    name: str, slo_ms: float
) -> None:
    costs = costs_named(name)
    unit = grid_length(costs, slo_ms)
    assert unit % LENGTH_STEP == 0
    assert costs.full_ms(unit, ROWS) <= FULL_SHARE * slo_ms < costs.full_ms(unit + LENGTH_STEP, ROWS)
    assert grid_length(costs, slo_ms, 0.25) == pytest.approx(unit / 4, abs=LENGTH_STEP / 2)
    assert grid_length(costs, slo_ms, 1e-6) == LENGTH_STEP


def test_unknown_costs_are_told_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="packaged are cpu, h100, npu"):
        costs_named("gpu")
    result = CliRunner().invoke(main, ["bench", "slo", "--costs", "gpu"])
    assert result.exit_code != 0
    assert "packaged are cpu, h100, npu" in result.output
