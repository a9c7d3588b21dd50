"""Requests that are announced and never ranked: sessions end, other stages give up."""

from __future__ import annotations

from relaygr_lab.simulate.run import run_group
from relaygr_lab.simulate.scenario import Scenario

from tests.unit.simulate.scenes import fleet_of, scenario


def _given_up(scene: Scenario) -> list[str]:
    fleet = fleet_of(scene)
    fleet.run()
    return [request.name for request in fleet.requests if not request.ranked]


def test_their_clients_cancel_them_and_nothing_stays_pinned() -> None:
    scene = scenario(unranked=0.4)
    fleet = fleet_of(scene)
    fleet.run()
    given_up = [request for request in fleet.requests if not request.ranked]
    assert 0.3 < len(given_up) / len(fleet.requests) < 0.5
    assert all(request.status is None and not request.answers for request in given_up)
    for worker in fleet.workers:
        assert worker.scheduler.signals.counters.signal_cancelled
        assert not worker.scheduler.pins.holds()


def test_a_report_counts_only_what_was_ranked() -> None:
    scene = scenario(unranked=0.4, seconds=2.0)
    story, every = (run_group(each, each.groups[0]) for each in (scene, scenario(seconds=2.0)))
    assert 0.5 < len(story.at) / len(every.at) < 0.7
    assert (story.status >= 0).all()


def test_every_policy_and_mode_sees_the_same_ones() -> None:
    relay = _given_up(scenario(unranked=0.4))
    assert relay == _given_up(scenario(unranked=0.4, policy="risk")) == _given_up(scenario(unranked=0.4, mode="cache"))
