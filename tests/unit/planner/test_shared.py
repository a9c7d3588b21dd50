"""Which two groups had better be one: of one model, and late by more than one group of both would be."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.ops.planner import shared as module
from relaygr_stream.ops.planner.demand import demand_of, kinds_of
from relaygr_stream.ops.planner.plan import Memory, decide
from relaygr_stream.ops.planner.seen import GroupSeen, Observation, PartSeen
from relaygr_stream.ops.planner.utilisation import Kind
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.wire.planner_status import ScenarioPlan, SharedGroup
from tests.unit.planner.worlds import FEED, SEARCH, group


def proposed(scenarios: list[Scenario], groups: Mapping[str, GroupSeen], minutes: int = 5) -> SharedGroup | None:
    """After so many minutes of this."""
    memory, plan = Memory(), None
    for at_s in range(0, 60 * minutes + 1, 60):
        memory, plan = decide(memory, Observation(at_s=at_s, groups=dict(groups)), scenarios)
    assert plan is not None
    return plan.shared


def seen(
    workers: int, per_second: float, late: float, busy: float = 0.7, *, p: float = 10.0, r: float = 2.0
) -> GroupSeen:
    """A group of which this share of the answers is late."""
    found = group(workers, per_second, busy=busy, p=p, r=r)
    every = tuple(msgspec.structs.replace(each, late=round(late * each.answers)) for each in found.workers)
    return msgspec.structs.replace(found, workers=every)


def bench(feed_ms: float, load: float, late: float, busy: float = 0.7) -> dict[str, GroupSeen]:
    """Devices of `make bench-scenarios`, 2 and 2, with rankings of the feed of so many milliseconds."""
    feed = seen(2, load * 780 / (13.4 + feed_ms), late, busy, p=13.4, r=feed_ms)
    return {"feed": feed, "search": seen(2, load * 150, late, busy, p=2.4, r=4.6)}


@pytest.mark.parametrize(
    ("feed_ms", "load", "late", "ahead"),
    [
        (16.5, 1.75, 0.101, True),
        (16.5, 1.75, 0.063, False),
        (16.5, 1.25, 0.026, False),
        (16.5, 1.0, 0.006, False),
        (7.0, 1.25, 0.010, False),
        (32.3, 1.25, 0.021, False),
    ],
    ids=["moved with a tide", "1.75", "1.25", "1.0", "short rankings", "longer ones than the SLO"],
)
def test_it_agrees_with_what_was_simulated(feed_ms: float, load: float, late: float, ahead: bool) -> None:
    """late: of two groups on a day of `make bench-scenarios`; ahead: whether one pool had more in time there."""
    found = proposed([FEED, SEARCH], bench(feed_ms, load, late))
    assert (found is not None) is ahead
    if found is not None:
        assert found.scenarios == ("feed", "search")
        assert "more of their rankings would be in time" in found.reason


def test_scenarios_of_two_models_share_nothing() -> None:
    ads = msgspec.structs.replace(SEARCH, model="models/ads")
    assert proposed([FEED, ads], bench(7.0, 1.0, 0.3)) is None
    feed = msgspec.structs.replace(FEED, model="models/ads")
    assert proposed([feed, ads], bench(7.0, 1.0, 0.3)) is not None


def test_who_has_no_traffic_or_no_worker_is_left_out() -> None:
    groups = bench(7.0, 1.0, 0.3)
    for silent in (GroupSeen(), seen(2, 0.0, 0.0)):
        assert proposed([FEED, SEARCH], {**groups, "search": silent}) is None


def test_who_is_late_though_its_devices_are_idle_lacks_no_workers_of_another() -> None:
    """A broker or a history store that is slow is not cured by one group."""
    assert proposed([FEED, SEARCH], bench(7.0, 0.5, 0.3)) is not None
    assert proposed([FEED, SEARCH], bench(7.0, 0.5, 0.3, busy=0.02)) is None


def test_a_day_counts_not_a_moment() -> None:
    memory, plan, proposals = Memory(), None, []
    for minute in range(240):
        late = 0.3 if 120 <= minute < 125 else 0.0
        now = Observation(at_s=60.0 * minute, groups=bench(7.0, 1.0, late))
        memory, plan = decide(memory, now, [FEED, SEARCH])
        proposals.append(plan.shared is not None)
    assert not any(proposals)


def test_each_ranking_counts_not_each_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of a day with a tide is late at its flood, where most of its rankings come."""
    monkeypatch.setattr(module, "late", lambda *kinds, use: (0.0,) * len(kinds))
    memory = Memory()
    for minute in range(600):
        flood = minute % 2
        groups = {"feed": seen(2, 9.0 if flood else 1.0, 0.2 * flood), "search": seen(2, 5.0, 0.0)}
        memory, _ = decide(memory, Observation(at_s=60.0 * minute, groups=groups), [FEED, SEARCH])
    assert module.ahead(memory.gains["feed", "search"]) == pytest.approx(0.2 * 0.9 / 2, rel=0.05)


