"""Runs the searches of `relaygr bench paper`: a fleet for each setup, all modes of it in turns, on one broker."""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from relaygr_stream.errors import RelayError
from relaygr_stream.lab.bench.broker_warm_up import compile_broker
from relaygr_stream.lab.bench.cells import Cell
from relaygr_stream.lab.bench.dilation import Fleet
from relaygr_stream.lab.bench.modes import Mode
from relaygr_stream.lab.bench.options import SloOptions
from relaygr_stream.lab.bench.oracle import largest_rate
from relaygr_stream.lab.bench.progress import Progress
from relaygr_stream.lab.bench.run import Bench
from relaygr_stream.lab.bench.statistics import fewest_samples
from relaygr_stream.lab.demo.report import quantile
from relaygr_stream.lab.paper.plan import FIRST_SHARE, GROWTH, SUFFIX, Curve, Setup, Step, factor_for, steps
from relaygr_stream.lab.paper.results import Outcome, Record
from relaygr_stream.lab.simulate.costs import DeviceCosts
from relaygr_stream.lab.workload.items import StageDelay
from relaygr_stream.ops.brokers.distribution import LASTING_RELAY
from relaygr_stream.ops.brokers.local import local_broker
from relaygr_stream.settings.schema import Settings

#: A probe's warm-up, in SLOs, and in seconds at least: a queue at 0.85 of a device's capacity settles within some
#: hundred milliseconds of its own time.
WARM_UP_SLOS: Final = 4.0
LEAST_WARM_UP_S: Final = 1.0
#: A setup may take this multiple of its part of the time left: searches end by themselves, and the first setups, which
#: matter most, come to an end.
GENEROUS: Final = 1.5
#: The longest prefix of a run may grow by so many tokens.
ROOM_TO_GROW: Final = 512
#: Modes that the oracle allows fewer dilated requests a second are left out: a hundred of them take a minute.
SLOWEST: Final = 1.6
#: No setup begins that has less time than a fleet's start and two probes of each of two modes take.
LEAST_SETUP_S: Final = 40.0


@dataclass(frozen=True, kw_only=True)
class PaperOptions:
    """The options of one run."""

    quick: bool
    costs: str  # the cost file, as named
    broker: Literal["embedded", "kafka"]
    samples: int  # requests judged in a stage of a probe
    stages: int
    tolerance: float
    repeats: int
    budget_s: float
    seed: int
    out: Path


