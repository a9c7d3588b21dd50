"""When a worker asks for another assignment, and which speed it states."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.wire.messages import CostModel
from relaygr_stream.worker.fair_share import ASK_S, LOOK_S, FairShare, fair_busy_share
from tests.statuses import worker_status


class Fleet:
    """What the workers state, and what "w" asks for. Time passes in looks."""

    def __init__(self, *, fixed: bool = False) -> None:
        self.now = 0.0
        self.speed = 0.0
        self.asked: list[float] = []
        self.directory = OwnerDirectory(3000.0, clock=lambda: self.now)
        self.share = FairShare("w", self.directory, self, fixed=fixed, clock=lambda: self.now)

    def rebalance(self) -> None:
        self.asked.append(self.now)

    def pass_time(
        self,
        seconds: float,
        own: float,
        *others: float,
        state: str = "serving",
        ms: float = 100.0,
        others_ms: float = 100.0,
    ) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += LOOK_S
            costs = CostModel(c0=ms, c1=0, c2=0, c3=0)
            self.directory.take(worker_status("w", busy_share=own, state=state, costs=costs))
            for number, busy in enumerate(others):
                theirs = CostModel(c0=others_ms, c1=0, c2=0, c3=0)
                self.directory.take(worker_status(f"o{number}", busy_share=busy, costs=theirs))
            asyncio.run(self.share.look())


def test_a_worker_with_far_more_to_do_asks_and_each_time_that_nothing_moves_waits_longer() -> None:
    fleet = Fleet()
    fleet.pass_time(40 * ASK_S, 0.9, 0.4, 0.4)
    assert [round(at / ASK_S) for at in fleet.asked] == [1, 3, 7, 15, 31]
    fleet.share.lanes_changed()
    before = len(fleet.asked)
    fleet.pass_time(2 * ASK_S, 0.9, 0.4, 0.4)
    assert len(fleet.asked) == before + 1


@pytest.mark.parametrize(
    ("own", "others"), [(0.9, (0.9, 0.8)), (0.4, (0.9, 0.9)), (0.2, (0.01, 0.01)), (0.9, ()), (1.0, (1.0, 1.0))]
)
def test_one_that_others_could_not_help_does_not_ask(own: float, others: tuple[float, ...]) -> None:
    fleet = Fleet()
    fleet.pass_time(10 * ASK_S, own, *others)
    assert not fleet.asked


@pytest.mark.parametrize(
    ("other", "others_ms", "asks"), [(0.57, 50.0, True), (0.57, 100.0, False), (0.5, 200.0, False)]
)
def test_what_is_fair_follows_the_speeds(other: float, others_ms: float, asks: bool) -> None:
    """A faster worker could do more of the work than its part of the busy shares says, a slower one less."""
    fleet = Fleet()
    fleet.pass_time(2 * ASK_S, 0.8, other, others_ms=others_ms)
    assert bool(fleet.asked) is asks


@pytest.mark.parametrize("ms", [5e-324, 1e-300, 1e300, math.inf])
def test_who_states_absurd_costs_decides_nothing_alone(ms: float) -> None:
    busy = fair_busy_share([worker_status(f"w{n}", busy_share=0.5) for n in range(40)])
    assert busy == pytest.approx(0.5)
    absurd = worker_status("w", busy_share=0.0, costs=CostModel(c0=ms, c1=0, c2=0, c3=0))
    others = [worker_status(f"w{n}", busy_share=0.5) for n in range(40)]
    assert 0.5 * 40 / 56 <= fair_busy_share([absurd, *others]) + 1e-9 <= 0.5 + 1e-9


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0)), min_size=1, max_size=20))
def test_what_is_fair_is_between_the_least_and_the_most_busy(workers: list[tuple[float, float]]) -> None:
    stated = [
        worker_status(f"w{n}", busy_share=busy, costs=CostModel(c0=ms, c1=0, c2=0, c3=0))
        for n, (busy, ms) in enumerate(workers)
    ]
    shares = [busy for busy, _ in workers]
    assert min(shares) - 1e-9 <= fair_busy_share(stated) <= max(shares) + 1e-9


def test_a_rush_of_a_minute_asks_for_nothing() -> None:
    fleet = Fleet()
    fleet.pass_time(3 * ASK_S, 0.5, 0.5)
    fleet.pass_time(60.0, 1.0, 0.4)
    fleet.pass_time(3 * ASK_S, 0.5, 0.5)
    assert not fleet.asked


def test_one_that_drains_does_not_ask() -> None:
    fleet = Fleet()
    fleet.pass_time(3 * ASK_S, 0.9, 0.1, state="draining")
    assert not fleet.asked


def test_the_stated_speed_is_that_of_the_costs_and_noise_does_not_change_it() -> None:
    fleet = Fleet()
    fleet.pass_time(LOOK_S, 0.5)
    assert fleet.speed == pytest.approx(10.0)
    for ms in (105.0, 95.0, 112.0, 90.0):
        fleet.pass_time(ASK_S, 0.5, ms=ms)
        assert fleet.speed == pytest.approx(10.0)
    fleet.pass_time(6 * ASK_S, 0.5, ms=50.0)
    assert fleet.speed == pytest.approx(20.0, rel=0.2)


def test_a_weight_by_hand_states_no_speed() -> None:
    fleet = Fleet(fixed=True)
    fleet.pass_time(ASK_S, 0.5)
    assert fleet.speed == 0.0
