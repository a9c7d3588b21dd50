"""The processes of simulations end with the one that began them."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.waiting import until_blocking

pytestmark = pytest.mark.stack

#: Begins two processes, has them work, and prints their ids.
PARENT = """
import os, time
from relaygr_lab.pools import pool_of
if __name__ == "__main__":
    with pool_of(2) as pool:
        working = [pool.submit(time.sleep, 600) for _ in range(2)]
        while not all(each.running() for each in working):
            time.sleep(0.05)
        print(*pool._processes, flush=True)
        time.sleep(600)
"""


def test_processes_end_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.kill()
    until_blocking(lambda: not any(each.is_running() for each in workers), "ended")