class Paper:
    """One run. record: takes its outcomes, and knows those of a run that was broken off."""

    def __init__(
        self,
        options: PaperOptions,
        settings: Settings,
        costs: DeviceCosts,
        planned: tuple[Curve, ...],
        record: Record,
        progress: Progress,
    ) -> None:
        self.options = options
        self.settings = settings
        self.costs = costs
        self.record = record
        self.progress = progress
        self.steps = [(repeat, step) for repeat in range(options.repeats) for step in steps(planned)]
        self.left_out: list[str] = []  # setups that there was no time for, and those whose fleet failed
        self._oracles: dict[tuple[Setup, str], float] = {}
        self._started = time.monotonic()

    @property
    def wall_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started

    async def run(self) -> None:
        """Measure what the record lacks, as far as the time allows."""
        todo = [
            (repeat, missing) for repeat, step in self.steps if (missing := self._missing(step, repeat)) is not None
        ]
        if not todo:
            return
        with tempfile.TemporaryDirectory(prefix=".paper-", dir=self.options.out, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            self.progress.say(f"starting the broker ({self.options.broker}) …")
            async with local_broker(self.options.broker, folder=folder, node=LASTING_RELAY) as broker:
                kafka = broker.kafka_settings(self.settings.kafka)
                if self.options.broker == "kafka":
                    await compile_broker(kafka, self.progress.say)
                settings = msgspec.structs.replace(self.settings, kafka=kafka)
                for number, (repeat, step) in enumerate(todo):
                    weights = [1 + len(each.modes) for _, each in todo[number:]]  # a fleet's start, and its searches
                    part = min(1.0, GENEROUS * weights[0] / sum(weights))
                    await self._step(f"{number + 1} of {len(todo)}", repeat, step, settings, part)

    def oracle(self, setup: Setup, mode: Mode) -> float:
        """The oracle queue's largest rate."""
        key = setup, mode.name
        if key not in self._oracles:
            self._oracles[key] = largest_rate(mode, self.costs, setup.shape(self.costs, self.settings.relay.slo_ms))
        return self._oracles[key]

    def _missing(self, step: Step, repeat: int) -> Step | None:
        modes = tuple(mode for mode in step.modes if not self.record.has(step.setup, mode.name, repeat))
        return Step(step.setup, modes) if modes else None

    async def _step(self, number: str, repeat: int, step: Step, settings: Settings, part: float) -> None:
        """Measure a setup. number: its own, in words. part: of the time left."""
        left = self.options.budget_s - self.wall_s
        setup, words = step.setup, f"{step.setup.words}: {', '.join(mode.name for mode in step.modes)}"
        if left < LEAST_SETUP_S:
            self.left_out.append(f"{words}: no time was left")
            return
        rates = {mode.name: await asyncio.to_thread(self.oracle, setup, mode) for mode in step.modes}
        factor = factor_for(list(rates.values()))
        measurable = tuple(mode for mode in step.modes if rates[mode.name] / factor >= SLOWEST)
        for mode in step.modes:
            if not rates[mode.name]:
                self.record.add(self._nothing(setup, mode, repeat, factor))
            elif mode not in measurable:
                self.left_out.append(
                    f"{setup.words}: {mode.name}: {rates[mode.name]:.0f}/s at most, too slow to measure"
                )
        if not measurable:
            return
        self.progress.say(f"{self.wall_s:5.0f} s  {number}: {words}; time dilated {factor} times")
        budget_s = min(left, max(LEAST_SETUP_S, part * left))
        options = self._options(setup, measurable, factor, rates, budget_s, repeat)
        kafka = msgspec.structs.replace(
            settings.kafka, prefix=f"{settings.kafka.prefix}{repeat}.{number.partition(' ')[0]}.", partitions=0
        )
        longest = max(step.setup.length(self.costs, settings.relay.slo_ms) for _, step in self.steps)
        relay = msgspec.structs.replace(settings.relay, max_prefix_tokens=longest + ROOM_TO_GROW)
        fleet = Fleet(self.costs, factor)
        bench = Bench(options, msgspec.structs.replace(settings, kafka=kafka, relay=relay), self.progress, fleet)
        try:
            await bench.run()
        except RelayError as error:
            self.left_out.append(f"{words}: {str(error).splitlines()[0]}")
            return
        for cell in bench.cells:
            if cell.probes:
                self.record.add(self._outcome(bench, cell, setup, repeat, factor, rates[cell.mode.name]))
            else:
                self.left_out.append(f"{setup.words}: {cell.mode.name}: no probe counts: no time, or late devices")

    def _options(
        self, setup: Setup, modes: tuple[Mode, ...], factor: int, rates: dict[str, float], left: float, repeat: int
    ) -> SloOptions:
        slo_s = factor * self.settings.relay.slo_ms / 1e3
        return SloOptions(
            preset="paper",
            workers=setup.workers,
            modes=modes,
            length=setup.length(self.costs, self.settings.relay.slo_ms),
            revisits=(setup.revisit,),
            length_revisits=(),
            every_cell=True,
            delay=StageDelay(factor * setup.delay_ms, 0.1),
            suffix=SUFFIX,
            candidates=setup.candidates,
            growth=GROWTH,
            known=setup.known,
            samples=max(fewest_samples(), self.options.samples),
            stages=self.options.stages,
            warm_up_s=max(LEAST_WARM_UP_S, WARM_UP_SLOS * slo_s),
            tolerance=self.options.tolerance,
            repeats=1,
            budget_s=left,
            seed=self.options.seed + repeat,
            out=self.options.out,
            starts={name: FIRST_SHARE * rate / factor for name, rate in rates.items() if rate},
            shared_broker=True,
        )

    def _nothing(self, setup: Setup, mode: Mode, repeat: int, factor: int) -> Outcome:
        """The outcome of a mode that serves no rate within the SLO, by the oracle: there is nothing to search."""
        return Outcome(
            setup=setup,
            mode=mode.name,
            repeat=repeat,
            length=setup.length(self.costs, self.settings.relay.slo_ms),
            factor=factor,
            rate=None,
            failed=None,
            settled=True,
            oracle=0.0,
            probes=[],
            bus_ms=[],
        )

    def _outcome(self, bench: Bench, cell: Cell, setup: Setup, repeat: int, factor: int, oracle: float) -> Outcome:
        search = cell.searches[0]
        mine = [one for one in bench.measured if one.probe.mode == cell.mode.name]
        passing = [one for one in mine if one.probe.passed and not one.probe.set_aside]
        both = [sum(pair) for one in passing for pair in zip(one.bus_in, one.bus_out, strict=True)]
        spread = quantile(both, 0.5), quantile(both, 0.99)
        return Outcome(
            setup=setup,
            mode=cell.mode.name,
            repeat=repeat,
            length=bench.length,
            factor=factor,
            rate=None if search.passed is None else search.passed * factor,
            failed=None if search.failed is None else search.failed * factor,
            settled=search.settled,
            oracle=oracle,
            probes=[one.probe for one in mine],
            bus_ms=[ms for ms in spread if ms is not None],
        )
