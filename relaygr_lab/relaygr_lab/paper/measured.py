"""Measures a setup on one fleet, all modes of it in turns (lab/bench/run.py). Emulated devices run in dilated time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from relaygr_lab.bench.cells import Cell
from relaygr_lab.bench.dilation import Fleet
from relaygr_lab.bench.modes import Mode
from relaygr_lab.bench.options import SloOptions
from relaygr_lab.bench.progress import Progress
from relaygr_lab.bench.results import Memory, Probe
from relaygr_lab.bench.run import Bench
from relaygr_lab.bench.statistics import fewest_samples
from relaygr_lab.paper.plan import PaperOptions
from relaygr_lab.paper.results import TIERS, Outcome, summed
from relaygr_lab.paper.setup import GIB, MOST_RATE, Ground, Setup
from relaygr_stream.workload.quantiles import quantile

#: A probe's warm-up, in SLOs, and in seconds at least: a queue at 0.85 of a device's capacity settles within some
#: hundred milliseconds of its own time.
WARM_UP_SLOS: Final = 6.0
LEAST_WARM_UP_S: Final = 1.0
#: Undilated seconds that users return before the first probe: over as long, workers and triggers average their load.
SETTLE_S: Final = 1.0
#: For estimates: the start of a fleet; the end of a probe; probes of a search that begins near its end.
START_S: Final = 20.0
END_S: Final = 3.0
PROBES: Final = 2.3


def seconds_for(setup: Setup, options: PaperOptions, rates: Sequence[float], factor: int, slo_ms: float) -> float:
    """Seconds that a setup will take. rates: of its modes, dilated by this factor. slo_ms: undilated."""
    probes = 1.0 if setup.load else PROBES
    beside = _warm_up_s(factor, slo_ms) + factor * setup.delay_ms / 1e3 + END_S
    judged = [max(options.least_s, options.samples / rate) for rate in rates]
    return START_S + factor * SETTLE_S + sum(probes * (each + beside) for each in judged)


def _warm_up_s(factor: float, slo_ms: float) -> float:
    return max(LEAST_WARM_UP_S, WARM_UP_SLOS * factor * slo_ms / 1e3)


async def measure(
    blanks: Sequence[Outcome],
    modes: Sequence[Mode],
    options: PaperOptions,
    ground: Ground,
    rates: Mapping[str, float],
    budget_s: float,
    progress: Progress,
    *,
    whole: bool,
) -> list[Outcome | None]:
    """An outcome for each mode; None: no probe counts, or a search was not ended and `whole` ones are asked for.

    blanks: of the modes. rates: of the first probes, undilated. Raises RelayError.
    """
    setup, factor, slo_ms = blanks[0].setup, blanks[0].factor, ground.slo_ms
    traffic = setup.traffic(ground, factor, max(rates.values()) / factor, options.arrivals)
    shape = ("length", "suffix", "candidates", "growth", "users", "zipf", "mix", "tide", "arrivals", "delay")
    asked = SloOptions(
        preset="paper",
        workers=setup.workers,
        modes=tuple(modes),
        revisits=(setup.revisit,),
        length_revisits=(),
        every_cell=True,
        **{name: getattr(traffic, name) for name in shape},
        known=setup.known,
        hot=setup.hot,
        samples=max(fewest_samples(), options.samples),
        least_s=options.least_s,
        stages=options.stages,
        settle_s=max(SloOptions.settle_s, factor * SETTLE_S),
        warm_up_s=_warm_up_s(factor, slo_ms),
        tolerance=options.tolerance,
        repeats=1,
        budget_s=budget_s,
        seed=options.seed + blanks[0].repeat,
        out=options.out,
        starts={name: rate / factor for name, rate in rates.items()},
        most_rate=math.inf if setup.real else MOST_RATE,
        most_probes=1 if setup.load else SloOptions.most_probes,
        timeout_slos=setup.timeout,
        whole=bool(setup.load),
        shared_broker=True,
    )
    fleet = None if setup.real else Fleet(setup.costs(ground.costs), factor)
    bench = Bench(asked, setup.settings(ground.settings), progress, fleet)
    await bench.run()
    by_mode = {cell.mode.name: cell for cell in bench.cells}
    cells = {blank.mode: by_mode[blank.mode] for blank in blanks}
    return [
        None if whole and not ended(cells[blank.mode]) else _outcome(bench, cells[blank.mode], blank, rates[blank.mode])
        for blank in blanks
    ]


def ended(cell: Cell) -> bool:
    """Whether the cell's search came to its end."""
    return bool(cell.probes) and cell.next() is None


def _outcome(bench: Bench, cell: Cell, blank: Outcome, given: float) -> Outcome | None:
    if not cell.probes:
        return None
    setup, factor = blank.setup, blank.factor
    search = cell.searches[0]
    mine = [one for one in bench.measured if one.probe.mode == cell.mode.name]
    counted = [one for one in mine if (one.probe.passed or setup.load) and not one.probe.set_aside]
    both = [sum(pair) for one in counted for pair in zip(one.bus_in, one.bus_out, strict=True)]
    spread = quantile(both, 0.5), quantile(both, 0.99)
    best = max(counted, key=lambda one: one.probe.rate).probe if counted else cell.probes[-1]
    return replace(
        blank,
        rate=None if search.passed is None else search.passed * factor,
        failed=None if search.failed is None else search.failed * factor,
        settled=bool(setup.load) or search.settled,
        given=given if setup.load else None,
        p99_ms=best.p99 / factor,
        requests=best.requests,
        within=1 - best.bad / best.requests if best.requests else None,
        p99_short=None if best.p99_short is None else best.p99_short / factor,
        p99_long=None if best.p99_long is None else best.p99_long / factor,
        outcomes=summed(one.probe.outcomes for one in counted),
        decisions=summed(one.probe.decisions for one in counted),
        announced=sum(one.probe.announced for one in counted),
        busy=best.busy,
        tiers=tiers_during(best, bench.memory),
        probes=[one.probe for one in mine],
        bus_ms=[ms for ms in spread if ms is not None],
    )


def tiers_during(probe: Probe, memory: Sequence[Memory]) -> dict[str, float]:
    """The most GiB of each tier in any status of the workers while the probe ran."""
    seen = [one for one in memory if probe.started_s <= one.at_s <= probe.started_s + probe.seconds]
    return {name: max(getattr(one, name) for one in seen) / GIB for name in TIERS} if seen else {}
