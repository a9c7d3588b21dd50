"""What an owner grants its lanes: shares add up, and moving shares do not add to what is pinned already."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.worker.budgets import EQUAL_PART, LaneShares, lane_budgets

LANES = st.sets(st.integers(0, 15), max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(LANES, st.dictionaries(st.integers(0, 15), st.integers(0, 1 << 40)), st.floats(0.001, 100)),
        max_size=12,
    )
)
def test_shares_add_up_to_one_and_no_lane_is_shut_out(
    updates: list[tuple[set[int], dict[int, int], float]],
) -> None:
    shares = LaneShares()
    for lanes, asked, seconds in updates:
        given_out = shares.update(lanes, asked, seconds)
        assert given_out.keys() == lanes
        assert sum(given_out.values()) == pytest.approx(1.0 if lanes else 0.0)
        assert all(share >= EQUAL_PART / len(lanes) - 1e-12 for share in given_out.values())


def test_demand_is_followed_and_forgotten() -> None:
    shares = LaneShares()
    shares.update([0, 1], {}, 1.0)
    busy = shares.update([0, 1], {0: 1000}, 1.0)
    assert busy[0] == pytest.approx(0.75)
    for _ in range(40):
        shares.update([0, 1], {0: 1000}, 1.0)
    turned = shares.update([0, 1], {0: 1000, 1: 1000}, 1.0)
    assert turned[1] > 0.7


def test_a_lane_that_went_and_came_back_counts_anew() -> None:
    shares = LaneShares()
    shares.update([0, 1], {0: 1000, 1: 1000}, 1.0)
    shares.update([1], {1: 1000}, 1.0)
    again = shares.update([0, 1], {0: 10, 1: 1000}, 1.0)  # its running total began again
    assert sum(again.values()) == pytest.approx(1.0)


@settings(max_examples=100, deadline=None)
@given(
    whole=st.integers(0, 1 << 40),
    weights=st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 1)), min_size=1, max_size=8),
)
def test_budgets_and_what_is_pinned_never_exceed_the_whole(whole: int, weights: list[tuple[float, float]]) -> None:
    total = sum(weight for weight, _ in weights)
    held = max(1.0, sum(part for _, part in weights))
    shares = {lane: weight / total for lane, (weight, _) in enumerate(weights)}
    pinned = {lane: int(whole * part / held) for lane, (_, part) in enumerate(weights)}  # together at most the whole
    budgets = lane_budgets(whole, shares, pinned)
    assert sum(budgets.values()) <= whole + len(weights)
    assert sum(max(budgets[lane], pinned[lane]) for lane in shares) <= whole + len(weights)
    assert all(budget >= 0 for budget in budgets.values())


def test_without_anything_pinned_beyond_its_share_budgets_are_the_shares() -> None:
    assert lane_budgets(100, {0: 0.25, 1: 0.75}, {0: 25, 1: 0}) == {0: 25, 1: 75}
    assert lane_budgets(100, {0: 0.25, 1: 0.75}, {0: 45, 1: 15}) == {0: 25, 1: 55}
