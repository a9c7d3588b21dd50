"""What an owner grants its lanes: shares and parts add up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.cache.tiers import capacity_for
from relaygr_stream.engine.budgets import LaneShares, equal_parts
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.topic_files import load_topics
from tests.properties import examples

LANES = st.sets(st.integers(0, 15), max_size=8)


@settings(max_examples=examples(60))
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
        assert all(share >= 0.04 / len(lanes) for share in given_out.values())


def test_demand_is_followed_and_forgotten_and_quiet_lanes_lend_their_share() -> None:
    shares = LaneShares()
    shares.update([0, 1], {}, 1.0)
    assert shares.update([0, 1], {0: 1000}, 1.0)[0] > 0.9
    both = shares.update([0, 1], {0: 1000, 1: 500}, 1.0)
    assert 0.5 < both[0] < 0.6
    for _ in range(40):
        shares.update([0, 1], {0: 1000, 1: 500}, 1.0)
    turned = shares.update([0, 1], {0: 1000, 1: 1500}, 1.0)
    assert turned[1] > 0.7


def test_a_lane_that_fell_quiet_lends_its_share_after_minutes() -> None:
    """What is left of its demand shrinks for hours, and it counted among the lanes with requests as long."""
    shares = LaneShares()
    for second in range(600):
        given_out = shares.update([0, 1], {0: 10**9 + 1000 * second, 1: 10**9}, 1.0)
    assert given_out[0] > 0.9


def test_of_a_running_total_only_what_is_new_is_demand() -> None:
    shares = LaneShares()
    shares.update([0, 1], {0: 10_000}, 1.0)
    shares.update([0, 1], {0: 10_000}, 100.0)
    alike = shares.update([0, 1], {0: 10_100, 1: 100}, 1.0)
    assert alike[0] == pytest.approx(alike[1], rel=1e-3)


def test_a_lane_that_went_and_came_back_counts_anew() -> None:
    shares = LaneShares()
    shares.update([0, 1], {0: 1000, 1: 1000}, 1.0)
    shares.update([1], {1: 1000}, 1.0)
    again = shares.update([0, 1], {0: 10, 1: 1000}, 1.0)  # its running total began again
    assert sum(again.values()) == pytest.approx(1.0)


@given(st.integers(0, 1 << 50), st.sets(st.integers(0, 10_000), min_size=1, max_size=300))
def test_equal_parts_add_up_to_the_whole(whole: int, lanes: set[int]) -> None:
    parts = equal_parts(whole, lanes)
    assert parts.keys() == lanes
    assert sum(parts.values()) == whole
    assert max(parts.values()) - min(parts.values()) <= 1


def test_the_defaults_have_room_for_two_longest_prefixes_of_the_built_in_model_on_every_lane() -> None:
    given = Settings()
    model = given.model
    token = 4 * model.layers * model.heads * (model.dqk + model.dv)  # float32
    longest = token * capacity_for(given.relay.max_prefix_tokens)
    assert given.worker.pinned_share * given.worker.hbm_bytes >= 2 * load_topics(given.kafka).lanes * longest
