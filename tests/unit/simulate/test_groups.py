"""Groups of workers on one timeline: what moves between them loses nothing."""

from __future__ import annotations

import dataclasses

import pytest
from relaygr_lab.simulate import groups
from relaygr_lab.simulate.groups import LANES, Day, GroupsDay, Mover, Surface, run_mixed
from relaygr_lab.simulate.movers import foreseen

from relaygr_stream.engine.commands import Answer
from relaygr_stream.ops.planner.seen import GroupSeen, Observation, WorkerSeen
from relaygr_stream.settings.load import load_settings
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.wire.planner_status import Move
from relaygr_stream.workload.traffic import Tide, Traffic
from tests.unit.simulate.scenes import COSTS, SETTINGS

FEED, SEARCH = Scenario(name="feed", slo_ms=40.0), Scenario(name="search", slo_ms=20.0)


def day(*, swing: float = 0.0) -> Day:
    tide = Tide(swing, 4.0) if swing else None
    surfaces = tuple(
        Surface(
            scenario,
            Traffic(rate=10.0, users=1000, length=length, max_prefix=1024, return_s=1.0, candidates=20, tide=tide),
            phase,
        )
        for scenario, length, phase in ((FEED, 512.0, 0.0), (SEARCH, 64.0, 0.5))
    )
    settings = load_settings([], SETTINGS).settings
    return Day(surfaces, settings, COSTS, devices=3, seconds=2.5, warm_s=0.5, load_s=0.3)


def at(seconds: float, source: str, target: str) -> Mover:
    """One move, at that time."""
    made: list[Move] = []

    def move(seen: Observation, at_s: float) -> Move | None:
        if at_s < seconds or made:
            return None
        made.append(Move(source=source, target=target))
        return made[0]

    return move


def test_a_worker_that_moves_leaves_no_lane_and_no_request_behind() -> None:
    run = GroupsDay(day(), {"feed": 2, "search": 1}, at(0.5, "feed", "search"), 0.5)
    outcome = run.run()
    assert [move.target for _, move in outcome.moves] == ["search"]
    for name, members in (("feed", 1), ("search", 2)):
        fleet = run._fleets[name]
        assert len(fleet.members) == members
        owners = {lane.owner for lane in fleet.lanes}
        assert owners == set(fleet.members)
        assert len(fleet.lanes) == LANES
        asked = [request for request in fleet.requests if request.rank_at >= fleet.start]
        assert {request.status for request in asked} == {"ok"}
    assert outcome.asked > 30
    assert (
        outcome.within >= 0.9 * outcome.asked
    )  # the new owner of its lanes knows nobody, so some are inferred in full


def test_the_last_worker_of_a_group_does_not_leave() -> None:
    run = GroupsDay(day(), {"feed": 2, "search": 1}, at(0.5, "search", "feed"), 0.5)
    assert run.run().moves == []
    assert [len(fleet.members) for fleet in run._fleets.values()] == [2, 1]


def test_a_pool_has_the_requests_of_all_groups_each_by_its_own_slo() -> None:
    apart, together = GroupsDay(day(), {"feed": 2, "search": 1}, None, 0.5).run(), run_mixed(day())
    assert {name: told.asked for name, told in together.told.items()} == {
        name: told.asked for name, told in apart.told.items()
    }
    assert together.within >= 0.95 * together.asked


def test_in_a_pool_each_request_has_what_its_scenario_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set()

    class Seen(groups.GroupFleet):
        def _reply(self, answer: Answer, now: float) -> float:
            asked.add((answer.task.scenario, len(answer.task.candidates)))
            return super()._reply(answer, now)

    monkeypatch.setattr(groups, "GroupFleet", Seen)
    feed, search = day().surfaces
    search = dataclasses.replace(search, traffic=dataclasses.replace(search.traffic, candidates=7))
    run_mixed(dataclasses.replace(day(), surfaces=(feed, search)))
    assert asked == {("feed", 20), ("search", 7)}


def test_tides_are_opposite() -> None:
    early = {}
    for surface in day(swing=0.9).surfaces:
        requests = surface.requests(7)
        early[surface.scenario.name] = sum(next(requests).at < 2.0 for _ in range(200))
    assert early["feed"] > 2 * early["search"]


@pytest.mark.parametrize(("at_s", "target"), [(0.0, "feed"), (2.0, "search")])
def test_an_oracle_moves_towards_the_tide(at_s: float, target: str) -> None:
    scene = dataclasses.replace(day(swing=0.9), warm_s=0.0)
    mover = foreseen(scene, {"feed": 4.0, "search": 4.0}, ahead_s=1.0)
    workers = tuple(WorkerSeen(name=f"w{index}") for index in range(3))
    seen = Observation(at_s=at_s, groups={"feed": GroupSeen(workers=workers), "search": GroupSeen(workers=workers)})
    found = mover(seen, at_s)
    assert found is not None
    assert found.target == target
