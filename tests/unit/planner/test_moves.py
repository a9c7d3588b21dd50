"""What follows a proposed move: one at a time, each ends verified or taken back, whatever workers and planners do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relaygr_stream.ops.planner.moves import ABSENT_S, EndedMove, MovesMemory, begun, followed
from relaygr_stream.ops.planner.plan import DAY
from relaygr_stream.ops.planner.seen import GroupSeen, Observation, WorkerSeen
from relaygr_stream.settings.scenarios import RESERVE, Scenario
from relaygr_stream.wire.planner_status import Move

SCENARIOS = (Scenario(name="feed", min_workers=1), Scenario(name="search", min_workers=1))
NAMES = tuple(each.name for each in SCENARIOS)
TO_SEARCH = Move(source="feed", target="search")
PERIOD_S = 10.0


def seen(at_s: float = 0.0, **groups: list[WorkerSeen]) -> Observation:
    here = {name: GroupSeen(workers=tuple(groups.get(name, ()))) for name in (*NAMES, RESERVE)}
    return Observation(at_s=at_s, groups=here)


def worker(name: str, **given: object) -> WorkerSeen:
    return msgspec.structs.replace(WorkerSeen(name=name, lanes=4), **given)


def moved(*, at_s: float = 0.0, feed: list[WorkerSeen] | None = None) -> MovesMemory:
    """A move from feed to search that has begun."""
    workers = [worker("a", busy=0.5), worker("b", busy=0.2), worker("c", busy=0.9)] if feed is None else feed
    return begun(MovesMemory(epoch=10), seen(at_s, feed=workers), TO_SEARCH, SCENARIOS)


def test_the_least_busy_worker_is_assigned_under_the_next_epoch() -> None:
    moves = moved()
    assert moves.pending is not None
    assert (moves.pending.worker, moves.pending.target, moves.epoch, moves.assigned) == (
        "b",
        "search",
        11,
        {"b": "search"},
    )
    assert moves.busy(0.0, DAY)


def test_the_last_of_the_reserve_moves_and_goes_back_without_lanes() -> None:
    moves = begun(MovesMemory(epoch=10), seen(reserve=[worker("r", lanes=0)]), Move(source=RESERVE, target="feed"), [])
    assert moves.assigned == {"r": "feed"}
    gave_up = seen(20.0, reserve=[worker("r", lanes=0, given_up=11, why="no model")])
    moves, ended = followed(moves, gave_up, DAY)
    assert (ended is not None and ended.reason, moves.assigned) == ("no model", {"r": RESERVE})
    back, ended = followed(moves, seen(30.0, reserve=[worker("r", lanes=0, epoch=12)]), DAY)
    assert (back.pending, ended) == (None, None)
    away, ended = followed(back, seen(40.0, feed=[worker("r", epoch=11)]), DAY)
    assert away.pending is not None and ended is None
    _, ended = followed(away, seen(50.0, reserve=[worker("r", lanes=0, epoch=12)]), DAY)
    assert ended is not None and ended.result == "verified"


def test_a_second_move_waits() -> None:
    moves = moved()
    assert begun(moves, seen(feed=[worker("a"), worker("c")]), TO_SEARCH, SCENARIOS) is moves


def test_a_group_keeps_its_least() -> None:
    assert moved(feed=[worker("a")]).pending is None


@pytest.mark.parametrize("group", ["", "gone"])
def test_nobody_moves_from_where_nobody_is(group: str) -> None:
    moves = MovesMemory()
    assert begun(moves, seen(feed=[worker("a")]), Move(source=group, target="feed"), SCENARIOS) is moves


@pytest.mark.parametrize("arrived", [{"epoch": 11}, {"epoch": 12, "lanes": 0, "answers": 3, "scored": 1}])
def test_a_move_counts_once_the_status_says_group_and_epoch_and_it_serves(arrived: dict[str, int]) -> None:
    moves, ended = followed(moved(), seen(10.0, search=[worker("b", **arrived)]), DAY)
    assert ended is not None
    assert (ended.result, moves.pending, moves.epoch) == ("verified", None, 11)
    assert not moves.busy(10.0, DAY)


@pytest.mark.parametrize(
    "where",
    [
        {"search": [worker("b", epoch=11, lanes=0)]},
        {"search": [worker("b", epoch=10)]},
        {"search": [worker("b", epoch=11, answers=5)]},
        {"feed": [worker("b", epoch=11)]},
        {},
    ],
    ids=["no lane", "an older epoch", "no scores", "in the old group", "nowhere"],
)
def test_until_then_it_is_under_way_and_after_its_time_written_back(where: dict[str, list[WorkerSeen]]) -> None:
    moves, ended = followed(moved(), seen(DAY.arrive_s, **where), DAY)
    assert (ended, moves.epoch) == (None, 11)
    moves, ended = followed(moves, seen(DAY.arrive_s + 1, **where), DAY)
    assert ended is not None
    assert (ended.result, moves.assigned, moves.epoch, moves.pending) == ("given_up", {"b": "feed"}, 12, None)
    assert "after 181 s" in ended.reason


def test_where_a_group_has_traffic_a_worker_is_to_score_something_unless_its_lanes_have_none() -> None:
    def at(at_s: float) -> Observation:
        group = GroupSeen(workers=(worker("b", epoch=11),), per_second=5.0)
        return Observation(at_s=at_s, groups={"feed": GroupSeen(workers=(worker("a"),)), "search": group})

    moves, ended = followed(moved(), at(10.0), DAY)
    assert (ended, moves.pending) == (None, moved().pending)
    _, ended = followed(moves, at(DAY.settle_s), DAY)
    assert ended is not None
    assert ended.result == "verified"


def test_a_worker_that_gives_up_says_why_and_is_asked_last_the_next_time() -> None:
    gave_up = [worker("a", busy=0.5), worker("b", given_up=11, why="it did not drain")]
    moves, ended = followed(moved(), seen(20.0, feed=gave_up), DAY)
    assert ended is not None
    assert (ended.result, ended.reason, moves.assigned) == ("given_up", "it did not drain", {"b": "feed"})
    assert moves.busy(20.0 + DAY.settle_s - 1, DAY)
    assert not moves.busy(20.0 + DAY.settle_s, DAY)
    again = begun(moves, seen(90.0, feed=gave_up), TO_SEARCH, SCENARIOS)
    assert again.pending is not None
    assert again.pending.worker == "a"


def test_what_was_given_up_before_this_move_does_not_end_it() -> None:
    moves, ended = followed(moved(), seen(5.0, feed=[worker("b", given_up=9, why="long ago")]), DAY)
    assert ended is None
    assert moves.pending is not None


def test_who_takes_over_ends_the_move_of_the_last_leader() -> None:
    last = moved()
    here = MovesMemory().taken(last.epoch, last.assigned).taken_over(1_000_000)
    assert (here.epoch, here.pending) == (1_000_000, None)
    here, ended = followed(here, seen(5.0, feed=[worker("a"), worker("b")]), DAY)
    assert ended is None
    assert here.pending is not None
    assert (here.pending.worker, here.pending.source, here.pending.target) == ("b", "feed", "search")
    here, ended = followed(here, seen(9.0, search=[worker("b", epoch=1_000_000)]), DAY)
    assert ended is not None
    assert ended.result == "verified"


def test_epochs_of_who_takes_over_are_above_all_of_the_last_even_behind_a_clock_that_was_ahead() -> None:
    assert MovesMemory(epoch=7).taken_over(5).epoch == 8
    assert MovesMemory(epoch=7).taken(7, {"x": "feed"}).assigned == {}
    assert MovesMemory(epoch=7).taken(8, {"x": "feed"}).assigned == {"x": "feed"}


def test_an_assignment_of_a_worker_that_never_comes_back_is_dropped() -> None:
    moves, _ = followed(moved(), seen(10.0, search=[worker("b", epoch=11)]), DAY)
    moves, _ = followed(moves, seen(ABSENT_S), DAY)
    assert moves.assigned == {"b": "search"}
    moves, _ = followed(moves, seen(ABSENT_S + 11.0), DAY)
    assert moves.assigned == {}


# ---- any fleet, any faults ----


@dataclass
class Process:
    """A worker: where it serves, and what it will do with the next order: obey after so many looks, give up (-1), or
    ignore it (None)."""

    name: str
    scenario: str
    fate: int | None = 0
    epoch: int = 0
    given_up: int = 0
    alive: bool = True
    left: int | None = None  # looks until it arrives; None: it does not move
    target: str = ""

    def status(self) -> WorkerSeen:
        return WorkerSeen(name=self.name, lanes=1, epoch=self.epoch, given_up=self.given_up, why="full")


@dataclass
class Fleet:
    """Workers, the log of assignments, and the planners, of which the last one leads."""

    workers: list[Process]
    log: tuple[int, dict[str, str]] = (0, {})
    moves: MovesMemory = field(default_factory=MovesMemory)
    now: float = 0.0
    ended: list[EndedMove] = field(default_factory=list)
    begun: int = 0
    lost: int = 0  # moves whose planner died
    former: MovesMemory = field(default_factory=MovesMemory)  # of a planner that led before

    def look(self) -> Observation:
        groups: dict[str, list[WorkerSeen]] = {name: [] for name in NAMES}
        for each in self.workers:
            if each.alive and each.left is None:
                groups[each.scenario].append(each.status())
        return seen(self.now, **groups)

    def publish(self, epoch: int, assigned: dict[str, str]) -> None:
        if epoch >= self.log[0]:
            self.log = epoch, assigned

    def obey(self) -> None:
        """Each worker does its next step."""
        epoch, assigned = self.log
        for each in self.workers:
            target = assigned.get(each.name, each.scenario)
            if not each.alive or each.fate is None:
                continue
            if each.left is not None:
                each.left -= 1
                if each.left < 0:
                    each.scenario, each.left = each.target, None
            elif epoch > each.epoch:
                if target == each.scenario:
                    each.epoch = epoch
                elif each.fate < 0:
                    each.given_up = each.epoch = epoch
                else:
                    each.epoch, each.target, each.left = epoch, target, each.fate

    def turn(self, move: Move | None) -> None:
        """What the leader does in a period."""
        observation = self.look()
        before = self.moves
        self.moves, ended = followed(before, observation, DAY)
        if ended is not None:
            self.ended.append(ended)
            back = ended.result == "given_up"
            assert not back or ended.move.found or self.moves.assigned[ended.move.worker] == ended.move.source
            assert self.moves.epoch <= before.epoch + back
        if move is not None and not self.moves.busy(self.now, DAY):
            after = begun(self.moves, observation, move, SCENARIOS)
            if after is not self.moves:
                self.begun += 1
                least = next(each.min_workers for each in SCENARIOS if each.name == move.source)
                assert len(observation.groups[move.source].workers) - 1 >= least
            self.moves = after
        changed = {
            name
            for name in before.assigned.keys() | self.moves.assigned.keys()
            if before.assigned.get(name) != self.moves.assigned.get(name)
        }
        assert len(changed) <= 2, "one is written back, and one is assigned"
        self.publish(self.moves.epoch, dict(self.moves.assigned))
        self.obey()
        self.now += PERIOD_S

    def take_over(self) -> None:
        """The leader dies, and another planner leads."""
        self.lost += self.moves.pending is not None
        self.former = self.moves
        self.moves = MovesMemory().taken(*self.log).taken_over(int(self.now * 1e3))

    def late(self) -> None:
        """The former leader, who does not know it yet, writes once more: each worker elsewhere."""
        assigned = {name: next(each for each in NAMES if each != to) for name, to in self.former.assigned.items()}
        self.publish(self.former.epoch + 1, assigned)


fates = st.sampled_from([None, -1, 0, 5, 25])  # the last takes more than arrive_s
orders = st.sampled_from([Move(source="feed", target="search"), Move(source="search", target="feed")])
moves = orders.map(lambda move: ("move", move))
events = st.one_of(
    moves,
    moves,
    st.tuples(st.just("fate"), st.tuples(st.integers(0, 4), fates)),
    st.tuples(st.just("death"), st.integers(0, 4)),
    st.tuples(st.just("start"), st.integers(0, 4)),
    st.just(("takeover", None)),
    st.just(("late", None)),
    st.just(("nothing", None)),
)


@given(
    homes=st.lists(st.sampled_from(NAMES), min_size=5, max_size=5),
    will=st.lists(fates, min_size=5, max_size=5),
    happens=st.lists(events, max_size=60),
)
@example(
    homes=["feed"] * 5,
    will=[5, None, None, None, None],
    happens=[("move", TO_SEARCH), ("takeover", None), ("fate", (0, None))],
)
@example(homes=["feed"] * 5, will=[25] * 5, happens=[("move", TO_SEARCH)])  # and never comes back in time either
def test_whatever_happens_each_assignment_ends_verified_or_written_back(
    homes: list[str], will: list[int | None], happens: list[tuple[str, Any]]
) -> None:
    fleet = Fleet([Process(f"w{index}", *each) for index, each in enumerate(zip(homes, will, strict=True))])
    led = False  # a late record counts only against who has led since
    for what, of in happens:
        if what == "fate":
            fleet.workers[of[0]].fate = of[1]
        elif what == "death":
            fleet.workers[of].alive = False
        elif what == "start":  # as it is assigned, or where it was
            each = fleet.workers[of]
            assigned = fleet.log[1].get(each.name, homes[of])
            fleet.workers[of] = replace(each, alive=True, scenario=assigned, epoch=fleet.log[0], left=None)
        elif what == "takeover":
            fleet.take_over()
        elif what == "late" and led:
            before = fleet.log
            fleet.late()
            assert fleet.log == before
        fleet.turn(of if what == "move" else None)
        led = led or what == "takeover"
    for _ in range(10 * int(DAY.arrive_s / PERIOD_S)):
        fleet.turn(None)
    assert fleet.moves.pending is None
    for each in fleet.workers:
        if each.left is not None:  # it hangs on its way, and serves nobody: it is to go where it is assigned
            each.fate = 0
    for _ in range(10 * int(DAY.arrive_s / PERIOD_S)):
        fleet.turn(None)
    assert fleet.moves.pending is None
    for each in fleet.workers:
        if each.alive:
            assert fleet.log[1].get(each.name, each.scenario) == each.scenario
    assert len(fleet.ended) >= fleet.begun - fleet.lost
