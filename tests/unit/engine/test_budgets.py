"""What an owner grants its lanes: parts add up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.cache.tiers import capacity_for
from relaygr_stream.engine.budgets import equal_parts
from relaygr_stream.settings.schema import Settings


@given(st.integers(0, 1 << 50), st.sets(st.integers(0, 10_000), min_size=1, max_size=300))
def test_equal_parts_add_up_to_the_whole(whole: int, lanes: set[int]) -> None:
    parts = equal_parts(whole, lanes)
    assert parts.keys() == lanes
    assert sum(parts.values()) == whole
    assert max(parts.values()) - min(parts.values()) <= 1


def test_the_defaults_have_room_for_thirty_two_longest_prefixes_of_the_built_in_model() -> None:
    """Of one worker, however many lanes share it: its pinned share is one room for all of them."""
    given = Settings()
    model = given.model
    token = 4 * model.layers * model.heads * (model.dqk + model.dv)  # float32
    longest = token * capacity_for(given.relay.max_prefix_tokens)
    assert given.worker.pinned_share * given.worker.hbm_bytes >= 32 * longest
