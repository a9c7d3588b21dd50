"""The load bound holds at each step of a simulated lane; without any one part of it, it does not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.trigger import load
from relaygr_stream.trigger.decision import LaneState
from relaygr_stream.trigger.ledger import LaneLedger
from relaygr_stream.trigger.load import LoadBucket
from tests.properties import examples
from tests.unit.trigger.simulation import Lane

STEPS = 400


@settings(max_examples=examples(200))
@given(st.integers(0, 2**32))
def test_the_bound_holds_and_nothing_is_counted_for_ever(seed: int) -> None:
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


@pytest.mark.parametrize(
    ("owner", "name", "broken", "complaint"),
    [
        (LaneLedger, "reconcile", lambda ledger, log_end, asked_s: 0, "for ever"),
        (LoadBucket, "allows", lambda bucket, cost_ms, now_s: True, "load"),
        (LoadBucket, "spend", lambda bucket, cost_ms, now_s: None, "load"),
        (load, "OWNER_S", 1000.0, "load since the start"),
        (LaneState, "admitted_recently", lambda lane, request_id, now_s: False, "admitted twice"),
    ],
    ids=[
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
