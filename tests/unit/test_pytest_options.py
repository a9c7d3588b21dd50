"""The options in pyproject.toml do not make pytest fail by itself, and leave out no test that is named; what
--begin-within leaves out is counted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack  # each runs a pytest of its own

ROOT = Path(__file__).parents[2]
#: Stands for a folder where another program still writes: no system gives this error on demand.
STUCK = """
import errno, os, shutil
real = os.rmdir

def rmdir(path, *, dir_fd=None):
    if os.fspath(path) == "stuck":
        raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
    real(path, dir_fd=dir_fd)

os.rmdir = rmdir
"""


def test_a_run_ends_well_though_an_earlier_ones_folder_cannot_be_removed(tmp_path: Path) -> None:
    """Runs side by side share pytest's folder, and a process that a broken-off run left may still write there."""
    shared, suite = tmp_path / "shared", tmp_path / "suite"
    for number in range(4):  # pytest keeps the last three, its own included
        (shared / "pytest-of-me" / f"pytest-{number}" / "stuck").mkdir(parents=True)
    suite.mkdir()
    (suite / "stuck.py").write_text(STUCK)
    (suite / "test_it.py").write_text("def test_it(tmp_path): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", f"--config-file={ROOT / 'pyproject.toml'}", "-p", "stuck", str(suite)],
        env={**os.environ, "LOGNAME": "me", "PYTEST_DEBUG_TEMPROOT": str(shared), "PYTHONPATH": str(suite)},
        cwd=suite,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "1 passed" in done.stdout


MARKED = """
import pytest

@pytest.mark.stack
def test_it():
    pass
"""


def run_marked(folder: Path, *arguments: str, file: str = "test_it.py") -> subprocess.CompletedProcess[str]:
    (folder / file).write_text(MARKED)
    options = [f"--config-file={ROOT / 'pyproject.toml'}", "-p", "tests.conftest"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["test_it.py"], "1 deselected"),
        (["test_it.py::test_it"], "1 passed"),
        (["-m", "kafka", "test_it.py::test_it"], "1 deselected"),
    ],
    ids=["a file", "a name", "a mark and a name"],
)
def test_a_test_that_is_named_runs_whatever_its_marks(arguments: Sequence[str], said: str, tmp_path: Path) -> None:
    done = run_marked(tmp_path, *arguments)
    assert said in done.stdout.splitlines()[-1], f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("forks", ["0", "1"])
def test_what_would_begin_too_late_is_counted(forks: str, tmp_path: Path) -> None:
    done = run_marked(tmp_path, "--parallel", forks, "--begin-within", "0", "test_it.py::test_it")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "1 tests not run" in done.stdout
    assert "1 skipped" in done.stdout.splitlines()[-1]
    assert "not run" not in run_marked(tmp_path, "--begin-within", "900", "test_it.py::test_it").stdout


DYING = """
import os, time, warnings, pytest

@pytest.mark.parametrize("number", range(9))
def test_it(number, tmp_path):
    print("number", number)
    assert number != 4

def test_that_ends_its_process():
    os._exit(3)

@pytest.fixture
def broken():
    yield
    raise OSError

@pytest.mark.filterwarnings("default")
def test_whose_fixture_fails(broken):
    warnings.warn("careful")
"""


def test_forks_report_everything_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(DYING)
    done = run_marked(tmp_path, "--parallel", "1", "-m", "", ".", file="test_it.py")
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    assert "2 failed, 10 passed, 1 warning, 1 error" in done.stdout.splitlines()[-1]
    assert "the process that ran it ended with 3" in done.stdout
    assert "number 4" in done.stdout and "number 5" not in done.stdout


NOTED = """
import os, pathlib, pytest

@pytest.fixture
def brokers():
    pass

def test_it(FIXTURE):
    with open(f"{os.getpid()}.ran", "a") as ran:
        ran.write("NUMBER")
"""


def test_one_fork_waits_for_brokers_while_the_other_computes(tmp_path: Path) -> None:
    fixtures = ("tmp_path", "tmp_path", "tmp_path", "tmp_path", "brokers", "brokers")
    for number, fixture in enumerate(fixtures):
        text = NOTED.replace("FIXTURE", fixture).replace("NUMBER", str(number))
        (tmp_path / f"test_{number}.py").write_text(text)
    files = [f"test_{number}.py" for number in range(len(fixtures))]
    done = run_marked(tmp_path, "--parallel", "2", *files)
    assert "6 passed" in done.stdout.splitlines()[-1], f"{done.stdout}\n{done.stderr}"
    ran = [path.read_text() for path in tmp_path.glob("*.ran")]
    assert {each[:2] for each in ran} == {"01", "45"}


def test_where_time_is_limited_the_parts_come_before_whole_fleets(tmp_path: Path) -> None:
    for name in ("e2e", "unit"):
        (tmp_path / name).mkdir()
    (tmp_path / "e2e" / "test_fleet.py").write_text(MARKED)
    done = run_marked(tmp_path, "-m", "stack", "--begin-within", "900", "-v", file="unit/test_part.py")
    assert done.stdout.index("test_part.py::test_it PASSED") < done.stdout.index("test_fleet.py::test_it PASSED")
