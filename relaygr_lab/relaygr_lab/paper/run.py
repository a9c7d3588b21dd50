"""Runs `relaygr bench paper`: simulations on all cores, then a fleet for each measured setup, on one broker."""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from relaygr_lab.bench.broker_warm_up import warm_cluster
from relaygr_lab.bench.lengths import ROWS, costs_named, grid_length
from relaygr_lab.bench.modes import RELAY, Mode
from relaygr_lab.bench.oracle import largest_rate
from relaygr_lab.bench.progress import Progress
from relaygr_lab.paper.measured import measure, seconds_for
from relaygr_lab.paper.plan import Curve, PaperOptions, Step, Where, steps
from relaygr_lab.paper.results import Outcome, Record
from relaygr_lab.paper.setup import Ground, Setup, factor_for
from relaygr_lab.paper.simulated import Simulation
from relaygr_lab.pools import pool_of
from relaygr_lab.simulate.calibrate import calibrate
from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_stream.errors import RelayError
from relaygr_stream.ops.stopping import signals_later
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.workload.arrivals import ArrivalLog

#: Modes that the oracle allows fewer dilated requests a second are not measured: a hundred of them take a minute.
SLOWEST: Final = 1.6
#: Nothing is simulated where the oracle allows fewer dilated requests a second.
FEWEST: Final = 0.5
#: A setup may take this multiple of the time that is expected of it: seven probes of a search.
GENEROUS: Final = 3.0
#: The longest prefix of a run may grow by so many tokens.
ROOM_TO_GROW: Final = 512
#: A fleet that did not start is started once more: six processes share two cores.
STARTS: Final = 2


