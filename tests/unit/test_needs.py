"""The line at the end of a run that says what is missing, and runs that fail for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import PACKAGES, summary

pytestmark = pytest.mark.stack  # each runs a pytest of its own

ROOT = Path(__file__).parents[2]
#: One that is not long, and needs a program.
NEEDS_PROMTOOL = "tests/e2e/test_alerts.py::test_prometheus_accepts_the_rules"


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """pytest where the PATH has no program at all."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", NEEDS_PROMTOOL, *options],
        cwd=ROOT,
        env=os.environ | {"PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_skipped_test_names_the_package_and_fails_where_none_may_be_missing(tmp_path: Path, workers: str) -> None:
    line = "1 tests skipped for what is missing here; to run them: apt-get install prometheus"
    for options, code in (([], 0), (["--no-missing"], 1)):
        done = run(tmp_path, "-n", workers, *options)
        assert line in done.stdout.splitlines(), done.stdout + done.stderr
        assert done.returncode == code


def test_the_line_has_each_package_once_and_other_steps_behind() -> None:
    reasons = ["Skipped: missing here: apt-get install b a", "Skipped: missing here: apt-get install a"]
    reasons += ["Skipped: needs a CUDA device", "Skipped: missing here: set X"]
    assert summary(reasons).endswith("to run them: apt-get install a b; set X")
    assert summary(["Skipped: needs a CUDA device"]) == ""


def test_ci_installs_what_tests_need() -> None:
    (installed,) = re.findall(r"packages=\((.*)\)", (ROOT / ".ci" / "run").read_text())
    of_the_machine = {"default-jre-headless", "nodejs", "npm"}  # runtimes that a machine has in versions of its own
    assert set(installed.split()) == set(PACKAGES.values()) - of_the_machine
