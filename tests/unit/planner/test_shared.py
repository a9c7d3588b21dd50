"""Which scenarios had better share one group: of one model, lacking workers, with no ranking too long for another."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.ops.planner.plan import Memory, decide
from relaygr_stream.ops.planner.seen import GroupSeen, Observation
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.wire.planner_status import SharedGroup
from tests.unit.planner.worlds import FEED, SEARCH, group


def proposed(scenarios: list[Scenario], groups: dict[str, GroupSeen], reserve: int = 0) -> SharedGroup | None:
    seen = Observation(at_s=0.0, groups=groups, reserve=reserve)
    return decide(Memory(), seen, scenarios)[1].shared


def bench(feed_ms: float, rate: float) -> dict[str, GroupSeen]:
    """Devices of `make bench-scenarios`, 2 and 2: rankings of the feed as long as their candidates make them."""
    return {"feed": group(2, 15 * rate, p=20.0, r=feed_ms), "search": group(2, 75 * rate, p=2.0, r=5.0)}


@pytest.mark.parametrize(
    ("feed_ms", "rate", "shared"),
    [(7.0, 2.5, True), (16.0, 2.5, False), (16.0, 3.5, False), (7.0, 0.4, False)],
    ids=["one pool wins", "a long ranking at 1.25", "and at 1.75", "there are enough"],
)
def test_it_agrees_with_what_was_simulated(feed_ms: float, rate: float, shared: bool) -> None:
    found = proposed([FEED, SEARCH], bench(feed_ms, rate))
    assert (found is not None) is shared
    if found is not None:
        assert found.scenarios == ("feed", "search")
        assert "the longest ranking, 7.0 ms of feed" in found.reason
        assert "the 20 ms of search" in found.reason


def test_scenarios_of_two_models_share_nothing() -> None:
    ads = msgspec.structs.replace(SEARCH, model="models/ads")
    assert proposed([FEED, ads], bench(7.0, 2.5)) is None
    feed = msgspec.structs.replace(FEED, model="models/ads")
    assert proposed([feed, ads], bench(7.0, 2.5)) is not None


def test_a_reserve_comes_before_a_shared_group() -> None:
    assert proposed([FEED, SEARCH], bench(7.0, 2.5), reserve=20) is None


def test_who_has_no_traffic_or_no_worker_is_left_out() -> None:
    groups = bench(7.0, 2.5)
    for silent in (GroupSeen(), msgspec.structs.replace(groups["search"], per_second=0.0, score_ms=0.0)):
        assert proposed([FEED, SEARCH], {**groups, "search": silent}) is None


@given(
    times=st.lists(st.tuples(st.floats(0.5, 30.0), st.floats(10.0, 100.0), st.sampled_from("ab")), max_size=5),
    rate=st.floats(1.0, 200.0),
    workers=st.integers(1, 4),
)
def test_whoever_shares_has_one_model_and_waits_for_no_ranking_that_is_too_long(
    times: list[tuple[float, float, str]], rate: float, workers: int
) -> None:
    scenarios = [Scenario(name=f"s{n}", slo_ms=slo, model=model) for n, (_, slo, model) in enumerate(times)]
    groups = {f"s{n}": group(workers, rate, r=r) for n, (r, _, _) in enumerate(times)}
    found = proposed(scenarios, groups)
    if found is None:
        return
    members = [each for each in scenarios if each.name in found.scenarios]
    assert len(members) > 1
    assert len({each.model for each in members}) == 1
    for one, other in itertools.permutations(members, 2):
        assert groups[one.name].score_ms + groups[other.name].score_ms <= 0.8 * one.slo_ms + 1e-9
