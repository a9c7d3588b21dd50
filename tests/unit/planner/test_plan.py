"""The planner's core: what it proposes, and that it does not swing."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.ops.planner.demand import demand_of
from relaygr_stream.ops.planner.plan import DAY, Memory, decide
from relaygr_stream.ops.planner.seen import VARIATION, Observation
from relaygr_stream.ops.planner.utilisation import Kind, Work, utilisation
from relaygr_stream.settings.scenarios import RESERVE, Scenario
from relaygr_stream.wire.planner_status import REASON_KINDS
from tests.unit.planner.worlds import FEED, SEARCH, World, group, rate_for

MINUTE = 60.0
HOUR = 3600.0


def scenario(name: str = "feed", **given: object) -> Scenario:
    return msgspec.structs.replace(FEED, name=name, **given)


def constant(**loads: float) -> object:
    return lambda at: loads


# ---- what a scenario needs ----


def test_demand_is_that_of_the_formula() -> None:
    seen = group(2, 100.0, p=12.0, r=2.0)
    use = utilisation(Kind(100.0, Work(12.0, VARIATION), Work(2.0, VARIATION), 150.0, 50.0))
    assert demand_of(seen, FEED) == pytest.approx(100 * (12 + 2) / use / 1e3)


def test_a_scenario_whose_times_vary_more_needs_more() -> None:
    seen = group(2, 100.0, p=12.0, r=8.0)
    assert demand_of(msgspec.structs.replace(seen, score_variation=2.0), FEED) > 1.1 * demand_of(seen, FEED)


@given(
    load=st.floats(0, 40),
    more=st.floats(0, 40),
    workers=st.integers(1, 40),
    least=st.integers(1, 5),
    p=st.floats(0, 50),
    r=st.floats(0.1, 20),
)
def test_more_load_never_wants_fewer_workers(
    load: float, more: float, workers: int, least: int, p: float, r: float
) -> None:
    scenes = [scenario(min_workers=least)]

    def wanted(load: float) -> int:
        seen = group(workers, rate_for(load, p=p, r=r), p=p, r=r)
        _, plan = decide(Memory(), Observation(at_s=0, groups={"feed": seen}), scenes)
        return plan.scenarios["feed"].wanted

    assert least <= wanted(load) <= wanted(load + more)


# ---- moves ----


def test_a_group_below_its_floor_takes_from_the_reserve() -> None:
    world = World([FEED, SEARCH], {"feed": 1, "search": 1}, constant(feed=1.8, search=0.5), reserve=1)  # type: ignore[arg-type]
    world.run(HOUR)
    (at, move), *others = world.moves
    assert (move.source, move.target, others) == (RESERVE, "feed", [])
    assert at == max(DAY.patience_s, DAY.settle_s)  # the planner's start counts as a change
    assert "needs 2 workers and has 1" in move.reason


def test_a_group_is_below_its_floor_for_half_a_minute_before_it_takes_a_worker() -> None:
    world = World([FEED], {"feed": 1}, lambda at: {"feed": 0.5 if at < HOUR else 8.0}, reserve=1)
    world.run(HOUR)
    assert not world.moves
    world.run(2 * DAY.patience_s)
    ((at, _),) = world.moves
    assert HOUR + DAY.patience_s <= at < HOUR + 2 * DAY.patience_s


def test_without_a_reserve_it_takes_from_who_stays_whole() -> None:
    world = World([FEED, SEARCH], {"feed": 2, "search": 3}, constant(feed=2.6, search=1.5), reserve=0)  # type: ignore[arg-type]
    world.run(HOUR)
    assert [(move.source, move.target) for _, move in world.moves] == [("search", "feed")]


def test_who_would_lack_a_worker_gives_none_to_an_equal() -> None:
    world = World([FEED, SEARCH], {"feed": 2, "search": 3}, constant(feed=2.6, search=2.2))  # type: ignore[arg-type]
    world.run(HOUR)
    assert not world.moves


def test_where_all_lack_workers_the_shortage_is_shared() -> None:
    """A tide: one needs five of two workers, the other 1.2. One of two stays late, but not by a factor."""
    world = World([FEED, SEARCH], {"feed": 2, "search": 2}, constant(feed=4.6, search=1.2))  # type: ignore[arg-type]
    world.run(HOUR)
    assert world.workers == {"feed": 3, "search": 1}
    ((_, move),) = world.moves
    assert "search has more for its need, 2 for 1.20" in move.reason


def test_a_higher_priority_takes_what_a_lower_one_needs_down_to_its_least() -> None:
    scenes = [scenario("feed", priority=2), scenario("ads", min_workers=2)]
    world = World(scenes, {"feed": 1, "ads": 4}, constant(feed=5.0, ads=4.0))  # type: ignore[arg-type]
    world.run(HOUR)
    assert world.workers == {"feed": 3, "ads": 2}
    assert all("lower priority" in move.reason for _, move in world.moves)


def test_late_workers_whose_demand_fits_get_one_more_and_keep_it() -> None:
    """The bound is an estimate; what is measured counts."""
    world = World([FEED], {"feed": 2}, constant(feed=1.8), reserve=3, truth=1.3)  # type: ignore[arg-type]
    world.run(3 * HOUR)
    assert world.workers == {"feed": 3}
    assert len(world.moves) == 1
    assert world.step().scenarios["feed"].reason_kind == "late"


def test_who_keeps_the_slo_with_fewer_workers_asks_for_no_more() -> None:
    """The bound asks for three; two keep the SLO all day."""
    world = World([FEED], {"feed": 2}, constant(feed=2.6), reserve=3, truth=0.7)  # type: ignore[arg-type]
    world.run(3 * HOUR)
    assert not world.moves
    plan = world.step()
    assert plan.scenarios["feed"].wanted == 2
    assert "as few kept the SLO" in plan.scenarios["feed"].reason
    assert plan.scenarios["feed"].reason_kind == "kept"


@given(load=st.floats(0, 5), workers=st.integers(0, 5), least=st.integers(1, 5))
def test_each_plan_has_one_kind_of_reason(load: float, workers: int, least: int) -> None:
    plan = World([scenario(min_workers=least)], {"feed": workers}, lambda at: {"feed": load}).step().scenarios["feed"]
    assert plan.reason_kind in REASON_KINDS
    assert plan.reason_kind == ("unserved" if not workers else "min_workers" if plan.demand < least else "demand")


def test_what_was_learned_with_few_workers_does_not_stop_a_rising_demand() -> None:
    world = World([FEED], {"feed": 2}, lambda at: {"feed": 2.6 if at < HOUR else 4.5}, reserve=3, truth=0.7)
    world.run(3 * HOUR)
    assert world.workers == {"feed": 4}


def test_a_single_late_worker_asks_for_nothing() -> None:
    """It has a hot lane, or a slow device."""
    memory, plan = Memory(), None
    for at in range(0, 600, 10):
        seen = group(3, rate_for(2.0), late=True)
        others = tuple(msgspec.structs.replace(each, late=0) for each in seen.workers[1:])
        seen = msgspec.structs.replace(seen, workers=(seen.workers[0], *others))
        memory, plan = decide(memory, Observation(at_s=at, groups={"feed": seen}, reserve=1), [FEED])
    assert plan is not None
    assert plan.move is None
    assert plan.scenarios["feed"].wanted == 3


def test_late_workers_with_idle_devices_ask_for_nothing() -> None:
    """A broker or a history store that is slow is not cured by workers."""
    memory, plan = Memory(), None
    for at in range(0, 600, 10):
        seen = group(3, rate_for(2.5), late=True, busy=0.02)
        memory, plan = decide(memory, Observation(at_s=at, groups={"feed": seen}, reserve=1), [FEED])
        assert plan.move is None


def test_wanted_falls_only_where_use_is_low() -> None:
    def wanted(load: float) -> int:
        seen = Observation(at_s=0, groups={"feed": group(4, rate_for(load))})
        return decide(Memory(), seen, [FEED])[1].scenarios["feed"].wanted

    assert [wanted(load) for load in (2.9, 2.6, 1.9, 0.1)] == [4, 3, 3, 1]


def test_what_rises_within_minutes_gets_its_worker_before_the_average_over_minutes_is_there() -> None:
    world = World([FEED], {"feed": 2}, lambda at: {"feed": 1.5 + max(0.0, at - HOUR) / (10 * MINUTE)}, reserve=1)
    world.run(HOUR)
    while not world.moves and world.now < 2 * HOUR:
        world.step()
    assert world.memory.demand["feed"] < 2.0
    (at, _), *_ = world.moves
    assert HOUR + 5 * MINUTE < at < HOUR + 5 * MINUTE + DAY.floor_s, "two are enough for five minutes"


@given(amplitude=st.floats(0, 0.018), minutes=st.integers(1, 30))
def test_a_demand_that_wanders_about_a_floor_does_not_raise_it_again_and_again(amplitude: float, minutes: int) -> None:
    world = World(
        [FEED], {"feed": 2}, lambda at: {"feed": 2.05 + amplitude * math.sin(2 * math.pi * at / (minutes * MINUTE))}
    )
    wanted = [world.step().scenarios["feed"].wanted for _ in range(720)]
    assert sum(before != after for before, after in itertools.pairwise(wanted)) <= 1


def test_a_burst_of_seconds_moves_nothing() -> None:
    world = World(
        [FEED, SEARCH],
        {"feed": 2, "search": 2},
        lambda at: {"feed": 3.0 if at % 600 < 20 else 1.5, "search": 0.6},
    )
    world.run(HOUR)
    assert not world.moves


def test_nothing_moves_while_a_move_is_under_way() -> None:
    memory, plan = Memory(), None
    for at in range(0, 600, 10):
        seen = Observation(at_s=at, groups={"feed": group(1, rate_for(3.0))}, reserve=2, moving=True)
        memory, plan = decide(memory, seen, [FEED])
        assert plan.move is None


def test_a_group_whose_workers_are_gone_keeps_its_demand() -> None:
    """No answers tell nothing of the demand."""
    memory, _ = decide(Memory(), Observation(at_s=0, groups={"feed": group(3, rate_for(2.5))}), [FEED])
    _, plan = decide(memory, Observation(at_s=10, groups={}), [FEED])
    assert plan.scenarios["feed"].wanted == 3
    assert (plan.scenarios["feed"].reason_kind, plan.scenarios["feed"].reason) == ("unserved", "no worker serves it")


# ---- properties of any fleet ----

loads = st.floats(0, 8)
least = st.integers(1, 3)


@st.composite
def fleets(draw: st.DrawFn) -> World:
    count = draw(st.integers(1, 4))
    scenes = [
        scenario(f"s{index}", model=f"m{index}", priority=draw(st.integers(0, 2)), min_workers=draw(least))
        for index in range(count)
    ]
    asked = {each.name: draw(loads) for each in scenes}
    workers = {each.name: draw(st.integers(0, 5)) for each in scenes}
    return World(scenes, workers, lambda at: asked, draw(st.integers(0, 3)), draw(st.sampled_from([0.8, 1.0, 1.25])))


@given(world=fleets())
def test_on_constant_load_it_settles_and_stays(world: World) -> None:
    whole = sum(world.workers.values()) + world.reserve
    world.run(HOUR / 2)
    moves = len(world.moves)
    world.run(HOUR / 4)
    assert len(world.moves) == moves
    assert sum(world.workers.values()) + world.reserve == whole
    if whole >= sum(each.min_workers for each in world.scenarios):
        assert all(world.workers[each.name] >= each.min_workers for each in world.scenarios)


@given(world=fleets(), swing=st.floats(0, 1), period=st.floats(MINUTE, HOUR))
def test_whatever_the_tide_moves_are_single_apart_and_leave_each_its_least(
    world: World, swing: float, period: float
) -> None:
    before = world._loads(0)
    world._loads = lambda at: {
        name: load * (1 + swing * math.sin(2 * math.pi * at / period + index))
        for index, (name, load) in enumerate(before.items())
    }
    enough = {each.name: world.workers[each.name] >= each.min_workers for each in world.scenarios}
    while world.now < HOUR / 2:
        plan = world.step()
        for each in world.scenarios:
            enough[each.name] |= world.workers[each.name] >= each.min_workers
            assert world.workers[each.name] >= each.min_workers or not enough[each.name]
            assert plan.scenarios[each.name].wanted >= each.min_workers
    times = [at for at, _ in world.moves]
    assert all(later - before >= DAY.settle_s for before, later in itertools.pairwise(times))


@given(world=fleets())
def test_the_same_day_gives_the_same_plans(world: World) -> None:
    seen = []
    plans = []
    for _ in range(20):
        seen.append(world.look())
        plans.append(world.step())
    memory, again = Memory(), []
    for each in seen:
        memory, plan = decide(memory, msgspec.json.decode(msgspec.json.encode(each), type=Observation), world.scenarios)
        again.append(plan)
    assert again == plans
