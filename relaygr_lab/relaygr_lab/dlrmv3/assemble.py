"""`relaygr bench dlrmv3`: runs the bench, makes its report, prints and writes it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from relaygr_lab.bench.progress import Progress
from relaygr_lab.dlrmv3.loadgen import allowed_late
from relaygr_lab.dlrmv3.model import ITEM_ROWS, Shape
from relaygr_lab.dlrmv3.options import Options
from relaygr_lab.dlrmv3.report import Found, Report, render
from relaygr_lab.dlrmv3.run import HEAD_START_S, Bench
from relaygr_lab.dlrmv3.sut import SUMMARY
from relaygr_lab.dlrmv3.workload import CANDIDATES, ITEMS, MEAN, USERS, Visit
from relaygr_stream.errors import RelayError
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.printable import SafeConsole, print_table


def assemble(bench: Bench, command: str) -> Report:
    """What was measured. Raises RelayError if that is nothing."""
    if bench.costs is None or not any(cell.runs for cell in bench.cells):
        raise RelayError(
            f"no run of {bench.queries} queries fitted into {bench.options.budget_s:g} s: give --budget more seconds, "
            f"or reduce --scale, --candidates or the model"
        )
    options, worker = bench.options, bench.settings.worker
    work = bench.work(bench.costs)
    visits = options.workload.requests[1][: bench.queries]
    mean = float(np.mean([visit.length for visit in visits]))
    found = bench.found()
    conditions = {
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}; one worker on "
        f"{bench.about.get('device') or worker.device}"
        + ("" if bench.fleet else f", {worker.dtype}, {worker.threads} thread(s)"),
        "broker": bench.about.get("broker", "none"),
        "memory": f"{worker.hbm_bytes >> 20:,} MiB HBM tier, {worker.dram_bytes >> 20:,} MiB DRAM tier",
        "LoadGen": f"Server scenario, {bench.queries} queries a run{_fewer(bench)}, of which VALID may have "
        f"{allowed_late(bench.queries)} late; no least duration; announced {HEAD_START_S[0] * 1e3:g} to "
        f"{HEAD_START_S[1] * 1e3:g} ms before in mode relay",
        "search": f"began at {_rates(found, 'calibrated_qps')}, went no lower than {_rates(found, 'least_qps')}",
        "other processes": f"used up to {_others(bench):.2f} cores during a run",
        "command": command,
    }
    return Report(
        conditions=conditions,
        reductions=_reductions(bench, mean, visits),
        slo_ms=bench.test.slo_ms,
        runs=[run for cell in bench.cells for run in cell.runs],
        found=found,
        costs=msgspec.structs.asdict(bench.costs),
        full_ms=work.full_ms,
        reused_ms=work.reused_ms,
        quotient=work.quotient,
        kv_user_bytes=mean * bench.bytes_per_token,
        wall_s=time.monotonic() - bench.started,
    )


def _fewer(bench: Bench) -> str:
    """Why a run has fewer queries than asked for."""
    most = bench.options.queries
    return "" if bench.queries == most else f" (the budget of {bench.options.budget_s:g} s does not pay for {most})"


def _rates(found: Sequence[Found], name: str) -> str:
    return ", ".join(f"{one.mode} {getattr(one, name):.1f}/s" for one in found)


def _others(bench: Bench) -> float:
    return max((run.others_cores or 0.0 for cell in bench.cells for run in cell.runs), default=0.0)


def _reductions(bench: Bench, mean: float, visits: Sequence[Visit]) -> dict[str, str]:
    """What is smaller than published, as text."""
    workload, shape, whole = bench.options.workload, bench.options.shape, Shape()
    published = [visit._replace(length=int(visit.length / workload.scale)) for visit in visits]
    theirs = np.mean([whole.flop(visit, CANDIDATES, reused=False) for visit in published])
    ours = np.mean([shape.flop(visit, workload.candidates, reused=False) for visit in visits])
    weights = (
        "which computes nothing: the cost file's times, scaled by arithmetic"
        if bench.fleet
        else f"random weights; an item table of {ITEM_ROWS:,} rows for {ITEMS:,} ids"
    )
    return {
        "users": f"{workload.users:,} of {USERS:,}",
        "history": f"{mean:,.0f} behaviours at the mean, {MEAN * workload.scale:g} a timestamp of {MEAN:g}",
        "candidates": f"{workload.candidates:,} of {CANDIDATES:,}",
        "model": f"{shape.layers} layers of {whole.layers}, D {shape.dim} of {whole.dim}, {weights}",
        "work of a request in full": f"{ours / 1e9:,.2f} GFLOP of {theirs / 1e9:,.0f}",
    }


async def run_dlrmv3(options: Options, settings: Settings, command: str, console: Console | None = None) -> list[str]:
    """Measure, write report.json and print; returns the bounds not kept. Raises RelayError.

    A run that ends early writes what it measured to partial.json.
    """
    console = console or SafeConsole()
    with Progress(console) as progress:
        bench = Bench(options, settings, progress)
        try:
            await bench.run()
        except BaseException:
            if any(cell.runs for cell in bench.cells):
                progress.say(f"report of what was measured: {_write(assemble(bench, command), 'partial', options.out)}")
            raise
    report = assemble(bench, command)
    written = _write(report, "report", options.out)
    print_table(render(report), console)
    valid = sum(run.valid for run in report.runs)
    console.print(
        f"report: {written}; LoadGen's summaries, {valid} VALID and {len(report.runs) - valid} INVALID: "
        f"{options.out}/MODE-RATE/{SUMMARY}",
        soft_wrap=True,
    )
    return report.broken()


def _write(report: Report, name: str, folder: Path) -> Path:
    written = folder / f"{name}.json"
    written.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return written
