"""A simulated fleet keeps the promises of the real one: its books are the same books."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from relaygr_lab.policies import Route
from relaygr_lab.simulate import run
from relaygr_lab.simulate.fleet import Fleet
from relaygr_lab.simulate.run import run_group, run_scenario
from relaygr_lab.simulate.scenario import Failure, Sent
from relaygr_lab.simulate.story import hit_share, late_share, latencies, percentile
from relaygr_lab.simulate.worker import SimulatedWorker

from relaygr_stream.wire.messages import HITS
from relaygr_stream.worker.forwarding import MOST_HOPS
from relaygr_stream.workload.visits import Arrival
from tests.unit.simulate.scenes import fleet_of, scenario, trace


def ran(fleet: Fleet) -> Fleet:
    fleet.run()
    return fleet


def test_a_seed_gives_the_same_story_and_another_seed_another() -> None:
    first, second, other = (trace(ran(fleet_of(scenario(seed=seed)))) for seed in (7, 7, 8))
    assert first == second
    assert len(first) > 100
    assert first != other


@pytest.mark.stack  # its processes import torch anew
def test_the_number_of_processes_changes_nothing() -> None:
    scene = scenario(workers=40, sample=22, rate=100.0, seconds=1.0, warm_s=0.5)
    assert len(scene.groups) == 2
    alone, together = run_scenario(scene, 1), run_scenario(scene, 2)
    assert alone.latency_ms.tolist() == together.latency_ms.tolist()
    assert alone.worker.tolist() == together.worker.tolist()


def test_every_request_is_answered_once_after_its_work_and_the_books_balance() -> None:
    fleet = ran(fleet_of(scenario()))
    assert Counter(request.answers for request in fleet.requests) == {1: len(fleet.requests)}
    assert {request.status for request in fleet.requests} == {"ok"}
    assert {request.reason for request in fleet.requests} >= {"admitted"}
    for worker in fleet.workers:
        worker.scheduler.check_integrity()
        assert len(worker.scheduler.rankings) == 0
    least_s = 0.5 * 0.9 / 1e3  # the constant of a score, with the least noise
    assert all(request.latency_s > least_s for request in fleet.requests)


@pytest.mark.parametrize("rate", [60.0, 900.0])
def test_budgets_hold_at_every_statement(rate: float) -> None:
    """Idle or far beyond what the devices can do."""
    scene = scenario({"trigger.delegate": "false"}, rate=rate, seconds=0.25, warm_s=0.25)
    fleet = fleet_of(scene)
    worker = scene.settings.worker
    seen = []

    def look(now: float) -> None:
        for one in fleet.workers:
            cache = one.scheduler.cache
            assert cache.hbm_used <= worker.hbm_bytes
            assert cache.dram_used <= worker.dram_bytes
            pinned = sum(cache.entry_bytes(entry) for entry in {pin.entry for pin in one.scheduler.pins._pins.values()})
            assert pinned <= worker.pinned_share * worker.hbm_bytes
            seen.append(pinned)
        fleet.timeline.at(now + 0.01, look)

    fleet.timeline.at(0.0, look)
    fleet.run()
    assert max(seen) > 0


def test_under_overload_every_request_is_answered_once_be_it_late_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scenario(rate=2000.0, seconds=0.3, warm_s=0.3)
    fleet = fleet_of(scene)
    monkeypatch.setattr(run, "Fleet", lambda *_: fleet)
    story = run_group(scene, scene.groups[0])
    assert Counter(request.answers for request in fleet.requests) == {1: len(fleet.requests)}
    assert sum(worker.scheduler.signals.counters.signal_over_footprint for worker in fleet.workers) > 0
    assert late_share(story, 40.0).value > 0.2
    assert story.busy.max() > 0.9


def test_modes_differ_as_they_should() -> None:
    stories = {mode: run_group(scenario(mode=mode), scenario().groups[0]) for mode in ("relay", "cache", "full")}
    hits = {mode: hit_share(story).value for mode, story in stories.items()}
    busy = {mode: story.busy.mean() for mode, story in stories.items()}
    p50 = {mode: percentile(latencies(story), 0.5) for mode, story in stories.items()}
    assert hits["full"] == 0.0
    assert 0.2 < hits["cache"] < 0.8 < hits["relay"]
    assert busy["full"] > 1.3 * busy["cache"]
    assert p50["relay"] < p50["cache"] < p50["full"]


def test_a_dead_rack_is_silent_until_its_lanes_move() -> None:
    flags = {"kafka.session_timeout_ms": "1500", "client.timeout_ms": "300"}
    failure, trigger = Failure(share=0.34, at=1.0), {"max_status_age_ms": 500.0}
    scene = scenario(flags, workers=6, sample=6, rate=120.0, seconds=6.0, failure=failure, trigger=trigger)
    fleet = ran(fleet_of(scene))
    assert len(fleet.dead) == 2
    assert fleet.failed_at is not None and fleet.taken_over_at is not None
    assert 1.25 <= fleet.taken_over_at - fleet.failed_at <= 1.75
    assert fleet.moved_lanes == 8
    dead = {worker.name for worker in fleet.dead}
    cut_off = [r for r in fleet.requests if fleet.first_owners[r.lane] in dead]
    others = [r for r in fleet.requests if fleet.first_owners[r.lane] not in dead]
    assert {r.status for r in others} == {"ok"}
    outage = [r for r in cut_off if fleet.failed_at < r.rank_at < fleet.taken_over_at - 0.3]
    assert outage and all(math.isinf(r.latency_s) for r in outage)
    after = [r for r in cut_off if r.rank_at > fleet.taken_over_at + 0.5]
    assert after and all(r.status == "ok" for r in after)
    silent = [r for r in cut_off if fleet.failed_at + 0.8 < r.at < fleet.taken_over_at]
    assert silent and {r.reason for r in silent} == {"no_owner"}
    assert all(lane.owner is not None and lane.owner.alive for lane in fleet.lanes)


def test_lost_statements_cost_admissions_and_break_nothing() -> None:
    trigger = {"max_status_age_ms": 400.0}
    calm, lossy = (ran(fleet_of(scenario(trigger=trigger, status_loss=loss))) for loss in (0.0, 0.9))
    admitted = [sum(r.reason == "admitted" for r in fleet.requests) for fleet in (calm, lossy)]
    assert admitted[1] < 0.8 * admitted[0]
    assert {r.status for r in lossy.requests} == {"ok"}


def test_a_slower_bus_shows() -> None:
    from relaygr_lab.simulate.bus import BusLatency

    fast, slow = (
        run_group(scenario(bus=bus), scenario().groups[0]) for bus in (BusLatency(0.5, 0.6), BusLatency(10.0, 12.0))
    )
    difference = percentile(latencies(slow), 0.5) - percentile(latencies(fast), 0.5)
    assert 17.0 < difference < 21.0  # two ways, 9.5 ms more each


def hot_lane(lanes: list[int], rate: float, seconds: float) -> Iterator[Arrival]:
    """New users at Poisson times on these lanes."""
    rng, at = np.random.default_rng(3), 0.0
    for user in itertools.count():
        at += float(rng.exponential(1 / rate))
        if at > seconds:
            return
        yield Arrival(at, at + 0.08, user, user, lanes[int(rng.integers(len(lanes)))], 512, False, False)


class Visited(Fleet):
    """Notes which workers read each ranking."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.visits: defaultdict[str, list[str]] = defaultdict(list)

    def _ranking(self, sent: Sent, worker: SimulatedWorker, now: float) -> None:
        self.visits[sent.request.name].append(worker.name)
        super()._ranking(sent, worker, now)


