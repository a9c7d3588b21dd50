"""Runs the searches of `relaygr bench dlrmv3`: of each mode, the largest rate that LoadGen calls VALID.

`full`, `cache` and `relay` share one pipeline of processes, `engine` runs in this one, behind it. Searches of a system
take turns, one run of LoadGen each. Every run has users of its own, whose last visits of the warm-up are served before.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from relaygr_lab.bench.broker_warm_up import warm_cluster
from relaygr_lab.bench.dilation import Fleet
from relaygr_lab.bench.modes import FULL, RELAY
from relaygr_lab.bench.pipeline import Pipeline
from relaygr_lab.bench.probe import no_collections
from relaygr_lab.bench.progress import Progress
from relaygr_lab.bench.search import Search
from relaygr_lab.cpu_times import CpuTimes
from relaygr_lab.dlrmv3.loadgen import Load, loadgen
from relaygr_lab.dlrmv3.options import Options
from relaygr_lab.dlrmv3.oracle import Floats, Work
from relaygr_lab.dlrmv3.plan import affordable, payable, search_of, slowness, why_none
from relaygr_lab.dlrmv3.report import ENGINE, Found, Run, spread
from relaygr_lab.dlrmv3.sut import LATE_SLOS, Sut, System
from relaygr_lab.dlrmv3.systems import Engine, Relay
from relaygr_lab.dlrmv3.warm_up import serve
from relaygr_lab.dlrmv3.workload import Item, Visit
from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_stream.errors import DeadlineExceeded, Overloaded
from relaygr_stream.models.loading import config_of
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Model
from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema
from relaygr_stream.wire.messages import CostModel

#: Head starts are drawn evenly between these, in seconds.
HEAD_START_S: Final = (0.02, 0.15)
#: An emulated device's time is dilated until this share of the oracle queue's rate is at most so many queries a second,
#: of 100 KB each: two cores then have time for the bus.
HEADROOM_DILATED, MOST_DILATED_QPS = 1.25, 24.0
#: The longest that a request of the warm-up may take.
FILL_TIMEOUT_S: Final = 20.0
#: Requests, one at a time, of which the costs of full inference are fitted; and of each mode, before its search.
FITTING, CALIBRATION = 20, 30


@dataclass
class Cell:
    """A mode's search."""

    name: str
    search: Search
    oracle_qps: float
    runs: list[Run] = field(default_factory=list)

    def found(self, queries: int, slo_ms: float) -> Found:
        """Its result. queries: of a run."""
        valid = [run for run in self.runs if run.valid]
        best = max(valid, key=lambda run: run.qps, default=None)
        return Found(
            mode=self.name,
            best=best,
            settled=self.search.settled,
            oracle_qps=self.oracle_qps,
            calibrated_qps=self.search.guess,
            least_qps=self.search.low,
            why=None if best else why_none(self.runs, self.search.low, queries, slo_ms),
        )


