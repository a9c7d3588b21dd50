"""What a rollout is asked for: groups, steps, and options that would be ignored."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from relaygr_stream.cli.main import main
from relaygr_stream.errors import ConfigError
from relaygr_stream.ops.rollout.routing import next_group, source_of
from relaygr_stream.ops.rollout.run import Plan
from relaygr_stream.wire.routes import Routes


def test_a_third_group_waits_for_the_rollout_under_way() -> None:
    mixed = Routes.of_one("", 8).moved("next", 8, 500)
    with pytest.raises(ConfigError, match="finish that rollout"):
        source_of(mixed, "third")
    assert source_of(mixed, "next") == ""
    with pytest.raises(ConfigError, match="all users are in group default already"):
        source_of(Routes.of_one("", 8), "")
    assert next_group(mixed) == "next"
    assert next_group(Routes.of_one("next", 8)) == ""
    assert next_group(None) == "next"


@pytest.mark.parametrize("steps", [[], [0.0, 1.0], [0.5, 0.25, 1.0], [0.5], [0.5, 0.5, 1.0], [0.5, 2.0]])
def test_steps_rise_to_all(steps: list[float]) -> None:
    with pytest.raises(ConfigError, match="must rise"):
        Plan.from_shares(steps, 1.0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("--checkpoint", ""), "'' does not exist"),
        (("--checkpoint", "models/none"), "'models/none' does not exist"),
        (("--checkpoint", "."), "it has no config.json"),
        (("--workers", "2"), "--workers: for workers that --checkpoint starts here"),
        (("--back", "--steps", "100", "--cold"), "leave out --steps, --cold"),
        (("--canary", "nan%"), "'nan%' is not a share"),
        (("--steps", "50,inf"), "'inf%' is not a share"),
    ],
)
def test_what_would_be_ignored_is_refused(line: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(main, ["rollout", "--bootstrap", "localhost:1", *line])
    assert result.exit_code == 2
    assert said in result.output