@pytest.mark.parametrize("hot", [True, False])
def test_a_hot_lanes_rankings_are_forwarded_and_still_answered_once(hot: bool) -> None:
    """One lane at twice its owner's capacity beside two idle workers; or all at twice theirs, where nobody has room."""
    scored: dict[bool, float] = {}
    sent: dict[bool, float] = {}
    for forward in (True, False):
        scene = scenario({"worker.forward": str(forward).lower()}, mode="cache", seconds=3.0, warm_s=1.0)
        requests = hot_lane([0], 200.0, 3.0) if hot else hot_lane(list(range(12)), 600.0, 1.0)
        fleet = Visited(scene, scene.groups[0], requests=requests)
        fleet.run()
        assert Counter(request.answers for request in fleet.requests) == {1: len(fleet.requests)}
        assert all(len(set(way)) == len(way) <= 1 + MOST_HOPS for way in fleet.visits.values()), "never back"
        slo_s = scene.settings.relay.slo_ms / 1e3
        scored[forward] = float(np.mean([r.status == "ok" and r.latency_s <= slo_s for r in fleet.requests]))
        assert forward or not fleet.forwards
        sent[forward] = fleet.forwards["sent"] / len(fleet.requests)
        for worker in fleet.workers:
            worker.scheduler.check_integrity()
    if hot:
        assert scored[True] > 0.7
        assert scored[False] < 0.5
        assert sent[True] > 0.2
    else:
        assert sent[True] < 0.1
        assert scored[True] > scored[False] - 0.08


