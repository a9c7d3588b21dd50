from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner
from relaygr_lab.bench.modes import CACHE, FULL, MODES, RELAY
from relaygr_lab.bench.options import PRESETS, SloOptions
from relaygr_lab.cli.bench import build_options

from relaygr_stream.cli.main import main
from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.load import load_settings


def built(preset: str = "quick", **flags: Any) -> SloOptions:
    options = build_options(preset, private=True, flags={"broker": "embedded", "length": 512, **flags})
    assert isinstance(options, SloOptions)
    return options


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_options_and_settings_that_fit(preset: str) -> None:
    options, settings = built(preset), load_settings([f"slo-{preset}"]).settings
    assert options.candidates <= settings.relay.max_candidates
    assert options.suffix <= settings.relay.max_suffix_tokens


def test_quick_searches_what_tells_modes_apart_and_paper_everything() -> None:
    assert (built().modes, built("paper").modes) == ((FULL, CACHE, RELAY), MODES)
    assert (CACHE, 0.0) not in built().rate_cells()
    assert [ratio for mode, ratio in built().rate_cells() if mode is RELAY] == [0.0, 0.5, 0.9]
    assert built().length_cells() == [(RELAY, 0.5), (RELAY, 0.9)]
    assert built(rate=5.0, length_revisits="0.9").length_cells() == [(FULL, 0.9), (RELAY, 0.9)]
    paper = built("paper", rate=5.0).length_cells()
    assert paper == [(FULL, 0.5), *((mode, ratio) for mode in MODES[1:] for ratio in (0.5, 0.9))]
    assert len(built("paper").rate_cells()) == 1 + 3 * (len(MODES) - 1)


def test_flags_win_over_the_preset() -> None:
    options = built(modes="full,cache", revisits="0.2,0.8", stage_delay=80.0, budget=60.0, length=96.0)
    assert (options.modes, options.revisits, options.budget_s) == ((FULL, CACHE), (0.2, 0.8), 60.0)
    assert (options.delay.median_ms, options.delay.sigma) == (80.0, 0.1)
    assert options.length == 96


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"revisits": "1.0"}, "revisit ratios"),
        ({"samples": 0}, "samples = 0"),
        ({"length": 0}, "length = 0"),
        ({"rate": -1.0}, "rate = -1"),
    ],
)
def test_options_without_sense_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(**flags)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "relay"], "error: modes: `full` is the baseline"),
        (["--length", "100000"], "error: length = 100000: must be at most"),
        (["--device", "tpu"], "error: flag for worker.device"),
        (["--revisits", "a,b"], "write numbers, separated by commas"),
        (["--stage-delay", "-5"], "must not be negative"),
        (["--stage-sigma", "1000"], "sigma at most 10"),
        (["--sigma", "1000"], "sigma = 1000"),
        (["--length", "0"], "length = 0"),
        (["--length", "nan"], "length = nan"),
        (["--length", "inf"], "length = inf"),
        (["--growth", "nan"], "growth = nan"),
        (["--budget", "nan"], "budget_s = nan"),
    ],
)
def test_the_command_line_says_what_is_wrong(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["bench", "slo", *arguments])
    assert result.exit_code in (1, 2)
    assert message in result.output
    assert "Traceback" not in result.output
