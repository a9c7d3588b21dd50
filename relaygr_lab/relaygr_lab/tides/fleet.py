"""The day on real processes: a trigger for each scenario, workers with emulated devices, and clients, on one cluster.

Times of serving are `factor` times as long (bench/dilation.py), so that two cores carry it; a move takes its real time.
An emulated device's K and V have no bytes: a worker that moves hands nothing over, which is worse than the real one.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from relaygr_lab.bench.dilation import Fleet
from relaygr_lab.cpu_times import CpuTimes, disturbance
from relaygr_lab.emulate.process import MODULE
from relaygr_lab.processes import check_running, wait_until
from relaygr_lab.simulate.groups import Day, Mover
from relaygr_lab.tides.load import DayLoad
from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.assignments import write_assignments
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.errors import DecodeError, RelayError
from relaygr_stream.ops.children import Child, stop_all, write_settings
from relaygr_stream.ops.planner.seen import GroupSeen, Observation, WorkerSeen
from relaygr_stream.ops.scenarios import make_groups
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.assignments import Assignments
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.wire.planner_status import Move, read_planner
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader, worker_statuses

#: Divides by each number of workers up to four.
LANES: Final = 12
#: Longest wait for a worker that moves, and for lanes at the start.
ARRIVE_S: Final = 90.0
#: Of one pool: its longest SLO, and a slice of pre-inference as short as the tightest one needs.
POOL: Final = "pool"
SLICE: Final = 0.2


@dataclass(frozen=True)
class Moved:
    """A worker's move. began_s: by the monotonic clock. took_s: until it served there."""

    began_s: float
    took_s: float
    worker: str
    source: str
    target: str


