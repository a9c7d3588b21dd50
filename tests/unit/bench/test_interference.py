from __future__ import annotations

import subprocess
import sys
import time

import pytest

from relaygr_stream.bench.interference import CpuTimes

BURN = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_a_child_is_ours_and_its_work_is_counted() -> None:
    before = CpuTimes.now()
    child = subprocess.Popen([sys.executable, "-c", BURN])
    try:
        deadline = time.monotonic() + 30
        while True:
            after = CpuTimes.now()
            assert before is not None
            assert after is not None
            if after.ours_s - before.ours_s > 0.3:
                break
            assert time.monotonic() < deadline, "the child's work is not counted as ours"
            time.sleep(0.05)
    finally:
        child.kill()
        child.wait()


def test_others_are_what_is_left() -> None:
    before, after = CpuTimes(10.0, 100.0, 50.0), CpuTimes(20.0, 115.0, 60.0)
    assert after.others_since(before) == pytest.approx(0.5)
    assert CpuTimes(20.0, 105.0, 60.0).others_since(before) == 0.0  # ticks are counted coarsely
