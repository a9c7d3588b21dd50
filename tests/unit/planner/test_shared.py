"""Which scenarios had better share one group: of one model, lacking workers, with no ranking too long for another."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.ops.planner.demand import demand_in_parts, demand_of
from relaygr_stream.ops.planner.plan import Memory, decide
from relaygr_stream.ops.planner.seen import GroupSeen, Observation, PartSeen
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.wire.planner_status import ScenarioPlan, SharedGroup
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


# ---- scenarios that share one ----


def shared(scenarios: list[Scenario], seen: GroupSeen) -> dict[str, ScenarioPlan]:
    return decide(Memory(), Observation(at_s=0.0, groups={"feed": seen}), scenarios)[1].scenarios


def test_a_shared_group_needs_what_its_scenarios_need_together_within_the_tightest_slo() -> None:
    search = msgspec.structs.replace(SEARCH, served_by="feed", priority=3)
    parts = {
        "feed": PartSeen(per_second=20.0, prefix_share=0.9, score_share=0.25, p99_ms=30.0),
        "search": PartSeen(per_second=80.0, prefix_share=0.1, score_share=0.75, p99_ms=15.0),
    }
    seen = msgspec.structs.replace(group(2, 100.0, p=10.0, r=6.0), parts=parts)
    told = shared([FEED, search], seen)
    tightest = msgspec.structs.replace(FEED, slo_ms=20.0)
    assert told["feed"].demand == pytest.approx(demand_of(seen, tightest))
    assert told["feed"].demand > demand_of(seen, FEED)
    prefix, score = demand_in_parts(seen, tightest)
    assert told["search"].demand == pytest.approx(0.1 * prefix + 0.75 * score)
    assert (told["feed"].headroom_ms, told["search"].headroom_ms) == (20.0, 5.0), "each by its own SLO"
    assert (told["search"].workers, told["search"].wanted, told["search"].served_by) == (0, 0, "feed")
    assert (told["feed"].workers, told["feed"].served_by) == (2, msgspec.UNSET)
    assert told["feed"].reason.endswith("; with search")


def test_a_shared_group_of_which_nothing_is_seen_has_a_plan_for_each() -> None:
    told = shared([FEED, msgspec.structs.replace(SEARCH, served_by="feed")], GroupSeen())
    assert {name: (each.wanted, each.headroom_ms) for name, each in told.items()} == {
        "feed": (1, None),
        "search": (0, None),
    }


@given(st.floats(0.1, 1e3), st.floats(0.1, 50), st.floats(0.1, 20), st.floats(0, 1), st.floats(0, 1))
def test_the_parts_of_all_scenarios_are_the_groups_demand(
    rate: float, p: float, r: float, prefix: float, score: float
) -> None:
    host = Scenario(name="feed")
    others = [Scenario(name=name, served_by="feed", slo_ms=40.0) for name in ("a", "b")]
    shares = {"a": (prefix, score), "b": (1 - prefix, 1 - score)}
    parts = {name: PartSeen(prefix_share=p, score_share=s) for name, (p, s) in shares.items()}
    told = shared([host, *others], msgspec.structs.replace(group(1, rate, p=p, r=r), parts=parts))
    assert sum(told[name].demand for name in shares) == pytest.approx(told["feed"].demand)
