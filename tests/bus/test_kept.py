"""Processes that do not outlive us leave nothing of themselves in ours."""

from __future__ import annotations

from pathlib import Path

import psutil

from relaygr_stream.ops.brokers.keeper import KeptProcess
from tests.waiting import WITHIN_S


def test_a_process_that_ended_by_itself_leaves_no_pipe_open(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    process = KeptProcess(tmp_path, ["false"], {}, tmp_path / "log")
    assert process.wait(WITHIN_S) == 1
    assert psutil.Process().num_fds() <= before
    process.kill()  # no effect
    assert process.exit_code == 1


def test_a_killed_process_leaves_no_pipe_open(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    process = KeptProcess(tmp_path, ["sleep", "60"], {}, tmp_path / "log")
    process.kill()
    assert process.exit_code is not None
    assert psutil.Process().num_fds() <= before
