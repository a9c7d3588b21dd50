"""The command line pays for the command that was asked for, and for no other."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoints

import click
import pytest
from click.testing import CliRunner

from relaygr_stream.cli.main import main
from tests.waiting import WITHIN_S

HEAVY = ("torch", "numpy", "aiokafka", "structlog", "prometheus_client")


def test_finding_the_command_imports_nothing_heavy() -> None:
    program = f"import sys, relaygr_stream.cli.main; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=WITHIN_S)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", main.list_commands(click.Context(main)))
def test_each_command_is_found_and_listed(name: str) -> None:
    assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0
    assert f"\n  {name} " in CliRunner().invoke(main, ["--help"]).output


def test_another_one_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["wroker"])
    assert result.exit_code == 2
    assert "wroker" in result.output


def test_a_command_is_a_command_or_a_group_and_not_both() -> None:
    def check(command: click.Command) -> None:
        if isinstance(command, click.Group):
            assert not command.invoke_without_command, command.name
            for name in command.list_commands(click.Context(command)):
                inner = command.get_command(click.Context(command), name)
                assert inner is not None
                check(inner)

    check(main)


@pytest.mark.parametrize("charset", ["ascii", "latin-1"])
def test_what_the_terminal_cannot_show_is_escaped(charset: str) -> None:
    result = CliRunner(charset=charset).invoke(main, ["config", "show"])
    assert result.exit_code == 0, result.exception
    assert "\\u" in result.output


@pytest.mark.parametrize("command", [["bench", "slo"], ["demo"]])
def test_a_private_broker_and_a_running_cluster_are_not_asked_for_together(command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "--broker", "embedded", "--bootstrap", "nowhere:1"])
    assert result.exit_code == 2
    assert "give one of them" in result.output


@pytest.mark.parametrize(
    ("command", "ignored"),
    [
        ("demo --rollout --seconds 5", "--seconds"),
        ("demo --scenarios --checkpoint models/mine --rate 2", "--checkpoint"),
        ("demo --rollout --scenarios", "--scenarios"),
        ("demo --rollout --events log.csv", "--events"),
        ("lanes --group next", "--group"),
        ("lanes grow 128 --json", "--json"),
        ("status --forget w1 --watch", "--watch"),
        ("status --forget w1 --json", "--json"),
        ("explain --seconds 1 --candidates 9", "--candidates"),
        ("rollout --back --hold 1m", "--hold"),
        ("up --rolling --workers 3", "--workers"),
        ("up --fleet fleet.toml --no-trigger", "--no-trigger"),
        ("dead-letters replay --all 0:17", "--all"),
        ("simulate --hit-target 80%", "--hit-target"),
        ("simulate --at 3", "--at"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused_and_named(command: str, ignored: str) -> None:
    result = CliRunner().invoke(main, command.split())
    assert result.exit_code == 2
    assert ignored in result.output.splitlines()[-1]


@pytest.mark.parametrize("command", [["bench", "slo"], ["bench", "paper"], ["demo"]])
def test_a_seed_that_no_generator_takes_is_refused_at_once(command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "--seed", "-1"])
    assert result.exit_code == 2
    assert "'--seed'" in result.output


def test_without_the_laboratory_its_commands_say_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_installed(**_: str) -> EntryPoints:
        return EntryPoints()

    monkeypatch.setattr("relaygr_stream.cli.main.entry_points", none_installed)
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 2
    assert "pip install ./relaygr_lab" in result.output
    assert "demo" not in CliRunner().invoke(main, ["--help"]).output.split("Commands:")[1]
    assert "No such command" in CliRunner().invoke(main, ["demon"]).output


def test_without_a_broker_each_command_that_looks_prints_one_line_and_no_library_adds_its_own() -> None:
    """In a program of its own: pytest has a handler for all lines of libraries."""
    commands = (
        *("status", "status --watch", "lanes", "lanes grow 128", "explain --seconds 1", "plan show", "rollout --back"),
        *("topics apply", "topics verify", "topics show", "dead-letters list", "dead-letters show 0:1", "dashboard"),
        "history erase ann",
    )
    program = (
        "import sys\nfrom click.testing import CliRunner\nfrom relaygr_stream.cli.main import main\n"
        f"for command in {commands}:\n"
        "    done = CliRunner().invoke(main, [*command.split(), '--bootstrap', '127.0.0.1:1'])\n"
        "    lines = done.stderr.splitlines()\n"
        "    if done.exit_code != 1 or len(lines) != 1 or 'no Kafka broker answers at 127.0.0.1:1' not in lines[0]:\n"
        "        print(command, done.exit_code, lines)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=WITHIN_S)
    assert done.stdout + done.stderr == ""
