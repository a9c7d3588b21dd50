"""`relaygr bench slo` as a whole: run, assemble, print, write."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console

from relaygr_stream.lab.bench.assemble import assemble
from relaygr_stream.lab.bench.options import SloOptions
from relaygr_stream.lab.bench.page import render_page
from relaygr_stream.lab.bench.progress import Progress
from relaygr_stream.lab.bench.run import Bench
from relaygr_stream.lab.bench.table import render_table
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.printable import SafeConsole

#: Columns in a file or a pipe: the table of several repeats needs so many, or it loses figures.
FILE_WIDTH: Final = 118


async def run_slo(options: SloOptions, settings: Settings, command: str, console: Console | None = None) -> bool:
    """Measure, print and write the reports; returns whether every target was met. Raises RelayError."""
    console = console or SafeConsole(width=None if sys.stdout.isatty() else FILE_WIDTH)
    with Progress(console) as progress:
        bench = Bench(options, settings, progress)
        await bench.run()
    report = assemble(bench, command)
    console.print(render_table(report))
    json, page = options.out / "report.json", options.out / "report.html"
    json.write_bytes(report.json())
    page.write_text(render_page(report), encoding="utf-8")
    console.print(f"report: {page}, {json}", soft_wrap=True)
    return not report.missed
