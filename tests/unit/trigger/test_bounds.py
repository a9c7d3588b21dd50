"""The footprint and load bounds hold at each step of a simulated lane; without any one part of them they do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.engine.budgets import LaneBudgets
from relaygr_stream.trigger import load
from relaygr_stream.trigger.decision import LaneState
from relaygr_stream.trigger.ledger import LaneLedger
from relaygr_stream.trigger.load import LoadBucket
from tests.properties import examples
from tests.unit.trigger.owner_simulation import LONGEST, Owner
from tests.unit.trigger.simulation import Lane

STEPS = 400


@settings(max_examples=examples(200))
@given(st.integers(0, 2**32))
def test_both_bounds_hold_and_nothing_is_counted_for_ever(seed: int) -> None:
    Lane(seed).run_checked(STEPS)


def test_the_simulation_admits_and_refuses() -> None:
    lanes = [Lane(seed) for seed in range(60)]
    for lane in lanes:
        lane.run_checked(STEPS)
    assert sum(lane.admissions for lane in lanes) > 500
    assert sum(lane.requests - lane.admissions for lane in lanes) > 500


def run_seeds(count: int) -> None:
    for seed in range(count):
        Lane(seed).run_checked(STEPS)


def without_hold(ledger: LaneLedger) -> bool:
    return False


@pytest.mark.parametrize(
    ("owner", "name", "broken", "complaint"),
    [
        (LaneState, "fits", lambda lane, nbytes: not lane.ledger.on_hold, "footprint"),
        (LaneLedger, "on_hold", property(without_hold), "footprint"),
        (LaneLedger, "reconcile", lambda ledger, log_end, asked_s: 0, "for ever"),
        (LoadBucket, "allows", lambda bucket, cost_ms, now_s: True, "load"),
        (LoadBucket, "spend", lambda bucket, cost_ms, now_s: None, "load"),
        (load, "OWNER_S", 1000.0, "load since the start"),
        (LaneState, "admitted_recently", lambda lane, request_id, now_s: False, "admitted twice"),
    ],
    ids=[
        "no footprint bound",
        "no hold after a restart",
        "never reconciled",
        "no load bound",
        "load never charged",
        "a burst at every restart",
        "duplicates not seen",
    ],
)
def test_without_one_part_of_a_bound_some_run_breaks_it(
    owner: object, name: str, broken: object, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError, match=complaint):
        run_seeds(3000)


@settings(max_examples=examples(40))
@given(st.integers(0, 2**32))
def test_an_owners_lanes_together_stay_within_its_share_while_budgets_move(seed: int) -> None:
    Owner(seed).run_checked(10.0)


def test_every_lane_that_is_asked_has_room_for_its_longest_prefix_at_times_though_its_part_would_be_smaller() -> None:
    found = 0
    for seed in range(60):
        owner = Owner(seed)
        if owner.whole / owner.count < LONGEST <= owner.whole and owner.loss == 0.0:
            found += 1
            owner.run_checked(40.0)
            for lane, asked in owner.long_asked.items():
                assert owner.best_room[lane] >= LONGEST or asked < 100, (seed, lane, asked)
    assert found


def run_owners(seeds: range) -> None:
    for seed in seeds:
        Owner(seed).run_checked(10.0)


def without_hold_time(original: Callable[..., None]) -> Callable[..., None]:
    def create(budgets: LaneBudgets, whole: int, hold_s: float, turn_s: float) -> None:
        original(budgets, whole, 0.0, turn_s)

    return create


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (LaneBudgets, "__init__", without_hold_time(LaneBudgets.__init__)),
        (LaneState, "fits", lambda lane, nbytes: not lane.ledger.on_hold),
    ],
    ids=["taken back at once", "no footprint bound"],
)
def test_without_one_part_of_the_budgets_some_run_exceeds_the_share(
    owner: type, name: str, broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError, match="footprint"):
        run_owners(range(900, 3000))  # of the first few hundred, none shows the rarer defect
