from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from relaygr_lab.bench.interference import disturbance_of
from relaygr_lab.bench.modes import RELAY
from relaygr_lab.cpu_times import CpuTimes, disturbance

from tests.unit.bench.reports import probe
from tests.waiting import until_blocking

BURN = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"


def ours_s() -> float:
    now = CpuTimes.now()
    assert now is not None
    return now.ours_s


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_a_child_is_ours_and_its_work_is_counted_also_when_it_has_ended() -> None:
    before = ours_s()
    child = subprocess.Popen([sys.executable, "-c", BURN])
    try:
        until_blocking(lambda: ours_s() - before > 0.3, "the child's work counted as ours", seconds=30)
    finally:
        child.kill()
        child.wait()
    assert ours_s() - before > 0.3


def test_busy_is_the_share_of_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert CpuTimes(20.0, 115.0, 60.0).busy_since(CpuTimes(10.0, 100.0, 50.0)) == pytest.approx(0.75)


def test_others_are_what_is_left() -> None:
    before, after = CpuTimes(10.0, 100.0, 50.0), CpuTimes(20.0, 115.0, 60.0)
    assert after.others_since(before) == pytest.approx(0.5)
    assert CpuTimes(20.0, 105.0, 60.0).others_since(before) == 0.0  # ticks are counted coarsely


def test_what_others_used_is_said_where_it_disturbs() -> None:
    before = CpuTimes(10.0, 100.0, 50.0)
    assert disturbance(before, CpuTimes(20.0, 115.0, 60.0)).startswith("other processes used 0.5 of ")
    assert disturbance(before, CpuTimes(20.0, 111.0, 60.0)) == ""
    assert disturbance(None, before) == disturbance(before, None) == "", "unknown on this system"


@pytest.mark.parametrize(
    ("changes", "private", "words"),
    [
        ({}, True, ""),
        ({"others_cores": 0.7}, True, "other processes used 0.7 cores"),
        ({"others_cores": 0.7}, False, ""),
        ({"others_cores": None}, True, ""),
        ({"stalled_ms": 180.0, "others_cores": 0.7}, False, "the machine stood still for 180 ms"),
        ({"stalled_ms": 9.0}, True, ""),
    ],
)
def test_a_failed_probe_is_disturbed_by_others_or_by_a_machine_that_stood_still(
    changes: dict[str, Any], private: bool, words: str
) -> None:
    assert disturbance_of(probe(RELAY, 3.0, passed=False, **changes), private=private) == words
    assert disturbance_of(probe(RELAY, 3.0, passed=True, **changes), private=private) == ""
