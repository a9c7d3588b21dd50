"""Runs the searches of `relaygr bench dlrmv3`: of each mode, the largest rate that LoadGen calls VALID.

`full`, `cache` and `relay` share one pipeline of processes, `engine` runs in this one, behind it. Searches of a system
take turns, one run of LoadGen each. Every run has users of its own, whose last visits of the warm-up are served before.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from relaygr_lab.bench.broker_warm_up import compile_broker
from relaygr_lab.bench.dilation import Fleet
from relaygr_lab.bench.modes import FULL, RELAY, Mode
from relaygr_lab.bench.pipeline import Pipeline
from relaygr_lab.bench.probe import no_collections
from relaygr_lab.bench.progress import Progress
from relaygr_lab.bench.search import Search
from relaygr_lab.cpu_times import CpuTimes
from relaygr_lab.dlrmv3.loadgen import Load, Sut, System, allowed_late, loadgen
from relaygr_lab.dlrmv3.model import Shape
from relaygr_lab.dlrmv3.oracle import Floats, Work
from relaygr_lab.dlrmv3.report import ENGINE, Found, Run, spread
from relaygr_lab.dlrmv3.systems import Engine, Relay
from relaygr_lab.dlrmv3.workload import Item, Visit, Workload
from relaygr_lab.processes import cluster
from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_stream.errors import ConfigError, DeadlineExceeded, Overloaded
from relaygr_stream.models.loading import config_of
from relaygr_stream.ops.brokers.distribution import LASTING_RELAY
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Model
from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema
from relaygr_stream.wire.messages import CostModel

#: The search of the largest rate: first step, and tolerance of its bracket.
STEP: Final = 1.4
TOLERANCE: Final = 1.15
#: Start of a search, as a share of the oracle queue's rate: there the bus takes no time.
GUESSED_SHARE: Final = 0.7
LEAST_QPS: Final = 0.5
#: A search ends at this multiple of the oracle queue's rate.
HEADROOM: Final = 2.0
#: Head starts are drawn evenly between these, in seconds.
HEAD_START_S: Final = (0.02, 0.15)
#: An emulated device's time is dilated until this share of the oracle queue's rate is at most so many queries a second,
#: of 100 KB each: two cores then have time for the bus.
HEADROOM_DILATED, MOST_DILATED_QPS = 1.25, 40.0
#: Requests of the warm-up at a time, and the longest that one may take.
FILLING: Final = 2
FILL_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run. Raises ConfigError for numbers out of range."""

    workload: Workload
    shape: Shape
    modes: tuple[Mode, ...]
    engine: bool
    broker: Literal["embedded", "kafka"] | None
    queries: int
    budget_s: float
    out: Path
    most_runs: int = 8  # of a search
    emulated: DeviceCosts | None = None  # of an emulated device, whose time is dilated; None: a real one

    def __post_init__(self) -> None:
        if self.emulated is not None and self.engine:
            raise ConfigError("modes: an emulated device has no engine without a bus; leave `engine` out")
        if allowed_late(self.queries) < 0:
            raise ConfigError(f"queries = {self.queries}: LoadGen calls fewer than 459 never VALID")
        if (there := len(self.workload.requests[1])) < self.queries:
            raise ConfigError(f"queries = {self.queries}: {self.workload.users} users have {there}; give more --users")


@dataclass
class Cell:
    """A mode's search."""

    name: str
    search: Search
    oracle_qps: float
    runs: list[Run] = field(default_factory=list)

    def found(self) -> Found:
        """Its result."""
        valid = [run for run in self.runs if run.valid]
        best = max(valid, key=lambda run: run.qps, default=None)
        return Found(mode=self.name, best=best, settled=self.search.settled, oracle_qps=self.oracle_qps)


