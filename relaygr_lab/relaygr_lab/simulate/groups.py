"""A day of scenarios on a few devices: one mixed pool, fixed groups, groups that the planner moves, or an oracle's.

Each scenario's group is a simulated fleet of its own (fleet.py); all are on one timeline. A device that moves gives up
its lanes, finishes what it accepted, loads the other model, and joins the other group with empty tiers: nothing is
handed over, which is worse for who moves than the real hand-over.
"""

from __future__ import annotations

import gc
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import msgspec

from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_lab.simulate.fleet import Asked, Fleet
from relaygr_lab.simulate.scenario import Group, Request, Sent
from relaygr_lab.simulate.scenario import Scenario as FleetScenario
from relaygr_lab.simulate.timeline import Timeline
from relaygr_lab.simulate.worker import SimulatedWorker
from relaygr_stream.engine.commands import Answer
from relaygr_stream.ops.planner.observing import PREFIX_MS, READY, SCORE_MS, SQUARES, works_of
from relaygr_stream.ops.planner.seen import GroupSeen, Observation, WorkerSeen
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.planner_status import Move, SharedGroup
from relaygr_stream.workload.quantiles import nearest_rank
from relaygr_stream.workload.traffic import Traffic
from relaygr_stream.workload.users import Part
from relaygr_stream.workload.visits import Arrival, arrivals

#: Lanes of a group: each number of workers up to six divides them.
LANES: Final = 60
#: Users of the n-th scenario in one pool are numbered from n times this on.
USERS: Final = 1 << 32
#: A device that gives up its lanes is looked at so often until it has finished what it accepted.
DRAIN_S: Final = 0.05


@dataclass(frozen=True)
class Surface:
    """A scenario and its traffic, whose tide is `phase` periods ahead."""

    scenario: Scenario
    traffic: Traffic
    phase: float

    def requests(self, seed: int) -> Iterator[Arrival]:
        """All its requests."""
        ahead = 0.0 if self.traffic.tide is None else self.phase * self.traffic.tide.period_s
        for each in arrivals(self.traffic, Part(0, LANES, LANES), seed):
            if each.at >= ahead:
                yield each._replace(at=each.at - ahead, rank_at=each.rank_at - ahead)


@dataclass(frozen=True)
class Day:
    """What happens. seconds: of a day; warm_s: before that. load_s: a device's change of model."""

    surfaces: tuple[Surface, ...]
    settings: Settings
    costs: DeviceCosts
    devices: int
    seconds: float
    warm_s: float
    load_s: float
    seed: int = 7

    def fleet(self, settings: Settings, traffic: Traffic, workers: int) -> FleetScenario:
        """The simulated fleet of a group of so many workers."""
        return FleetScenario(
            settings=settings, costs=self.costs, traffic=traffic, workers=workers, sample=workers,
            lanes_per_worker=LANES // workers, seconds=self.seconds, warm_s=self.warm_s, seed=self.seed,
        )  # fmt: skip


