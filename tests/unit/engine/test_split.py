"""The split between ranking and pre-inference follows the traffic: the real split, bucket and decision, on a simulated
device that ranks first."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from relaygr_stream.engine.budgets import LEAST_COMPUTED, LoadSplit
from relaygr_stream.fleet import Claim
from relaygr_stream.trigger.decision import LaneState, Policy, decide
from relaygr_stream.trigger.ledger import LaneLedger
from tests.unit.trigger.parts import event, lane_status, worker_status

CAP = 0.7
STEP_S = 0.25
POLICY = Policy(stale_ms=1000.0, life_ms=2000.0, burst_ms=200.0, max_prefix_tokens=1000)


@dataclass
class Device:
    """One lane's traffic on one device: 20 ms a prefix, 1 ms to rank on it. Ranking comes first, and what was not
    pre-inferred runs in full."""

    split: LoadSplit = field(default_factory=lambda: LoadSplit(CAP))
    random: random.Random = field(default_factory=lambda: random.Random(1))
    now: float = 100.0
    ranking_ms: float = 0.0
    pre_infer_ms: float = 0.0
    asked: float = 0.0
    computed: float = 0.0
    admitted: int = 0
    requests: int = 0

    def __post_init__(self) -> None:
        self.lane = LaneState(POLICY, LaneLedger(0, 60.0, self.now))

    def run(self, seconds: float, rate: float, cached: float = 0.0) -> float:
        """Let traffic come for a while; returns the share that was admitted."""
        before, came = self.admitted, self.requests
        for _ in range(int(seconds / STEP_S)):
            self.step(rate, cached)
        return (self.admitted - before) / max(1, self.requests - came)

    def step(self, rate: float, cached: float) -> None:
        granted = self.split.update(self.ranking_ms, self.asked, self.computed, STEP_S)
        status = worker_status(lane_status(budget=10**15, rate=granted), computed_share=self.split.computed_share)
        owner = Claim(status, status.lanes[0], self.now)
        room = STEP_S * 1e3  # milliseconds that the device has
        for number in range(int(rate * STEP_S)):
            now = self.now + number / rate
            self.requests += 1
            request = event(20, f"{self.requests}")
            self.lane.observe(owner, now)
            decision = decide(request, self.lane, age_ms=0.0, now_s=now)
            cost = 0.0 if self.random.random() < cached else 20.0
            if decision.admit:
                self.lane.admit(request, decision, now)
                self.admitted += 1
                self.asked += 2000
                self.computed += 100 * cost
                spent = min(room, cost + 1.0)
                self.pre_infer_ms += max(0.0, spent - 1.0)
                self.ranking_ms += min(spent, 1.0)
            else:
                spent = min(room, 21.0)
                self.ranking_ms += spent
            room -= spent
        self.now += STEP_S


def test_with_time_to_spare_all_is_admitted_whatever_ranking_takes() -> None:
    device = Device()
    device.run(5, rate=20)
    assert device.run(10, rate=20) > 0.99  # 42 % of the device


def test_pre_inference_never_gets_more_than_its_cap() -> None:
    device = Device()
    device.run(20, rate=40)  # 80 % of the device for prefixes alone
    before = device.pre_infer_ms
    device.run(20, rate=40)
    assert (device.pre_infer_ms - before) / 20e3 <= CAP + 0.01


def test_under_overload_pre_inference_is_shed_and_comes_back_by_itself() -> None:
    device = Device()
    assert device.run(10, rate=20) > 0.9
    device.run(10, rate=120)  # two and a half devices' worth
    assert device.run(5, rate=120) < 0.1
    device.run(15, rate=20)
    assert device.run(5, rate=20) > 0.99


def test_where_most_is_cached_admissions_are_charged_less() -> None:
    device = Device()
    device.run(30, rate=100, cached=0.9)  # 30 % of the device, 210 % if nothing were cached
    assert device.run(10, rate=100, cached=0.9) > 0.95


def test_when_users_are_new_all_at_once_grants_fall_back() -> None:
    device = Device()
    device.run(30, rate=100, cached=0.9)
    before = device.split.computed_share
    device.run(20, rate=20, cached=0.0)
    assert before < 0.5
    assert device.split.computed_share > 0.6


@pytest.mark.parametrize(("asked", "computed"), [(0, 0), (1e9, 0), (1e9, 1e9), (0, 1e9)])
def test_what_is_computed_stays_within_its_bounds(asked: float, computed: float) -> None:
    split = LoadSplit(CAP)
    assert 0 <= split.update(0.0, asked, computed, 0.25) <= 1e3 * CAP
    assert LEAST_COMPUTED <= split.computed_share <= 1.0


def test_a_worker_that_ranks_all_the_time_grants_nothing() -> None:
    split = LoadSplit(CAP)
    for second in range(1, 60):
        granted = split.update(second * 1e3, 0.0, 0.0, 1.0)
    assert granted == 0.0