class Bench:
    """One run of the bench."""

    def __init__(self, options: Options, settings: Settings, progress: Progress) -> None:
        self.options, self.progress = options, progress
        self.settings = settings
        self.module = loadgen()
        self.queries = options.queries  # of a run; as the budget allows, once a calibration says what that is
        self._planned = False
        self._slo_ms = settings.relay.slo_ms  # undilated
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

    @property
    def test(self) -> Load:
        """A run of LoadGen, at one query a second."""
        return Load(1.0, self.queries, self._slo_ms, self.options.workload.seed + 1)

    def found(self) -> list[Found]:
        """Each mode's result so far."""
        return [cell.found(self.queries, self.test.slo_ms) for cell in self.cells]

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

    def _emulate(self, measured: DeviceCosts, folder: Path) -> None:
        """Scale a cost file to the shape of DLRMv3's model, and dilate time so that what the oracle queue carries is at
        most MOST_DILATED_QPS.
        """
        costs = self.options.shape.scale(measured)
        most = self.work(Fleet(costs, 1.0).cost_model).largest_rate(RELAY.name, self.test, self.heads_s)
        self.factor = max(1.0, math.ceil(HEADROOM_DILATED * most / MOST_DILATED_QPS))
        self.fleet = Fleet(costs, self.factor)
        self.settings = self.fleet.settings(self.settings, folder)
        self.about["device"] = f"an emulated device ({costs.source}), time dilated by {self.factor:g}"

    async def _over_the_bus(self, folder: Path) -> None:
        options = self.options
        broker = warm_cluster(options.broker, self.settings, folder, self.progress.say)
        async with broker as (settings, self.about["broker"]):
            self.progress.say("starting a trigger and a worker …")
            async with Pipeline("dlrmv3", settings, 1, folder, self.fleet) as pipeline:
                self.about.setdefault("device", pipeline.device)
                self.bytes_per_token = pipeline.bytes_per_token
                share = len(options.modes) / (len(options.modes) + options.engine)
                until = self.started + share * options.budget_s
                systems = [(mode.name, Relay(pipeline, mode)) for mode in options.modes]
                costs = self.fleet and Fleet(self.fleet.costs, 1.0).cost_model
                warm = Relay(pipeline, RELAY)
                await self._search(systems, warm, lambda: costs or pipeline.costs, until, pipeline.fresh_statuses)
                self._judged = True

    async def _engine(self) -> None:
        self.progress.say("starting an engine in this process …")
        async with Engine(self.settings) as engine:
            self.bytes_per_token = engine.bytes_per_token
            until = self.started + self.options.budget_s
            await self._search([(ENGINE, engine)], engine, lambda: engine.costs, until)

    async def _search(
        self,
        systems: Sequence[tuple[str, System]],
        warm: System,
        costs: Callable[[], CostModel],
        until: float,
        settle: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
    ) -> None:
        """Search each system's largest rate, in turns. warm: serves the warm-up. costs(): as fitted so far. settle():
        awaited before `costs`."""
        await self._fill(warm, self._round(), self.options.workload.requests[1][:FITTING])
        walls = {name: await self._calibrate(name, system, warm) for name, system in systems}
        await settle()
        work = self.work(self._fitted(costs()))
        self.progress.say(f"a request takes {work.full_ms:.1f} ms in full, {work.reused_ms:.1f} ms with prefix KV")
        slower = {name: work.slower(slowness(of, work.of_mode(name)[: len(of)])) for name, of in walls.items()}
        left_s = max(1.0, until - time.monotonic())
        self._plan(slower, left_s)
        cells = []
        for name, system in systems:
            guess = slower[name].largest_rate(name, self.test, self.heads_s)
            search = search_of(guess, self.queries, left_s / self.factor / len(systems), self.options.most_runs)
            cells.append((Cell(name, search, work.largest_rate(name, self.test, self.heads_s)), system))
        self.cells += [cell for cell, _ in cells]
        open_cells = list(cells)
        while open_cells:
            open_cells = [each for each in open_cells if await self._turn(*each, warm, until)]
            await settle()
        work = self.work(self._fitted(costs()))
        for cell, _ in cells:
            cell.oracle_qps = work.largest_rate(cell.name, self.test, self.heads_s)

    async def _calibrate(self, mode: str, system: System, warm: System) -> list[float]:
        """Milliseconds of the first measured requests, one at a time, announced where the mode announces."""
        name, visits = self._round(), self.options.workload.requests[1][:CALIBRATION]
        if mode != FULL.name:
            users = {visit.user for visit in visits}
            await self._fill(warm, name, [one for one in self.options.workload.requests[0] if one.user in users])
        walls = []
        for visit in visits:
            item, began = self._item(visit, name), time.monotonic()
            if mode == RELAY.name:
                await system.announce(item)
            try:
                await system.rank(item, FILL_TIMEOUT_S * self.factor)
                walls.append((time.monotonic() - began) * 1e3 / self.factor)
            except (DeadlineExceeded, Overloaded):
                walls.append(LATE_SLOS * self.test.slo_ms)
        return walls

    def _plan(self, slower: Mapping[str, Work], left_s: float) -> None:
        """Choose the queries of a run, the same for all modes, from what the first ones carry."""
        if not self._planned:
            rates = [work.largest_rate(name, self.test, self.heads_s) / self.factor for name, work in slower.items()]
            options, self._planned = self.options, True
            self.queries = affordable(rates, left_s, options.least_queries, options.queries)

    def _fitted(self, costs: CostModel) -> CostModel:
        """These costs; the report judges by them, unless the bus's modes were measured before."""
        if not self._judged:
            self.costs = costs
        return costs

    async def _turn(self, cell: Cell, system: System, warm: System, until: float) -> bool:
        """One run of LoadGen; False where the search is complete or there is no time left."""
        qps = payable(cell.search, self.queries, (until - time.monotonic()) / self.factor)
        if qps is None:
            return False
        name = self._round()
        if cell.name != FULL.name:
            await self._fill(warm, name, self.options.workload.requests[0])
        run = await self._run(cell.name, system, round(qps, 2), name)
        cell.search.record(qps, run.valid)
        cell.runs.append(run)
        self.progress.say(
            f"{time.monotonic() - self.started:5.0f} s  {cell.name:7} {run.qps:7.1f}/s  P99 {run.p99_ms:,.0f} ms  "
            f"hits {run.hits:.1%}  {run.verdict}"
        )
        return True

    async def _run(self, mode: str, system: System, qps: float, name: str) -> Run:
        options, visits = self.options, self.options.workload.requests[1]
        folder = options.out / f"{mode}-{qps:g}"
        folder.mkdir(parents=True, exist_ok=True)
        factor = self.factor
        test = Load(qps / factor, self.queries, self.test.slo_ms * factor, self.test.seed)
        heads = (factor * self.heads_s[: self.queries]).tolist() if mode == RELAY.name else None
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
            late=outcome.late,
            heads_ms=None if heads is None else (heads_ms[0], heads_ms[1]),
            off_ms=(off[0], off[1]),
            folder=folder.name,
            others_cores=None if before is None or after is None else after.others_since(before),
        )

    async def _fill(self, warm: System, name: str, visits: Sequence[Visit]) -> None:
        """Serve these visits: their users' prefix KV are then there."""
        self.progress.live(f"serving {len(visits)} requests of the warm-up …")
        served = await serve(warm, visits, lambda visit: self._item(visit, name), FILL_TIMEOUT_S * self.factor)
        if served < len(visits):
            self.progress.say(f"{len(visits) - served} of {len(visits)} requests of the warm-up were refused")

    def _item(self, visit: Visit, name: str, head_start_ms: float = 0.0) -> Item:
        return self.options.workload.item(visit, name, self._schema, head_start_ms)

    def _round(self) -> str:
        self._rounds += 1
        return f"r{self._rounds}"

    def work(self, costs: CostModel) -> Work:
        """Device times of the measured queries."""
        visits = self.options.workload.requests[1][: self.queries]
        return Work.of(costs, visits, self.options.workload.candidates)