@pytest.mark.parametrize("silent", [["feed"], ["feed", "search"]], ids=["one", "both"])
def test_what_groups_without_traffic_would_gain_fades_within_days(silent: list[str]) -> None:
    hour_s, memory, proposed_h = 3600.0, Memory(), []
    for hour in range(24 * 6):
        groups = bench(7.0, 1.0, 0.3) | ({} if hour < 24 else dict.fromkeys(silent, seen(2, 0.0, 0.0)))
        memory, plan = decide(memory, Observation(at_s=hour * hour_s, groups=groups), [FEED, SEARCH])
        proposed_h += [hour] if plan.shared is not None else []
    assert proposed_h[:24] == list(range(1, 25)), "not forgotten at once"
    assert 24 < proposed_h[-1] < 24 * 6 - 1


def test_of_a_group_that_is_gone_nothing_is_remembered() -> None:
    memory = Memory()
    for minute in range(5):
        now = Observation(at_s=60.0 * minute, groups=bench(7.0, 1.0, 0.3))
        memory, plan = decide(memory, now, [FEED, SEARCH])
    assert plan.shared is not None
    memory, plan = decide(memory, now, [FEED, msgspec.structs.replace(SEARCH, served_by="feed")])
    assert (memory.gains, plan.shared) == ({}, None)


def test_nothing_is_proposed_before_minutes_were_seen() -> None:
    assert proposed([FEED, SEARCH], bench(7.0, 1.0, 0.3), minutes=2) is None


@given(
    groups=st.lists(
        st.tuples(st.floats(0.5, 30.0), st.floats(10.0, 100.0), st.sampled_from("ab"), st.floats(0, 1)), max_size=6
    ),
    rate=st.floats(1.0, 200.0),
    workers=st.integers(1, 4),
)
def test_two_of_one_model_are_proposed_that_were_late_by_more_than_together(
    groups: list[tuple[float, float, str, float]], rate: float, workers: int
) -> None:
    scenarios = [Scenario(name=f"s{n}", slo_ms=slo, model=model) for n, (_, slo, model, _) in enumerate(groups)]
    asked = {f"s{n}": seen(workers, rate, late, r=r) for n, (r, _, _, late) in enumerate(groups)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "late", lambda *kinds, use: (min(1.0, use / 10),) * len(kinds))
        found = proposed(scenarios, asked)
    if found is not None:
        one, other = (groups[int(name[1:])] for name in found.scenarios)
        assert found.scenarios[0] != found.scenarios[1]
        assert one[2] == other[2]
        assert one[3] + other[3] > 0


def test_of_many_scenarios_few_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def none_late(*kinds: Kind, use: float) -> tuple[float, ...]:
        calls.append(use)
        return (0.0,) * len(kinds)

    monkeypatch.setattr(module, "late", none_late)
    scenarios = [Scenario(name=f"s{n}") for n in range(40)]
    found = proposed(scenarios, {each.name: seen(1, 10.0 + n, 0.1) for n, each in enumerate(scenarios)}, minutes=3)
    assert found is not None
    assert set(found.scenarios) <= {"s36", "s37", "s38", "s39"}
    assert len(calls) == 4 * 6, "six pairs, at each of four looks"