class Paper:
    """One run. record: takes its outcomes, and knows those of a run that was broken off.

    emulated: what fleets run on. engine: the settings of a worker with the real engine, whose costs the run measures.
    """

    def __init__(
        self,
        options: PaperOptions,
        emulated: Ground,
        engine: Settings,
        planned: tuple[Curve, ...],
        record: Record,
        progress: Progress,
    ) -> None:
        self.options = options
        self.record = record
        self.progress = progress
        self.steps = list(steps(planned))
        lengths = (step.setup.length(emulated.costs, emulated.slo_ms) for step in self.steps if not step.setup.real)
        relay = replace(emulated.settings.relay, max_prefix_tokens=max(lengths) + ROOM_TO_GROW)
        self._emulated = emulated._replace(settings=replace(emulated.settings, relay=relay))
        self._engine = engine
        self._real: Ground | None = None  # until its costs are measured
        self.left_out: list[str] = []  # what there was no time for, and what failed
        self._oracles: dict[Hashable, float] = {}
        self._started = time.monotonic()

    @property
    def wall_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.options.budget_s - self.wall_s

    async def run(self) -> None:
        """Simulate and measure what the record lacks, as far as the time allows."""
        repeats = {"simulated": range(self.options.seeds), "fleet": range(self.options.repeats)}
        todo = [
            (repeat, Step(step.setup, modes, step.where))
            for step in self.steps
            for repeat in repeats[step.where]
            if (modes := tuple(mode for mode in step.modes if not self._known(step, mode, repeat)))
        ]
        todo.sort(key=lambda each: each[0])  # every value once before any is repeated
        simulated, measured = ([each for each in todo if each[1].where == where] for where in ("simulated", "fleet"))
        for where, some in (("simulated", simulated), ("fleet", measured)):
            if some and self.options.only not in (None, where):
                self.left_out.append(f"{where}: {len(some)} setups, left for another run")
        if self.options.only != "report" and any(step.setup.real for _, step in todo):
            try:
                self._real = Ground(await self._engine_costs(), self._engine)
            except RelayError as error:  # of a model that only the anchors need
                self.left_out.append(f"the real engine: {error}")
                simulated, measured = (
                    [each for each in some if not each[1].setup.real] for some in (simulated, measured)
                )
        if simulated and self.options.only in (None, "simulated"):
            await self._simulate(simulated)
        if measured and self.options.only in (None, "fleet"):
            await self._measure(measured)

    def oracle(self, setup: Setup, mode: Mode) -> float:
        """The oracle queue's largest rate, whatever the setup's load."""
        ground = self._ground(setup)
        costs, shape = setup.costs(ground.costs), setup.shape(ground.costs, ground.slo_ms)
        # All that it depends on: most setups and modes share one.
        key = costs, shape, setup.arrivals, mode.announce, mode.keeps, mode.route
        if key not in self._oracles:
            self._oracles[key] = largest_rate(mode, costs, shape, log=self._log(setup))
        return self._oracles[key]

    def _ground(self, setup: Setup) -> Ground:
        if not setup.real:
            return self._emulated
        assert self._real is not None
        return self._real

    async def _engine_costs(self) -> DeviceCosts:
        """The costs of the real engine on this machine: measured once a run."""
        file = self.record.engine_costs
        if not file.exists():
            self.progress.say(f"{self.wall_s:5.0f} s  measuring {self._engine.worker.device}, a minute at most …")
            length, loop = grid_length(costs_named("cpu"), self._engine.relay.slo_ms), asyncio.get_running_loop()
            # In a process of its own: this one, the client's, must stay small.
            with pool_of(1) as pool:
                with signals_later():
                    measured = loop.run_in_executor(pool, calibrate, self._engine, length, ROWS)
                costs = await measured
            partial = file.with_suffix(".part")
            partial.write_text(costs.as_toml(), encoding="utf-8")
            partial.replace(file)
        return DeviceCosts.read(file)

    def _log(self, setup: Setup) -> ArrivalLog | None:
        return self.options.arrivals if setup.arrivals else None

    def factor(self, setup: Setup) -> int:
        """Its dilation: the relay's is the largest rate of all modes. The real engine takes the time that it takes."""
        return 1 if setup.real else factor_for(self.oracle(setup, RELAY), setup.load)

    def _known(self, step: Step, mode: Mode, repeat: int) -> bool:
        return self.record.find(step.setup, mode.name, step.where, repeat) is not None

    # ---- simulated ----

    async def _simulate(self, todo: Sequence[tuple[int, Step]]) -> None:
        jobs = [(repeat, step.setup, mode) for repeat, step in todo for mode in step.modes]
        loop, done = asyncio.get_running_loop(), 0
        running: set[asyncio.Future[Outcome]] = set()
        self.progress.say(f"{self.wall_s:5.0f} s  simulating {len(jobs)} values …")
        with pool_of() as pool:
            try:
                while jobs or running:
                    while jobs and len(running) < 2 * (os.cpu_count() or 1) and self.left_s > 0:
                        job = await asyncio.to_thread(self._simulation, *jobs.pop(0))
                        if job is None:
                            continue
                        with signals_later():  # the first submission starts the processes
                            running.add(loop.run_in_executor(pool, job.run))
                    if not running:
                        if jobs:
                            self.left_out.append(f"simulated: no time was left for {len(jobs)} values")
                        break
                    over, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for one in over:
                        self.record.add(one.result())
                        done += 1
                    self.progress.live(f"simulated: {done}, {len(jobs) + len(running)} to come")
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        self.progress.say(f"{self.wall_s:5.0f} s  simulated {done} values")

    def _simulation(self, repeat: int, setup: Setup, mode: Mode) -> Simulation | None:
        """None: the oracle serves no rate, or so few requests that a thousand of them take an hour."""
        if not setup.load and self.oracle(setup, mode) < FEWEST * self.factor(setup):
            self.record.add(self._blank(setup, mode, "simulated", repeat))
            return None
        ground, known = self._ground(setup), self.record.find(setup, mode.name, "simulated")
        return Simulation(
            blank=self._blank(setup, mode, "simulated", repeat),
            mode=mode,
            ground=ground,
            seed=self.options.seed + repeat,
            most=self.oracle(setup, RELAY),
            other=None if known is None else known.rate,
            log=self._log(setup),
        )

    # ---- measured ----

    async def _measure(self, todo: Sequence[tuple[int, Step]]) -> None:
        with tempfile.TemporaryDirectory(prefix=".paper-", dir=self.options.out, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            broker = warm_cluster(self.options.broker, self._emulated.settings, folder, self.progress.say)
            async with broker as (connected, _):
                for number, (repeat, step) in enumerate(todo):
                    await self._step(number + 1, len(todo), repeat, step, connected.kafka)

    async def _step(self, number: int, of: int, repeat: int, step: Step, kafka: Kafka) -> None:
        setup, factor = step.setup, await asyncio.to_thread(self.factor, step.setup)
        ground = self._ground(setup)
        rates = {mode.name: await asyncio.to_thread(self._start, setup, mode) for mode in step.modes}
        modes = []
        for mode in step.modes:
            if not rates[mode.name]:
                self.record.add(self._blank(setup, mode, "fleet", repeat))
            elif rates[mode.name] / factor < SLOWEST:
                self.left_out.append(f"{setup.words}: {mode.name}: {rates[mode.name]:.0f}/s, too slow to measure")
            else:
                modes.append(mode)
        if not modes:
            return
        words = f"{setup.words}: {', '.join(mode.name for mode in modes)}"
        dilated = [rates[mode.name] / factor for mode in modes]
        needed_s = seconds_for(setup, self.options, dilated, factor, ground.slo_ms)
        if needed_s > self.left_s:
            self.left_out.append(f"{words}: no time was left")
            return
        self.progress.say(f"{self.wall_s:5.0f} s  {number} of {of}: {words}; time dilated {factor} times")
        blanks = [self._blank(setup, mode, "fleet", repeat) for mode in modes]
        # A search that the run's end breaks off is left to the next run; one that takes too long would not end there.
        breaks = self.left_s < GENEROUS * needed_s
        for attempt in range(1, STARTS + 1):
            prefix = f"{kafka.prefix}{repeat}.{number}.{attempt}."
            own = replace(kafka, prefix=prefix, partitions=0)
            try:
                outcomes = await measure(
                    blanks, modes, self.options, ground._replace(settings=replace(ground.settings, kafka=own)),
                    {mode.name: rates[mode.name] for mode in modes}, min(self.left_s, GENEROUS * needed_s),
                    self.progress, whole=breaks,
                )  # fmt: skip
                break
            except RelayError as error:
                self.progress.say(str(error))
                if attempt == STARTS or self.left_s < needed_s:
                    self.left_out.append(f"{words}: {' '.join(str(error).splitlines()[:2])}")
                    return
        for mode, outcome in zip(modes, outcomes, strict=True):
            if outcome is None:
                self.left_out.append(f"{setup.words}: {mode.name}: no time for the whole search, or late devices")
            else:
                self.record.add(outcome)

    def _start(self, setup: Setup, mode: Mode) -> float:
        """The rate, undilated, of the first probe: as given, or somewhat below what was simulated; 0: none will do."""
        if setup.load:
            return setup.load * self.oracle(setup, RELAY)
        simulated = self.record.find(setup, mode.name, "simulated")
        if simulated is not None and simulated.rate:
            return simulated.rate / math.sqrt(self.options.tolerance)
        return self.oracle(setup, mode) / self.options.tolerance

    def _blank(self, setup: Setup, mode: Mode, where: Where, repeat: int) -> Outcome:
        """An outcome in which nothing is found; as it is, that of a mode that by the oracle serves next to no rate."""
        return Outcome(
            setup=setup,
            mode=mode.name,
            where=where,
            repeat=repeat,
            length=setup.length(self._ground(setup).costs, self._ground(setup).slo_ms),
            factor=self.factor(setup),
            rate=None,
            failed=None,
            settled=True,
            oracle=self.oracle(setup, mode),
        )