class GroupFleet(Fleet):
    """The workers of one group, which others join and leave. surfaces: whose requests they serve, by users' numbers."""

    def __init__(
        self,
        scene: FleetScenario,
        timeline: Timeline,
        requests: Iterator[Arrival],
        surfaces: Sequence[Surface],
    ) -> None:
        super().__init__(scene, Group(0, 0, scene.workers, 0), timeline, requests)
        self.members: list[SimulatedWorker] = list(self.workers)
        self._by_surface = [
            Asked.of(each.scenario.slo_ms, each.traffic.candidates, each.scenario.name if len(surfaces) > 1 else "")
            for each in surfaces
        ]
        self._joined = 0
        self.counts: dict[str, Counter[str]] = {}  # of each worker since the last look
        self.waits: list[float] = []

    def _asked(self, request: Request) -> Asked:
        return self._by_surface[request.user // USERS]

    def _reply(self, answer: Answer, now: float) -> float:
        takes_s = super()._reply(answer, now)
        sent: Sent = answer.task.origin
        owner = self.lanes[sent.lane].owner
        counts = self.counts.setdefault("" if owner is None else owner.name, Counter())
        waited_ms = (now - sent.request.rank_at) * 1e3
        counts["answers"] += 1
        if answer.status == "ok":
            counts["ok"] += 1
            self.waits.append(waited_ms)
            counts["full"] += answer.measured.outcome == "full"
        counts["late"] += answer.status != "ok" or waited_ms > self._asked(sent.request).slo_ms
        return takes_s

    def leave(self, now: float) -> SimulatedWorker:
        """The newest worker gives up its lanes."""
        worker = self.members.pop()
        self._assign([each.name for each in self.members], now)
        return worker

    def join(self, now: float) -> None:
        """A new worker, with empty tiers, gets its share of the lanes."""
        self._joined += 1
        name = f"j{self._joined}"
        self._paths[name] = self._paths[self.workers[0].name]
        worker = self._make_worker(self._make_core(name, self._joined), self._joined)
        self.workers.append(worker)
        self.members.append(worker)
        self._by_name[name] = worker
        self._owned[name] = frozenset()
        self._assign([each.name for each in self.members], now)
        self._state_every(worker, now)


#: Decides what moves, from what is seen and the time of the day (movers.py).
Mover = Callable[[Observation, float], Move | None]


@dataclass(frozen=True)
class Told:
    """Of one scenario: requests, and those answered within its SLO. hits: share of the scored that found prefix KV."""

    asked: int
    within: int
    hits: float


@dataclass(frozen=True)
class Outcome:
    """A day: by scenario, and the moves with their times. shared: the groups that a planner proposed to make one."""

    told: Mapping[str, Told]
    moves: Sequence[tuple[float, Move]]
    shared: SharedGroup | None = None

    @property
    def within(self) -> int:
        """Answers within their SLOs."""
        return sum(each.within for each in self.told.values())

    @property
    def asked(self) -> int:
        """Requests of all scenarios."""
        return sum(each.asked for each in self.told.values())


class GroupsDay:
    """A day of groups: split has the devices of each scenario; a mover is asked every period_s."""

    def __init__(self, day: Day, split: Mapping[str, int], mover: Mover | None, period_s: float) -> None:
        self._day, self._mover, self._period_s = day, mover, period_s
        self._timeline = Timeline()
        self._moving = False
        self._moves: list[tuple[float, Move]] = []
        self._totals: dict[SimulatedWorker, dict[str, float]] = {}
        self._busy: dict[SimulatedWorker, float] = {}
        self._fleets = {}
        for number, surface in enumerate(day.surfaces):
            name, slo_ms = surface.scenario.name, surface.scenario.slo_ms
            relay = msgspec.structs.replace(day.settings.relay, slo_ms=slo_ms)
            scene = day.fleet(msgspec.structs.replace(day.settings, relay=relay), surface.traffic, split[name])
            requests = surface.requests(day.seed + number)
            self._fleets[name] = GroupFleet(scene, self._timeline, requests, [surface])

    def run(self) -> Outcome:
        """Simulate it."""
        until = max(fleet.begin() for fleet in self._fleets.values())
        if self._mover is not None:
            self._timeline.at(next(iter(self._fleets.values())).start + self._period_s, self._look)
        _run(self._timeline, until + self._day.settings.client.timeout_ms / 1e3)
        for fleet in self._fleets.values():
            for worker in fleet.members:
                worker.scheduler.check_integrity()
        told = {
            surface.scenario.name: _told(self._fleets[surface.scenario.name], self._day, 0, surface.scenario.slo_ms)
            for surface in self._day.surfaces
        }
        return Outcome(told, self._moves)

    def _look(self, now: float) -> None:
        groups = {name: self._seen(fleet, now) for name, fleet in self._fleets.items()}
        assert self._mover is not None
        at_s = now - next(iter(self._fleets.values())).start - self._day.warm_s
        move = self._mover(Observation(at_s=now, groups=groups, moving=self._moving), at_s)
        if move is not None and not self._moving and len(self._fleets[move.source].members) > 1:
            self._moves.append((at_s, move))
            self._moving = True
            self._drain(self._fleets[move.source].leave(now), move, now)
        self._timeline.at(now + self._period_s, self._look)

    def _drain(self, worker: SimulatedWorker, move: Move, now: float) -> None:
        if worker.scheduler.works:
            self._timeline.at(now + DRAIN_S, partial(self._drain, worker, move))
            return
        worker.die()
        self._timeline.at(now + self._day.load_s, partial(self._join, move))

    def _join(self, move: Move, now: float) -> None:
        self._fleets[move.target].join(now)
        self._moving = False

    def _seen(self, fleet: GroupFleet, now: float) -> GroupSeen:
        """The group since the last look, as observing.py reads it from statuses."""
        workers, sums = [], Counter[str]()
        for worker in fleet.members:
            totals = worker.scheduler.totals()
            before = self._totals.get(worker, {})
            told = (*PREFIX_MS, SCORE_MS, *READY, *SQUARES)
            sums.update({name: totals[name] - before.get(name, 0.0) for name in told})
            busy = worker.model.busy_until(now)
            share = min(1.0, max(0.0, busy - self._busy.get(worker, 0.0)) / self._period_s)
            self._totals[worker], self._busy[worker] = totals, busy
            counts = fleet.counts.get(worker.name, Counter())
            sums.update(counts)
            workers.append(WorkerSeen(name=worker.name, answers=counts["answers"], late=counts["late"], busy=share))
        fleet.counts.clear()
        waits, fleet.waits = fleet.waits, []
        prefixes = max(sums["ok"], sum(sums[name] for name in READY) + sums["full"])
        prefix, score = works_of(sums, prefixes, sums["ok"])
        return GroupSeen(
            workers=tuple(workers),
            per_second=sums["answers"] / self._period_s,
            prefix_ms=prefix.mean_ms,
            score_ms=score.mean_ms,
            prefix_variation=prefix.variation,
            score_variation=score.variation,
            p99_ms=nearest_rank(sorted(waits), 0.99) if waits else None,
        )


def run_mixed(day: Day) -> Outcome:
    """The same requests on one pool of all devices, as with `served_by`: each ranking is due by its own scenario's SLO,
    and all scenarios get equal parts."""
    streams = [_numbered(surface.requests(day.seed + number), number) for number, surface in enumerate(day.surfaces)]
    slos = [surface.scenario.slo_ms for surface in day.surfaces]
    rate = sum(surface.traffic.rate for surface in day.surfaces)
    longest = max((surface.traffic for surface in day.surfaces), key=lambda traffic: traffic.length)
    relay = msgspec.structs.replace(day.settings.relay, slo_ms=min(slos))
    scene = day.fleet(
        msgspec.structs.replace(day.settings, relay=relay), replace(longest, rate=rate, tide=None), day.devices
    )
    merged = heapq.merge(*streams, key=lambda each: each.at)
    fleet = GroupFleet(scene, Timeline(), merged, day.surfaces)
    _run(fleet.timeline, fleet.begin() + day.settings.client.timeout_ms / 1e3)
    told = {
        surface.scenario.name: _told(fleet, day, number, surface.scenario.slo_ms)
        for number, surface in enumerate(day.surfaces)
    }
    return Outcome(told, ())


def _numbered(requests: Iterator[Arrival], number: int) -> Iterator[Arrival]:
    return (each._replace(user=each.user + number * USERS) for each in requests)


def _run(timeline: Timeline, until: float) -> None:
    gc.disable()  # objects live as long as the day, so collections would find nothing
    try:
        timeline.run(until)
    finally:
        gc.enable()


def _told(fleet: Fleet, day: Day, number: int, slo_ms: float) -> Told:
    """Of the requests whose users have this number."""
    begin = fleet.start + day.warm_s
    asked = [each for each in fleet.requests if each.rank_at >= begin and each.user // USERS == number]
    scored = [each for each in asked if each.status == "ok"]
    hits = sum(each.outcome not in ("full", "truncated") for each in scored)
    within = sum(each.latency_s * 1e3 <= slo_ms for each in scored)
    return Told(len(asked), within, hits / len(scored) if scored else 0.0)