# ---- scenarios that share one ----


def shared(scenarios: list[Scenario], seen: GroupSeen) -> dict[str, ScenarioPlan]:
    return decide(Memory(), Observation(at_s=0.0, groups={"feed": seen}), scenarios)[1].scenarios


def test_a_shared_group_needs_what_each_scenarios_slo_needs() -> None:
    search = msgspec.structs.replace(SEARCH, served_by="feed", priority=3)
    parts = {
        "feed": PartSeen(per_second=20.0, prefix_share=0.5, score_share=0.25, p99_ms=30.0),
        "search": PartSeen(per_second=80.0, prefix_share=0.5, score_share=0.75, p99_ms=15.0),
    }
    seen = msgspec.structs.replace(group(2, 100.0, p=2.0, r=3.0), parts=parts)
    told = shared([FEED, search], seen)
    assert told["feed"].demand == pytest.approx(demand_of(seen, FEED, search))
    tight, loose = msgspec.structs.replace(FEED, slo_ms=20.0), msgspec.structs.replace(search, slo_ms=50.0)
    assert demand_of(seen, FEED, loose) < told["feed"].demand < demand_of(seen, tight, search)
    assert told["search"].demand == pytest.approx(told["feed"].demand * (0.5 * 2 + 0.75 * 3) / 5)
    assert (told["feed"].headroom_ms, told["search"].headroom_ms) == (20.0, 5.0), "each by its own SLO"
    assert (told["search"].workers, told["search"].wanted, told["search"].served_by) == (0, 0, "feed")
    assert (told["feed"].workers, told["feed"].served_by) == (2, msgspec.UNSET)
    assert told["feed"].reason.endswith("; with search")


@given(
    st.lists(
        st.tuples(st.floats(0.1, 100), st.just(0.0) | st.floats(1e-3, 50), st.floats(0.1, 50)), min_size=1, max_size=4
    ),
    st.floats(0, 3),
)
def test_kinds_are_told_apart_by_their_shares_of_the_device_time(
    rows: list[tuple[float, float, float]], variation: float
) -> None:
    """Of kinds whose works are known, the group's means, variation and shares give them back."""
    names = [f"s{n}" for n in range(len(rows))]
    rate, totals = sum(row[0] for row in rows), [sum(row[0] * row[n] for row in rows) for n in (1, 2)]
    squares = [sum(row[0] * row[n] ** 2 * (1 + variation) for row in rows) / rate for n in (1, 2)]
    means = [total / rate for total in totals]
    of = [square / mean**2 - 1 if mean else 0.0 for square, mean in zip(squares, means, strict=True)]
    shares = [(row[1] * row[0] / (totals[0] or 1), row[2] * row[0] / totals[1]) for row in rows]
    parts = {
        name: PartSeen(per_second=row[0], prefix_share=share[0], score_share=share[1])
        for name, row, share in zip(names, rows, shares, strict=True)
    }
    seen = GroupSeen(
        per_second=rate,
        prefix_ms=means[0],
        score_ms=means[1],
        prefix_variation=max(0.0, of[0]),
        score_variation=of[1],
        parts=parts,
    )
    found = kinds_of(seen, [Scenario(name=name) for name in names])
    for kind, row in zip(found, rows, strict=True):
        assert (kind.per_second, kind.prefix.mean_ms, kind.score.mean_ms) == pytest.approx(row)
        assert kind.score.variation == pytest.approx(variation, abs=1e-6)


def test_workers_that_tell_no_parts_keep_the_tightest_slo() -> None:
    (kind,) = kinds_of(group(1, 10.0), [FEED, msgspec.structs.replace(SEARCH, lead_ms=50.0)])
    assert (kind.slo_ms, kind.lead_ms, kind.per_second) == (20.0, 50.0, 10.0)


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