def test_a_prefix_that_its_owner_would_have_too_late_is_computed_by_another_worker() -> None:
    """First visits on one lane, at more than its owner can prefill: delegates take what is late."""
    hits: dict[bool, float] = {}
    for delegate in (True, False):
        given = {"trigger.delegate": str(delegate).lower(), "worker.forward": "false", "worker.hbm_bytes": "512MiB"}
        scene = scenario(given, seconds=3.0)
        fleet = Fleet(scene, scene.groups[0], requests=hot_lane([0], 150.0, 3.0))
        fleet.run()
        reasons = Counter(request.reason for request in fleet.requests)
        passed_on = [request for request in fleet.requests if request.hops == 1]
        assert (reasons["delegated"] > 0) is delegate
        assert bool(passed_on) is delegate
        assert {request.reason for request in passed_on} <= {"delegated"}
        assert Counter(request.answers for request in fleet.requests) == {1: len(fleet.requests)}
        hits[delegate] = float(np.mean([request.outcome in HITS for request in fleet.requests]))
        for worker in fleet.workers:
            worker.scheduler.check_integrity()
    assert hits[True] > hits[False] + 0.2


def test_a_ranking_waits_for_its_reload_and_no_longer() -> None:
    """Not for the next message, which may come a status interval later."""
    small = {"worker.hbm_bytes": "16MiB", "worker.dram_bytes": "256MiB"}
    scene = scenario(small, rate=10.0, mode="cache", seconds=20.0, traffic={"revisit": 0.8, "return_s": 4.0})
    slow = msgspec.structs.replace(scene.costs, reload_bytes_per_s=2e7)  # 2 MiB take 0.1 s
    fleet = fleet_of(replace(scene, costs=slow))
    fleet.run()
    reloaded = [request.latency_s for request in fleet.requests if request.outcome == "dram"]
    assert len(reloaded) > 10
    assert np.median(reloaded) < 0.13


@pytest.mark.parametrize(("route", "owners"), [("owner", True), ("lane", True), ("least", False), ("any", False)])
def test_clients_send_rankings_where_their_route_says(route: Route, owners: bool) -> None:
    scene = scenario(mode="cache", route=route, seconds=2.0)
    fleet = fleet_of(scene)
    fleet.run()
    by = Counter(request.status for request in fleet.requests)
    assert by["ok"] == len(fleet.requests)
    returned = [request for request in fleet.requests if request.returning]
    found = float(np.mean([request.outcome in HITS for request in returned]))
    # Beside its lane's owner, one of two other workers is asked; prefix KV are where they were computed.
    assert (found > 0.8) is owners


def test_a_hot_lane_has_its_share_of_the_users() -> None:
    fleet = fleet_of(scenario(hot=0.5, seconds=4.0))
    fleet.run()
    on_first = np.mean([request.lane == 0 for request in fleet.requests])
    assert on_first == pytest.approx(0.5 + 0.5 / 12, abs=0.12)


def test_a_fleet_that_forwards_is_simulated_whole_if_it_is_small() -> None:
    assert [group.size for group in scenario(workers=40, sample=40).groups] == [40]
    assert [group.size for group in scenario(workers=400, sample=40).groups] == [20, 20]
    assert len(scenario({"worker.forward": "false"}, workers=40, sample=40).groups) == 2
