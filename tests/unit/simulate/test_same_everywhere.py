"""A seed gives the same story in every process: texts hash to other numbers in each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
#: Tiers that evict, among them users of whom one in a few is simulated; lanes that move, and a planner that looks on.
STORY = """
from relaygr_lab.simulate.groups import GroupsDay
from relaygr_lab.simulate.movers import Planned
from relaygr_lab.simulate.scenario import Failure
from relaygr_stream.cache import fading
from relaygr_stream.ops.planner.plan import DAY
from tests.unit.simulate.scenes import fleet_of, scenario, trace
from tests.unit.simulate.test_groups import FEED, SEARCH, day

fading.SIMULATED, fading.BETTER, fading.JUDGED_USES = 2, 1.0, 1
tight = {"worker.hbm_bytes": "24MiB", "worker.dram_bytes": "32MiB"}
fleet = fleet_of(
    scenario(
        tight, rate=400.0, traffic={"revisit": 0.7, "length": 100.0}, workers=4, sample=4, seconds=2.0,
        failure=Failure(share=0.3, at=0.3),
    )
)
fleet.run()
print(*trace(fleet), *(worker.scheduler.totals() for worker in fleet.workers), sep="\\n")
print(*(worker.scheduler.cache.counters.as_dict() for worker in fleet.workers), sep="\\n")
print(GroupsDay(day(swing=0.5), {"feed": 2, "search": 1}, Planned((FEED, SEARCH), DAY), 0.5).run())
"""


@pytest.mark.stack  # its processes import torch anew
def test_a_seed_gives_the_same_story_in_every_process() -> None:
    told = [
        subprocess.Popen(
            [sys.executable, "-c", STORY],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )
        for seed in ("1", "2")
    ]  # fmt: skip
    first, second = (process.communicate()[0].splitlines() for process in told)
    assert [process.returncode for process in told] == [0, 0]
    assert len(first) > 500
    assert [pair for pair in zip(first, second, strict=True) if pair[0] != pair[1]] == []
