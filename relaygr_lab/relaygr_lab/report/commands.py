"""Runs `relaygr bench slo` and `relaygr bench paper`, prints their reports and writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from relaygr_lab.bench.lengths import costs_named
from relaygr_lab.bench.options import SloOptions
from relaygr_lab.bench.progress import Progress
from relaygr_lab.bench.run import Bench
from relaygr_lab.paper.plan import PaperOptions, curves
from relaygr_lab.paper.results import Record
from relaygr_lab.paper.run import Paper
from relaygr_lab.paper.setup import Ground
from relaygr_lab.report import conditions, paper, slo
from relaygr_lab.report.blocks import Block, page, render
from relaygr_lab.report.judge import below
from relaygr_lab.report.make import paper_report, slo_report
from relaygr_lab.report.paper_charts import write_charts
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.printable import SafeConsole, print_table


async def run_slo(options: SloOptions, settings: Settings, command: str, console: Console | None = None) -> list[str]:
    """Measure, write the reports and print; returns the bounds not kept. Raises RelayError.

    A run that ends early writes what it measured into files of other names, so that no whole report is lost.
    """
    console = console or SafeConsole()
    with Progress(console) as progress:
        bench = Bench(options, settings, progress)
        try:
            await bench.run()
        except BaseException as error:
            if bench.measured:
                partial = slo_report(bench, command, str(error) or "stopped")
                written = write(partial, "relaygr bench slo", slo.blocks(partial), options.out, "partial")
                progress.say(f"report of what was measured: {written}")
            raise
    report = slo_report(bench, command)
    blocks = slo.blocks(report)
    written = write(report, "relaygr bench slo", blocks, options.out)
    print_table(render(blocks), console)
    console.print(f"report: {written}", soft_wrap=True)
    return below(report.verdicts)


async def run_paper(options: PaperOptions, settings: Settings, engine: Settings, command: str) -> list[str]:
    """Measure and simulate, write the reports and print. settings: of fleets. engine: of the real engine.

    Returns the bounds not kept, and but for a quick run those not measured. Raises RelayError.
    """
    console = SafeConsole()
    costs = costs_named(options.costs)
    planned = curves(options.quick, options.arrivals)
    fixed = conditions.fixed(options, settings, costs)
    record = Record(options.out, fixed, only_read=options.only == "report")
    if record.outcomes:
        console.print(f"going on with {options.out}: {len(record.outcomes)} outcomes are there")
    if record.unreadable:
        console.print(f"{record.unreadable} lines of its outcomes cannot be read: these values are lacking")
    with Progress(console) as progress:
        run = Paper(options, Ground(costs, settings), engine, planned, record, progress)
        await run.run()
    words = conditions.of_paper(options, settings, costs, command, record)
    report = paper_report(record.outcomes, planned, words, run.left_out, run.wall_s)
    blocks = paper.blocks(report, planned)
    print_table(render(blocks), console)
    written = write(report, "relaygr bench paper", blocks, options.out)
    write_charts(report, planned, options.out / "charts")
    console.print(f"report: {written}", soft_wrap=True)
    if report.complete:
        record.finish()
    return below(report.verdicts, whole=not options.quick)


def write(report: msgspec.Struct, title: str, blocks: Sequence[Block], folder: Path, name: str = "report") -> str:
    """Its page and its JSON, whose paths are returned; the JSON first, which is all of it."""
    html, json = folder / f"{name}.html", folder / f"{name}.json"
    json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    html.write_text(page(title, blocks), encoding="utf-8")
    return f"{html}, {json}"
