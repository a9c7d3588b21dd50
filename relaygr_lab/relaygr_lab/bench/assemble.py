"""`relaygr bench slo`: runs the bench, makes its report, prints and writes it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console

from relaygr_lab.bench import judge
from relaygr_lab.bench.modes import RELAY
from relaygr_lab.bench.options import SloOptions
from relaygr_lab.bench.page import render_page
from relaygr_lab.bench.probe import Measured
from relaygr_lab.bench.progress import Progress
from relaygr_lab.bench.results import SloReport, Spread
from relaygr_lab.bench.run import Bench
from relaygr_lab.bench.statistics import fewest_samples, samples_for
from relaygr_lab.bench.table import render_table
from relaygr_lab.bench.wakes import chain
from relaygr_stream.errors import RelayError
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.printable import SafeConsole, print_table
from relaygr_stream.workload.report import HIT_WORDS

#: The options that the report states under `conditions.traffic`: benchmarks/simulate_slo.py simulates the same traffic.
#: UNEVEN: of these only the names of those in use are stated, and a report with one is not simulated.
TRAFFIC: Final = ("candidates", "suffix", "growth", "known", "users", "zipf", "delay", "warm_up_s")
UNEVEN: Final = ("sigma", "mix", "tide", "arrivals")


def assemble(bench: Bench, command: str, ended: str = "") -> SloReport:
    """The report of a bench that has run; ended: what ended it early. Raises RelayError if there was no time for a
    single probe."""
    if bench.world is None or not bench.measured:
        raise RelayError(f"no probe fitted into {bench.options.budget_s:g} s; give --budget more seconds")
    reached = [cell for cell in bench.cells if cell.given]
    founds = [judge.found(cell, bench.worlds) for cell in reached]
    ratios = judge.ratios(reached, bench.worlds)
    within = {id(probe) for cell in reached for probe in judge.up_to_found(cell)}
    counted = [one for one in bench.measured if one.probe.mode == RELAY.name and not one.probe.set_aside]
    relayed = [one for one in counted if id(one.probe) in within]
    bus = _bus(relayed) | {"wakes": chain([late for one in relayed for late in bench.wakes_in(one.probe)])}
    hits = {
        "admitted": sum(one.probe.admitted for one in relayed),
        "hit": sum(one.probe.admitted_hits for one in relayed),
        "announced": sum(one.probe.announced for one in relayed),
        "admitted_beyond": sum(one.probe.admitted for one in counted if id(one.probe) not in within),
        "hit_beyond": sum(one.probe.admitted_hits for one in counted if id(one.probe) not in within),
    } | {word: sum(one.probe.outcomes.get(found, 0) for one in relayed) for found, word in HIT_WORDS.items()}
    return SloReport(
        conditions=_conditions(bench, command),
        probes=[one.probe for one in bench.measured],
        found=founds,
        ratios=ratios,
        costs=msgspec.structs.asdict(bench.world.costs),
        memory=bench.memory,
        budgets=bench.budgets,
        bus=bus,
        hits=hits,
        missed=[
            *([f"the run ended early: {ended}"] if ended else []),
            *judge.missed(ratios, founds, bus, (hits["admitted"], hits["hit"])),
        ],
        wall_s=bench.clock(),
    )


def _bus(measured: Sequence[Measured]) -> dict[str, Spread]:
    into = [ms for one in measured for ms in one.bus_in]
    out = [ms for one in measured for ms in one.bus_out]
    both = [sum(pair) for pair in zip(into, out, strict=True)]
    return {"in": Spread.of(into), "out": Spread.of(out), "both": Spread.of(both)}


def _conditions(bench: Bench, command: str) -> dict[str, Any]:
    options, settings = bench.options, bench.settings
    model, worker = settings.model, settings.worker
    note = f", {bench.about['note']}" if bench.about.get("note") else ""
    samples = options.samples
    arrivals = "Poisson arrivals" if options.arrivals is None else f"times of {options.arrivals.describe()}"
    shape = f"HSTU, {model.layers} layers, D {model.dim}, {model.heads} heads of {model.dqk}, random weights"
    device = bench.about.get("device", worker.device)
    words = {
        "model": f"{model.factory or model.checkpoint or shape}, {worker.dtype}{note}",
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {platform.system()}; {options.workers} "
        f"worker(s) on {device}, {worker.threads} thread(s) an operator",
        "memory": f"a worker has {worker.hbm_bytes >> 20:,} MiB HBM tier, {worker.dram_bytes >> 20:,} MiB DRAM tier",
        "broker": bench.about["broker"],
        "traffic": f"open loop, {arrivals}; {options.candidates} candidates, {options.suffix} suffix behaviours; "
        f"a return brings {options.growth:g} new behaviours; {options.delay.describe()}",
        "statistics": f"a probe judges about {samples} requests ({fewest_samples()} is the fewest that have a P99; "
        f"{samples_for(0.95)}, all good, would show it with 95 % confidence) after {options.warm_up_s:g} s of warm-up; "
        f"latencies count from the scheduled send time; values to within {options.tolerance - 1:.0%}; "
        f"{options.repeats} repeat(s)",
        "disturbance": _disturbance(bench),
        **({"overload": "; ".join(bench.overloaded)} if bench.overloaded else {}),
        "command": command,
    }
    return {
        "words": words,
        "slo_ms": settings.relay.slo_ms,
        "preset": options.preset,
        "length": bench.length,
        "workers": options.workers,
        "traffic": {name: getattr(options, name) for name in TRAFFIC}
        | {"uneven": [name for name in UNEVEN if getattr(options, name)]},
        "settings": msgspec.to_builtins(
            {name: getattr(settings, name) for name in ("relay", "trigger", "worker", "model")}
        ),
    }


def _disturbance(bench: Bench) -> str:
    """The influence of other processes on the run, as text."""
    known = [one.probe for one in bench.measured if one.probe.others_cores is not None]
    if not known:
        return "the CPU time of other processes is unknown on this system"
    aside = sum(probe.set_aside for probe in known)
    counted = [probe.others_cores or 0.0 for probe in known if not probe.set_aside]
    return (
        f"other processes used {sum(counted) / max(1, len(counted)):.2f} CPU cores on average over the probes that "
        f"count, {max(counted, default=0.0):.2f} at most; {aside} of {len(known)} probes were set aside and repeated "
        f"because of them, or because the machine stood still"
    )


async def run_slo(options: SloOptions, settings: Settings, command: str, console: Console | None = None) -> bool:
    """Measure, write the reports and print; returns whether every target was met. Raises RelayError.

    A run that ends early writes what it measured into files of other names, so that no whole report is lost.
    """
    console = console or SafeConsole()
    with Progress(console) as progress:
        bench = Bench(options, settings, progress)
        try:
            await bench.run()
        except BaseException as error:
            if bench.measured:
                written = _write(assemble(bench, command, str(error) or "stopped"), options.out, "partial")
                progress.say(f"report of what was measured: {written}")
            raise
    report = assemble(bench, command)
    written = _write(report, options.out, "report")
    print_table(render_table(report), console)
    console.print(f"report: {written}", soft_wrap=True)
    return not report.missed


def _write(report: SloReport, folder: Path, name: str) -> str:
    """Its page and its JSON; the JSON first, which is all of it."""
    page, json = folder / f"{name}.html", folder / f"{name}.json"
    json.write_bytes(report.json())
    page.write_text(render_page(report), encoding="utf-8")
    return f"{page}, {json}"