class TidalFleet:
    """An async context: processes on a cluster, and a day's load.

    settings: of the cluster. day: undilated, as simulated; factor: of its times. split: the workers of each scenario at
    first; None: one pool of all, without scenarios. Raises RelayError.
    """

    def __init__(
        self, name: str, settings: Settings, folder: Path, day: Day, factor: float, split: Mapping[str, int] | None
    ) -> None:
        self.day, self.factor, self.split = day, factor, split
        self.load: Final = DayLoad(day, factor, pooled=split is None)
        self.counts: list[tuple[float, dict[str, int]]] = []  # serving workers of each scenario, from a time on
        self.planned: list[tuple[float, Move]] = []  # what the planner began, and when it said so
        self.verified: list[float] = []  # when of these
        self.moves: list[Moved] = []  # those that `move` made
        self.disturbed = ""  # by what, while the load ran
        self._name, self._folder = name, folder
        self.settings = self._settings_on(settings)
        self._children: dict[str, Child] = {}
        self._statuses: dict[str, WorkerStatus] = {}
        self._said = ""
        self._assigned: dict[str, str] = {}
        self._assignments: Assignments | None = None
        self._reader = StatusReader.from_settings(self.settings, load_topics(self.settings.kafka))

    def _settings_on(self, cluster: Settings) -> Settings:
        kafka = replace(cluster.kafka, partitions=LANES, prefix=f"{cluster.kafka.prefix}{self._name}.")
        slos = [each.scenario.slo_ms for each in self.day.surfaces]
        base: Settings = self.day.settings
        if self.split is None:
            relay = replace(base.relay, slo_ms=max(slos))
            base = replace(base, relay=relay, worker=replace(base.worker, max_ranking_delay_ms=SLICE * min(slos)))
        scenarios = tuple(
            replace(
                each.scenario, slo_ms=self.factor * each.scenario.slo_ms, lead_ms=self.factor * each.scenario.lead_ms
            )
            for each in self.day.surfaces
        )
        settings = Fleet(self.day.costs, self.factor).settings(base, self._folder)
        return replace(settings, kafka=kafka, tls=cluster.tls, scenarios=() if self.split is None else scenarios)

    @asynccontextmanager
    async def serving(self, *, pace: float | None = None, period_s: float = 1.0) -> AsyncIterator[None]:
        """Start it, and wait until all workers serve. pace: of a planner that acts (emulate/process.py); None: none."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._stop)
            await make_groups(self.settings, lambda _: None)
            for group in self._groups():
                topics = load_topics(group.kafka)
                tail = TopicTail(group.kafka, topics.worker_status.name, [0], "latest", self._on_statuses)
                await stack.enter_async_context(tail)
            await self._reader.prepare()
            self._start_processes()
            await asyncio.gather(*(child.wait_ready() for child in self._children.values()))
            await self._until(self._all_serve, "all workers serve")
            if pace is not None:
                topic = load_topics(self.settings.kafka).worker_status.name
                planners = TopicTail(self.settings.kafka, topic, [0], "latest", self._on_planner)
                await stack.enter_async_context(planners)
                how = ("--pace", f"{pace:g}", "--period", f"{period_s:g}")
                self._start("planner", ("planner", *how))
                await self._children["planner"].wait_ready()
            yield

    async def run(self, seconds: float, stop: asyncio.Event | None = None) -> None:
        """Send the day's requests for so long, or until stopped. Raises RelayError where a process ends."""
        before = CpuTimes.now()
        await self.load.run(self.settings, seconds, stop)
        self.disturbed = disturbance(before, CpuTimes.now())
        check_running(list(self._children.values()))

    async def move(self, worker: str, target: str) -> Moved:
        """Assign the worker to that scenario, and wait until it serves there. Raises RelayError if it does not."""
        source = self._statuses[worker].scenario or ""
        self._assigned[worker] = target
        self._assignments = Assignments.after(self._assignments, "bench", self._assigned, now_ms())
        epoch, began_s = self._assignments.epoch, time.monotonic()
        topics = load_topics(self.settings.kafka)
        async with Producer(self.settings.kafka, client_id="bench-planner") as producer:
            await write_assignments(producer, topics, self._reader, self._assignments)
        await self._until(partial(self._has_arrived, worker, target, epoch), f"{worker} serves {target}")
        moved = Moved(began_s, time.monotonic() - began_s, worker, source, target)
        self.moves.append(moved)
        return moved

    async def follow(self, mover: Mover, period_s: float) -> None:
        """Make the moves that it asks for, until cancelled; its times are undilated."""
        while True:
            await asyncio.sleep(period_s)
            at_s = (time.monotonic() - self.load.start_s) / self.factor - self.day.warm_s
            groups = {
                name: GroupSeen(workers=tuple(WorkerSeen(name=worker) for worker in self.serving_now(name)))
                for name in self.load.samples
            }
            asked = mover(Observation(at_s=max(0.0, at_s), groups=groups), at_s)
            if asked is not None:
                await self.move(self.serving_now(asked.source)[-1], asked.target)

    def serving_now(self, scenario: str) -> list[str]:
        """The names of the workers that serve it, in their order."""
        return [name for name, status in sorted(self._statuses.items()) if self._serves(status, scenario)]

    # ---- processes ----

    def _groups(self) -> list[Settings]:
        named = [self.settings.serving(each.name) for each in self.settings.scenarios]
        return named or [self.settings]

    def _start_processes(self) -> None:
        split = {"": self.day.devices} if self.split is None else self.split
        number = 0
        for scenario, workers in split.items():
            of = ("--scenario", scenario) if scenario else ()
            self._start(f"trigger-{scenario or POOL}", ("trigger", *of))
            for _ in range(workers):
                number += 1
                self._start(f"w{number}", ("worker", *of, "--set", f"worker.name=w{number}"))

    def _start(self, name: str, arguments: Sequence[str]) -> None:
        config = write_settings(self._folder / f"{self._name}.toml", self.settings)
        how = ("--config", config, "--averaging", f"{self.factor:g}", "--set", "telemetry.log_format=console")
        # A name of its own for each arm's log.
        self._children[name] = Child(f"{self._name}-{name}", (*arguments, *how), self._folder, MODULE)

    async def _stop(self) -> None:
        await stop_all(list(self._children.values()))

    # ---- what they state ----

    def _on_statuses(self, records: list[Record]) -> None:
        for status in worker_statuses(records):
            self._statuses[status.name] = status
        counts = Counter(status.scenario or "" for status in self._statuses.values() if self._serves(status))
        now = {name: counts[name] for name in (self.load.samples if self.split is not None else ("",))}
        if not self.counts or self.counts[-1][1] != now:
            self.counts.append((time.monotonic(), now))

    def _on_planner(self, records: list[Record]) -> None:
        for record in records:
            with suppress(DecodeError):
                status = read_planner(record, self._reader)
                if status is None or status.moves == self._said:
                    continue
                self._said = status.moves
                if status.moves.endswith("is verified"):
                    self.verified.append(time.monotonic())
                if status.plan.move is not None:
                    self.planned.append((time.monotonic(), status.plan.move))

    def _serves(self, status: WorkerStatus, scenario: str | None = None) -> bool:
        there = scenario is None or (status.scenario or "") == scenario
        return there and status.state == "serving" and bool(status.lanes)

    def _all_serve(self) -> bool:
        return sum(map(self._serves, self._statuses.values())) == self.day.devices

    def _has_arrived(self, worker: str, target: str, epoch: int) -> bool:
        status = self._statuses[worker]
        if status.given_up and status.given_up.epoch == epoch:
            raise RelayError(f"{worker} gave up its move to {target}: {status.given_up.reason}")
        return self._serves(status, target) and status.assigned == epoch

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        await wait_until(condition, list(self._children.values()), ARRIVE_S, lambda: f"it is not so: {what}")
