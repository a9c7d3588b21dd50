"""`relaygr bench paper`: runs the searches, makes the report, prints and writes it."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from relaygr_lab.bench.lengths import FULL_SHARE, costs_named, grid_length
from relaygr_lab.bench.progress import Progress
from relaygr_lab.bench.statistics import fewest_samples
from relaygr_lab.charts import line_file
from relaygr_lab.drawing import can_draw
from relaygr_lab.paper.drawings import drawings
from relaygr_lab.paper.plan import Curve, PaperOptions, Where, curves
from relaygr_lab.paper.report import as_json, make_report, page, render
from relaygr_lab.paper.results import Outcome, PaperReport, Record
from relaygr_lab.paper.run import Paper
from relaygr_lab.paper.setup import GRID, GROWTH, MOST_RATE, SUFFIX, Ground, Setup
from relaygr_lab.paper.simulated import BUS, REQUESTS, TOLERANCE
from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.printable import SafeConsole, print_table


async def run_paper(options: PaperOptions, settings: Settings, engine: Settings, command: str) -> bool:
    """Measure, print and write the reports. settings: of fleets. engine: of the real engine. Raises RelayError.

    Returns whether each target was met where the oracle allows it; of a quick run, whether none was missed.
    """
    console = SafeConsole()
    costs = costs_named(options.costs)
    planned = curves(options.quick, options.arrivals)
    record = Record(options.out, _fixed(options, settings, costs), only_read=options.only == "report")
    if record.outcomes:
        console.print(f"going on with {options.out}: {len(record.outcomes)} outcomes are there")
    if record.unreadable:
        console.print(f"{record.unreadable} lines of its outcomes cannot be read: these values are lacking")
    with Progress(console) as progress:
        paper = Paper(options, Ground(costs, settings), engine, planned, record, progress)
        await paper.run()
    words = _words(options, settings, costs, command, record)
    conditions = {"words": words, **_fixed(options, settings, costs)}
    report = make_report(record.outcomes, planned, conditions, paper.left_out, paper.wall_s)
    print_table(render(report), console)
    json, html = options.out / "report.json", options.out / "report.html"
    json.write_bytes(as_json(report))
    html.write_text(page(report, planned), encoding="utf-8")
    write_charts(report, planned, options.out / "charts")
    console.print(f"report: {html}, {json}", soft_wrap=True)
    if report.complete:
        record.finish()
    bad = {"missed"} if options.quick else {"missed", "not measured"}
    return not any(one.state in bad for one in report.verdicts)


def write_charts(report: PaperReport, planned: Sequence[Curve], folder: Path) -> None:
    """Each chart as a file of its own, for documents; none without matplotlib."""
    if not can_draw():
        return
    folder.mkdir(exist_ok=True)
    for curve in planned:
        for number, (_, series, x, y, _) in enumerate(drawings(curve, report.curves[curve.name])):
            if any(one.points for one in series):
                name = f"{curve.name}-{number}.svg" if number else f"{curve.name}.svg"
                (folder / name).write_text(line_file(series, x, y), encoding="utf-8")


def _fixed(options: PaperOptions, settings: Settings, costs: DeviceCosts) -> dict[str, Any]:
    """What must not change between the parts of one run."""
    sections = {name: getattr(settings, name) for name in ("relay", "trigger", "worker", "model", "client")}
    built: dict[str, Any] = msgspec.to_builtins(
        {
            "quick": options.quick,
            "broker": options.broker,
            "samples": options.samples,
            "least_s": options.least_s,
            "stages": options.stages,
            "tolerance": options.tolerance,
            "seed": options.seed,
            "arrivals": None if options.arrivals is None else options.arrivals.describe(),
            "costs": costs,
            "settings": sections,
        }
    )
    return built


def _repeats(outcomes: Sequence[Outcome], where: Where) -> str:
    """How often each value was found there, in words."""
    times = Counter((one.setup, one.mode) for one in outcomes if one.where == where).values()
    least, most = min(times, default=0), max(times, default=0)
    return f"{least}" if least == most else f"{least} to {most}"


def _words(
    options: PaperOptions, settings: Settings, costs: DeviceCosts, command: str, record: Record
) -> dict[str, str]:
    slo, usual = settings.relay.slo_ms, Setup()
    lengths = ", ".join(f"{Setup(share=share).length(costs, slo):,}" for share in GRID)
    worker, samples = settings.worker, max(fewest_samples(), options.samples)
    logged = {} if options.arrivals is None else {"arrivals": f"those of {options.arrivals.describe()}, where stated"}
    if record.engine_costs.exists():
        real = DeviceCosts.read(record.engine_costs)
        logged["the real engine"] = f"{real.source}; its unit is {grid_length(real, slo):,} tokens"
    measured, simulated = (_repeats(record.outcomes, where) for where in ("fleet", "simulated"))
    broker = "Apache Kafka" if options.broker == "kafka" else "Tansu"
    return {
        "devices": f"emulated: {costs.source}; {costs.kv.layout().bytes_per_token >> 10} KiB of K and V a token",
        "fleet": f"{usual.workers} workers unless stated, each with {worker.hbm_bytes >> 30} GiB HBM tier and "
        f"{worker.dram_bytes >> 30} GiB DRAM tier; {broker}, one node",
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {platform.system()}",
        "lengths": f"{lengths} tokens; the unit is the length whose full inference takes {FULL_SHARE:g} of the SLO",
        "SLO": f"P99 ≤ {slo:g} ms, head start {usual.delay_ms:g} ms unless stated, undilated",
        "dilation": f"all times of serving × k, so that no probe exceeds {MOST_RATE:g} requests/s; the bus is not "
        "dilated and weighs 1/k as much",
        "traffic": f"Poisson arrivals and {usual.candidates} candidates unless stated, {SUFFIX} suffix behaviours; a "
        f"return brings {GROWTH:g} new behaviours",
        "measured": f"a probe judges the requests of {options.least_s:g} s, {samples} at least; values to "
        f"within {options.tolerance - 1:.0%}; repeats of a value: {measured}; the interval is the range of the "
        "repeats, with one repeat there is none, and the bracket of the search is given",
        "simulated": f"a probe judges {REQUESTS:,} requests; values to within {TOLERANCE - 1:.0%}; median and range "
        f"of the seeds, of a value: {simulated}; one way of the bus {BUS.p50_ms:g} ms at P50, "
        f"{BUS.p99_ms:g} at P99, weighing 1/k",
        "command": command,
        **logged,
    }
