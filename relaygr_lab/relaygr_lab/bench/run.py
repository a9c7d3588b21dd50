"""Runs the searches of `relaygr bench slo`.

Every repeat runs the pipelines one after the other (modes with equal worker settings share one). In a pipeline, the
searches take turns, one probe each, so that a disturbance of the machine affects all of them alike.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from relaygr_lab.bench import overload
from relaygr_lab.bench.broker_warm_up import warm_cluster
from relaygr_lab.bench.capacity import most_rate
from relaygr_lab.bench.cells import LENGTH_STEP, Cell, World
from relaygr_lab.bench.dilation import Fleet
from relaygr_lab.bench.interference import disturbance_of, is_late
from relaygr_lab.bench.modes import FULL, RELAY, Mode, apply_mode, grouped
from relaygr_lab.bench.options import SloOptions
from relaygr_lab.bench.pipeline import Pipeline, memory_over_time
from relaygr_lab.bench.populations import Populations, warm_up
from relaygr_lab.bench.probe import Judgement, Measured, run_probe
from relaygr_lab.bench.progress import Progress
from relaygr_lab.bench.results import Memory, Probe
from relaygr_lab.bench.wakes import Wakes
from relaygr_lab.cpu_times import OTHERS_CORES, CpuTimes
from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.schema import Settings

#: Rate of the first requests, as a share of the capacity by the first fit, which may be wrong by a factor of four.
WARM_UP_SHARE: Final = 0.25
LANES_PER_WORKER: Final = 2
ATTEMPTS: Final = 4
#: A probe whose judged requests came at a rate this much off the stated one says so: Poisson's are less off.
OTHER_RATE: Final = 0.25
CALM_TIMEOUT_S: Final = 10.0


class Bench:
    """One run: its cells, its probes and its results. fleet: the workers' emulated devices; None: real ones.

    With a fleet, the settings are undilated, the options' times are dilated, and the costs need no warm-up.
    """

    def __init__(self, options: SloOptions, settings: Settings, progress: Progress, fleet: Fleet | None = None) -> None:
        self.options = options
        self.fleet = fleet
        # Budgets are per lane, so few lanes are better; but every worker needs some.
        lanes = max(settings.kafka.partitions, LANES_PER_WORKER * options.workers)
        self.settings = msgspec.structs.replace(
            settings, kafka=msgspec.structs.replace(settings.kafka, partitions=lanes)
        )
        settings = self.settings
        self.progress = progress
        self.modes = list(options.modes)
        self.cells = [
            *(
                Cell(
                    "rate",
                    mode,
                    ratio,
                    options.length,
                    options.tolerance,
                    options.starts.get(mode.name),
                    options.most_probes,
                    options.most_rate,
                )
                for mode, ratio in options.rate_cells()
            ),
            *(Cell("length", mode, ratio, options.rate, options.tolerance) for mode, ratio in options.length_cells()),
        ]
        self.length = options.length  # at which rates are searched
        self.worlds: list[World] = []  # by the costs that the workers stated in turn, the latest last
        self.measured: list[Measured] = []
        self.wakes = Wakes()
        self.memory: list[Memory] = []
        self.budgets: dict[str, dict[str, int]] = {}
        self.about: dict[str, str] = {}
        self._started = time.monotonic()
        offered = options.repeats * sum(cell.mode is RELAY and cell.kind == "rate" for cell in self.cells)
        kept_s = offered * overload.seconds(options.overload, options.warm_up_s)
        self._deadline = self._started + options.budget_s - kept_s
        self.overloaded: list[str] = []  # what became of it, a line each
        self._check()

    async def run(self) -> None:
        """Run all repeats of all searches, as far as the time allows."""
        out = self.options.out
        out.mkdir(parents=True, exist_ok=True)
        # Beside the reports, so that nothing outside the user's folder remains, even after a crash.
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=out, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            broker = warm_cluster(self.options.broker, self.settings, folder, self.progress.say)
            async with self.wakes, broker as (connected, self.about["broker"]):
                settings = connected
                if self.fleet is not None:
                    settings = self.settings = self.fleet.settings(settings, folder)
                for repeat in range(self.options.repeats):
                    await self._repeat(repeat, settings, folder)

    @property
    def world(self) -> World | None:
        """The inputs of bounds and estimates with the latest costs."""
        return self.worlds[-1] if self.worlds else None

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds since the run began."""
        return lambda: time.monotonic() - self._started

    def wakes_in(self, probe: Probe) -> list[float]:
        """The delays, in milliseconds, of a process that only sleeps, during this probe."""
        since = self._started + probe.started_s
        return self.wakes.late_ms(since, since + probe.seconds)

    def _check(self) -> None:
        relay, options = self.settings.relay, self.options
        longest = relay.max_prefix_tokens - LENGTH_STEP
        if options.length > longest:
            raise ConfigError(
                f"length = {options.length}: must be at most {longest} (relay.max_prefix_tokens, less room to grow)"
            )
        if options.mix is not None and options.mix.tokens > longest:
            raise ConfigError(f"mix = …:{options.mix.tokens:g}: must be at most {longest}, as the length")
        if beyond := relay.beyond(suffix=options.suffix, candidates=options.candidates):
            raise ConfigError(beyond)

    async def _repeat(self, repeat: int, settings: Settings, folder: Path) -> None:
        for cell in self.cells:
            if cell.kind == "length":
                cell.at = self.options.rate  # or else what full inference carries in this repeat
        groups = grouped(self.modes, settings)
        shares = [sum(cell.mode in modes for cell in self.cells) for _, modes in groups]
        for number, (name, modes) in enumerate(groups):
            left = self._deadline - time.monotonic()
            rounds = self.options.repeats - repeat
            ahead = sum(shares[number:]) + (rounds - 1) * sum(shares)
            until = time.monotonic() + left * shares[number] / max(1, ahead)
            await self._block(name, modes, repeat, apply_mode(modes[0], settings), folder, until)

    async def _block(
        self, name: str, modes: Sequence[Mode], repeat: int, settings: Settings, folder: Path, until: float
    ) -> None:
        """One pipeline's searches of one repeat, in turns, until they are complete or the time is used up."""
        cells = [cell for cell in self.cells if cell.mode in modes]
        self.progress.say(
            f"repeat {repeat + 1}, starting a trigger and {self.options.workers} worker(s) for "
            f"{', '.join(mode.name for mode in modes)} …"
        )
        pipe = Pipeline(f"{name}-{repeat}", settings, self.options.workers, folder, self.fleet, modes[0].policy)
        async with pipe as pipeline:
            self.about |= {"device": pipeline.device, "note": pipeline.note}
            populations = Populations(self.options, pipeline, self.options.seed + repeat, self.progress.live)
            if self.fleet is not None:
                self.worlds = [self._world(pipeline)]
            elif self.world is None:
                await self._warm_up(pipeline, populations)
            open_cells = self._opened(cells)
            while open_cells:
                open_cells = [
                    cell for cell in open_cells if await self._turn(cell, pipeline, populations, repeat, until)
                ]
                if not any(cell.mode is FULL for cell in open_cells):
                    open_cells += self._now_given(cells)
            for cell in cells if self.options.overload else ():
                if cell.mode is RELAY and cell.kind == "rate":
                    await self._overload(cell, pipeline, populations, repeat)
            self._keep_history(pipeline, settings)

    async def _overload(self, cell: Cell, pipeline: Pipeline, populations: Populations, repeat: int) -> None:
        """Offer more than the rate that the cell's search has found."""
        self._deadline += overload.seconds(self.options.overload, self.options.warm_up_s)
        world, carried = self.world, cell.searches[-1].passed if cell.searches else None
        if carried is None:
            self.overloaded.append(overload.not_offered(cell.revisit))
            return
        assert world is not None
        slo_ms, base = self.settings.relay.slo_ms, None
        judgement = overload.judgement(slo_ms, self.options.warm_up_s)
        for load in (1.0, *self.options.overload):
            rate = load * carried
            population = await populations.get(self.length, cell.revisit, RELAY, world)
            found = await run_probe(pipeline, RELAY, population, rate, judgement, repeat=repeat, clock=self.clock)
            pipeline.check_children()
            base = base or found.probe
            self.overloaded.append(overload.line(load, found.probe, base, slo_ms))
            self.progress.say(f"{self.clock():5.0f} s  {self.overloaded[-1]}")

    def _opened(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells whose given value is known, each with a new search."""
        given = [cell for cell in cells if cell.at is not None]
        for cell in given:
            cell.begin_search(self.worlds, self._alike(cell))
        return given

    def _now_given(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells that waited for full inference's largest rate of this repeat, if there is one."""
        full = next((cell for cell in self.cells if cell.mode is FULL and cell.kind == "rate"), None)
        if full is None or full.searches[-1].passed is None:
            return []
        waiting = [cell for cell in cells if cell.at is None]
        for cell in waiting:
            cell.at = full.searches[-1].passed
        return self._opened(waiting)

    async def _warm_up(self, pipeline: Pipeline, populations: Populations) -> None:
        """Send some requests of each kind: workers fit their costs from them, for the first estimates."""
        world = self._world(pipeline)
        self.worlds.append(world)
        population = await populations.get(self.length, 0.0, FULL, world)
        rate = WARM_UP_SHARE * most_rate(FULL, world.cost(self.length, 0.0), 0.0, world.workers)
        await warm_up(pipeline.client, population, rate, self.progress.live)
        await pipeline.fresh_statuses()
        self.worlds.append(self._world(pipeline))

    async def _turn(self, cell: Cell, pipeline: Pipeline, populations: Populations, repeat: int, until: float) -> bool:
        """Run one probe of the cell; False if its search is complete or there is no time left."""
        world = self.world
        assert world is not None
        point = cell.next()
        judgement = self._judgement
        if point is None or time.monotonic() + judgement.seconds(point[1]) > until:
            return False
        length, rate = point
        population = await populations.get(length, cell.revisit, cell.mode, world)
        where = f"{cell.mode.name:10} revisit {cell.revisit:3.0%}  {length:5,} tokens  {rate:6,.1f}/s"
        for attempt in range(1, ATTEMPTS + 1):
            measured = await run_probe(
                pipeline,
                cell.mode,
                population,
                rate,
                judgement,
                repeat=repeat,
                clock=self.clock,
                progress=lambda requests, bad: self.progress.live(
                    f"{where}: {requests} requests, {bad} beyond the SLO"
                ),
            )
            pipeline.check_children()
            in_time = time.monotonic() + CALM_TIMEOUT_S + judgement.seconds(rate) <= until
            stalled_ms = max(self.wakes_in(measured.probe), default=None)
            probe = msgspec.structs.replace(measured.probe, stalled_ms=stalled_ms)
            # The brokers of a running cluster may be on this machine, and do not count as this run's processes.
            disturbance = disturbance_of(probe, private=self.options.private)
            again = attempt < ATTEMPTS and in_time and bool(disturbance)
            probe = msgspec.structs.replace(probe, set_aside=again or is_late(probe))
            self.measured.append(replace(measured, probe=probe))
            self.progress.say(f"{self.clock():5.0f} s  {where}  {_verdict(probe, disturbance)}")
            if not again:
                break
            await self._wait_for_calm()
        if is_late(probe):
            return False  # of other devices than the cost file's: no verdict, and no reason to hope for the next one
        cell.record(probe)
        self.worlds.append(self._world(pipeline))  # costs fitted under load are more accurate
        return True

    async def _wait_for_calm(self) -> None:
        """Wait until other processes are idle for a second, or for CALM_TIMEOUT_S."""
        gives_up = time.monotonic() + CALM_TIMEOUT_S
        while time.monotonic() < gives_up and (before := CpuTimes.now()) is not None:
            self.progress.live("waiting for other processes of this machine to finish …")
            await asyncio.sleep(1.0)
            after = CpuTimes.now()
            if after is None or after.others_since(before) <= OTHERS_CORES:
                return

    @property
    def _judgement(self) -> Judgement:
        options = self.options
        return Judgement(
            self.settings.relay.slo_ms,
            options.samples,
            options.least_s,
            options.warm_up_s,
            options.stages,
            options.whole,
            options.timeout_slos,
            0.0 if options.tide is None else options.tide.period_s,
        )

    def _world(self, pipeline: Pipeline) -> World:
        options, relay = self.options, self.settings.relay
        return World(
            costs=pipeline.costs,
            slo_ms=relay.slo_ms,
            workers=options.workers,
            longest=relay.max_prefix_tokens - LENGTH_STEP,
            common=options.requests(relay.max_prefix_tokens),
        )

    def _alike(self, cell: Cell) -> float | None:
        """The relay's value at the same kind and revisit ratio, as a start: other tiers change it little."""
        if not cell.mode.announce:
            return None
        alike = (other for other in self.cells if other.mode is RELAY and other is not cell)
        values = [max(o.values) for o in alike if (o.kind, o.revisit) == (cell.kind, cell.revisit) and o.values]
        return values[0] if values else None

    def _keep_history(self, pipeline: Pipeline, settings: Settings) -> None:
        self.budgets[pipeline.name] = {
            "hbm": settings.worker.hbm_bytes * self.options.workers,
            "dram": settings.worker.dram_bytes * self.options.workers,
        }
        self.memory += memory_over_time(pipeline, self._started)


def _verdict(probe: Probe, disturbance: str) -> str:
    at_least = "≥ " if probe.cut_short else ""
    kinds = "" if probe.p99_long is None else f" (short {probe.p99_short or 0:,.0f}, long {probe.p99_long:,.0f})"
    other = not probe.cut_short and abs((probe.sent or probe.rate) / probe.rate - 1) > OTHER_RATE
    sent = f", at {probe.sent:,.1f}/s" if other else ""
    sign = "✓" if probe.passed else f"– {disturbance}: again" if probe.set_aside else "✗"
    return f"P99 {at_least}{probe.p99:,.0f} ms{kinds}, {probe.bad} of {probe.requests} beyond{sent}  {sign}"