class Bench:
    """One run of the bench."""

    def __init__(self, options: Options, settings: Settings, progress: Progress) -> None:
        self.options, self.progress = options, progress
        self.settings = settings
        self.module = loadgen()
        self.test = Load(1.0, options.queries, settings.relay.slo_ms, options.workload.seed + 1)
        rng = np.random.default_rng(options.workload.seed)
        self.heads_s: Floats = rng.uniform(*HEAD_START_S, options.queries)
        self.cells: list[Cell] = []
        self.about: dict[str, Any] = {}
        self.fleet: Fleet | None = None
        self.factor = 1.0  # of dilated time: of the processes' and LoadGen's, not of what is reported
        self.costs: CostModel | None = None
        self.bytes_per_token = 0
        self.started = time.monotonic()
        self._judged = False  # the costs that the report judges by are final
        self._rounds = 0
        self._schema = NO_FEATURES

    async def run(self) -> None:
        """Make the model, then search all modes, as far as the time allows."""
        options = self.options
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.out, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            if options.emulated is not None:
                self._emulate(options.emulated, folder)
            elif not self.settings.model.checkpoint:
                self.progress.say("making a model with random weights …")
                workload = options.workload
                saved = options.shape.save(workload.users, workload.seed, folder / "model")
                self.settings = msgspec.structs.replace(self.settings, model=Model(checkpoint=str(saved)))
            if self.fleet is None:
                self._schema = FeatureSchema(config_of(self.settings.model).features)
            if options.modes:
                await self._over_the_bus(folder)
            if options.engine:
                await self._engine()

    def _emulate(self, costs: DeviceCosts, folder: Path) -> None:
        """Dilate time so that what the oracle queue carries is at most MOST_DILATED_QPS."""
        most = self.work(Fleet(costs, 1.0).cost_model).largest_rate(RELAY.name, self.test, self.heads_s)
        self.factor = max(1.0, math.ceil(HEADROOM_DILATED * most / MOST_DILATED_QPS))
        self.fleet = Fleet(costs, self.factor)
        self.settings = self.fleet.settings(self.settings, folder)
        self.about["device"] = f"an emulated device ({costs.source}), time dilated by {self.factor:g}"

    async def _over_the_bus(self, folder: Path) -> None:
        options = self.options
        broker = cluster(options.broker, self.settings, folder, LASTING_RELAY, self.progress.say)
        async with broker as (settings, self.about["broker"]):
            if options.broker == "kafka":
                await compile_broker(settings.kafka, self.progress.say)
            self.progress.say("starting a trigger and a worker …")
            async with Pipeline("dlrmv3", settings, 1, folder, self.fleet) as pipeline:
                self.about.setdefault("device", pipeline.device)
                self.bytes_per_token = pipeline.bytes_per_token
                share = len(options.modes) / (len(options.modes) + options.engine)
                until = self.started + share * options.budget_s
                systems = [(mode.name, Relay(pipeline, mode)) for mode in options.modes]
                costs = self.fleet and Fleet(self.fleet.costs, 1.0).cost_model
                await self._search(systems, lambda: costs or pipeline.costs, until, pipeline.fresh_statuses)
                self._judged = True

    async def _engine(self) -> None:
        self.progress.say("starting an engine in this process …")
        async with Engine(self.settings) as engine:
            self.bytes_per_token = engine.bytes_per_token
            until = self.started + self.options.budget_s
            await self._search([(ENGINE, engine)], lambda: engine.costs, until)

    async def _search(
        self,
        systems: Sequence[tuple[str, System]],
        costs: Callable[[], CostModel],
        until: float,
        settle: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
    ) -> None:
        """Search each system's largest rate, in turns. costs(): as fitted so far. settle(): awaited before `costs`."""
        await self._fill(systems[0][1], self._round(), self.options.workload.requests[1][:20])
        await settle()
        cells, work = [], self.work(self._fitted(costs()))
        self.progress.say(f"a request takes {work.full_ms:.1f} ms in full, {work.reused_ms:.1f} ms with prefix KV")
        for name, system in systems:
            oracle = work.largest_rate(name, self.test, self.heads_s)
            high = max(2 * LEAST_QPS, HEADROOM * oracle)
            search = Search(
                max(LEAST_QPS, GUESSED_SHARE * oracle), LEAST_QPS, high, STEP, TOLERANCE, self.options.most_runs
            )
            cells.append((Cell(name, search, oracle), system))
        self.cells += [cell for cell, _ in cells]
        open_cells = list(cells)
        while open_cells:
            open_cells = [each for each in open_cells if await self._turn(*each, until)]
            await settle()
        work = self.work(self._fitted(costs()))
        for cell, _ in cells:
            cell.oracle_qps = work.largest_rate(cell.name, self.test, self.heads_s)

    def _fitted(self, costs: CostModel) -> CostModel:
        """These costs; the report judges by them, unless the bus's modes were measured before."""
        if not self._judged:
            self.costs = costs
        return costs

    async def _turn(self, cell: Cell, system: System, until: float) -> bool:
        """One run of LoadGen; False where the search is complete or there is no time left."""
        qps = cell.search.next()
        if qps is None or time.monotonic() + self.options.queries * self.factor / qps > until:
            return False
        name = self._round()
        if cell.name != FULL.name:
            await self._fill(system, name, self.options.workload.requests[0])
        run = await self._run(cell.name, system, round(qps, 2), name)
        cell.search.record(qps, run.valid)
        cell.runs.append(run)
        self.progress.say(
            f"{time.monotonic() - self.started:5.0f} s  {cell.name:7} {run.qps:7.1f}/s  P99 {run.p99_ms:,.0f} ms  "
            f"hits {run.hits:.1%}  {'VALID' if run.valid else 'INVALID'}"
        )
        return True

    async def _run(self, mode: str, system: System, qps: float, name: str) -> Run:
        options, visits = self.options, self.options.workload.requests[1]
        folder = options.out / f"{mode}-{qps:g}"
        folder.mkdir(parents=True, exist_ok=True)
        factor = self.factor
        test = Load(qps / factor, options.queries, self.test.slo_ms * factor, self.test.seed)
        heads = (factor * self.heads_s).tolist() if mode == RELAY.name else None
        sut = Sut(self.module, test, system, lambda index, head: self._item(visits[index], name, head), heads)
        self.progress.live(f"{mode}: LoadGen issues {test.queries} queries at {qps:g}/s …")
        before = CpuTimes.now()
        with no_collections():
            outcome = await sut.run(folder)
        after = CpuTimes.now()
        off = spread([ms / factor for ms in outcome.off_ms], 0.5, 0.99)
        heads_ms = spread([ms / factor for ms in outcome.heads_ms], 0.01, 0.5)
        return Run(
            mode=mode,
            qps=qps,
            queries=test.queries,
            valid=outcome.valid,
            p99_ms=outcome.p99_ms / factor,
            outcomes=dict(outcome.outcomes),
            errors=dict(outcome.errors),
            heads_ms=None if heads is None else (heads_ms[0], heads_ms[1]),
            off_ms=(off[0], off[1]),
            folder=folder.name,
            others_cores=None if before is None or after is None else after.others_since(before),
        )

    async def _fill(self, system: System, name: str, visits: Sequence[Visit]) -> None:
        """Serve these visits, some at a time: their users' prefix KV are then there."""
        self.progress.live(f"serving {len(visits)} requests of the warm-up …")
        waiting = iter(visits)

        async def serve() -> None:
            for visit in waiting:
                with suppress(DeadlineExceeded, Overloaded):  # its user has no prefix KV then
                    await system.rank(self._item(visit, name), FILL_TIMEOUT_S * self.factor)

        await asyncio.gather(*(serve() for _ in range(FILLING)))

    def _item(self, visit: Visit, name: str, head_start_ms: float = 0.0) -> Item:
        return self.options.workload.item(visit, name, self._schema, head_start_ms)

    def _round(self) -> str:
        self._rounds += 1
        return f"r{self._rounds}"

    def work(self, costs: CostModel) -> Work:
        """Device times of the measured queries."""
        visits = self.options.workload.requests[1][: self.options.queries]
        return Work.of(costs, visits, self.options.workload.candidates)
