"""The options in pyproject.toml do not make pytest fail by itself."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from pathlib import Path

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
        (shared / f"pytest-of-{getpass.getuser()}" / f"pytest-{number}" / "stuck").mkdir(parents=True)
    suite.mkdir()
    (suite / "stuck.py").write_text(STUCK)
    (suite / "test_it.py").write_text("def test_it(tmp_path): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", f"--config-file={ROOT / 'pyproject.toml'}", "-p", "stuck", str(suite)],
        env={**os.environ, "PYTEST_DEBUG_TEMPROOT": str(shared), "PYTHONPATH": str(suite)},
        cwd=suite,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "1 passed" in done.stdout
