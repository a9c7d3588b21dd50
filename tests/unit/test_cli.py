"""The command line pays for the command that was asked for, and for no other."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from relaygr_stream.cli.main import main

HEAVY = ("torch", "numpy", "aiokafka", "structlog", "prometheus_client")


def test_finding_the_command_imports_nothing_heavy() -> None:
    program = f"import sys, relaygr_stream.cli.main; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", main.list_commands(click.Context(main)))
def test_each_command_is_found_and_listed(name: str) -> None:
    assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0
    assert f"\n  {name} " in CliRunner().invoke(main, ["--help"]).output


def test_another_one_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["wroker"])
    assert result.exit_code == 2
    assert "wroker" in result.output
