"""`relaygr bench` on the command line."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from relaygr_lab.bench.model import with_bench_model
from relaygr_lab.bench.options import PRESETS
from relaygr_lab.cli.dlrmv3 import dlrmv3_command
from relaygr_stream.cli.options import check_cluster, head_start, parse_flags, source_options, traffic_options
from relaygr_stream.settings.files import check_writable
from relaygr_stream.settings.load import load_settings

if TYPE_CHECKING:
    from relaygr_stream.ops.brokers.local import BrokerKind
    from relaygr_stream.workload.arrivals import ArrivalLog

_broker_option = click.option(
    "--broker",
    type=click.Choice(["embedded", "kafka"]),
    help="Private broker to start: the embedded one, or Apache Kafka from KAFKA_HOME. [kafka if KAFKA_HOME is set]",
)


@click.group(name="bench")
def bench_command() -> None:
    """Measure what this machine can do."""


bench_command.add_command(dlrmv3_command)


@bench_command.command(name="slo")
@click.option("--preset", type=click.Choice(list(PRESETS)), default="quick", show_default=True, help="Precision.")
@_broker_option
@click.option("--bootstrap", metavar="HOST:PORT", help="Use this running cluster instead of a private broker.")
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Worker processes.")
@click.option("--device", metavar="cpu|cuda[:N]|npu[:N]", help="Device of the workers. [as in the preset]")
@click.option(
    "--modes",
    metavar="NAME,…",
    help="Modes to compare: full (required), cache, relay-hbm, relay. [quick: full,cache,relay]",
)
@click.option(
    "--costs",
    default="cpu",
    show_default=True,
    metavar="NAME|FILE",
    help="Costs that fix the length: npu, h100, cpu, or a TOML file as `relaygr simulate --save-costs` writes.",
)
@click.option("--slo", type=float, metavar="MS", help="Target of the ranking P99. [as in the preset]")
@traffic_options(
    length="where full inference takes 0.4 of the SLO by --costs; the largest rate is searched there",
    rate="the largest of `full`; the largest length is searched there",
    arrivals="",
    tide="",
    users="200000",
    zipf="0",
    sigma="0",
    mix="",
    growth="3",
    suffix="8",
    candidates="32",
    stage_delay="150",
    stage_sigma="0.1",
)
@click.option("--revisits", metavar="R,…", help="Shares of returning users. [0,0.5,0.9]")
@click.option("--length-revisits", metavar="R,…", help="Shares of returning users in searches of lengths. [0.5,0.9]")
@click.option(
    "--overload",
    metavar="F,…",
    help="Then offer so many times the largest rate of `relay`, to callers who wait a second, 12 s each. [none]",
)
@click.option("--samples", type=int, help="Requests judged in a probe.")
@click.option("--repeats", type=int, help="Repeats of every search.")
@click.option("--budget", type=float, metavar="SECONDS", help="Time of the run; no probe starts that would end later.")
@click.option("--seed", type=click.IntRange(0), help="Seed of the traffic. [7]")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("out/slo"),
    show_default=True,
    help="Folder for report.html and report.json.",
)
@source_options
def slo_command(
    preset: str,
    bootstrap: str | None,
    device: str | None,
    slo: float | None,
    costs: str,
    files: tuple[str, ...],
    assignments: tuple[str, ...],
    **flags: Any,
) -> None:
    """Measure how much longer histories and how much more traffic the relay serves within the same ranking P99.

    Runs broker, trigger, workers and a client as real processes. For every mode of serving, searches the largest rate
    at a given length and the largest length at a given rate. Prints a table, and writes report.json and report.html;
    a run that ends early writes what it measured to partial.json and partial.html.
    With CHECK=1 in the environment, says which bounds are not kept, and exits 1.

    \b
    Examples:
      relaygr bench slo
      relaygr bench slo --modes full,relay --slo 100 --length 2048
      relaygr bench slo --preset paper --device cuda --bootstrap kafka:9092 --workers 4
    """
    check_cluster(flags["broker"], bootstrap)
    overrides = {"kafka.bootstrap": bootstrap, "worker.device": device, "relay.slo_ms": slo}
    settings = with_bench_model(load_settings([f"slo-{preset}", *files], {**overrides, **parse_flags(assignments)}))
    if flags["length"] is None:
        flags["length"] = _unit_length(costs, settings.relay.slo_ms)
    options = build_options(preset, private=bootstrap is None, flags=flags)
    for name in ("report.json", "report.html"):
        check_writable(options.out / name, "--out")
    from relaygr_lab.report.commands import run_slo

    _run(run_slo(options, settings, f"relaygr {shlex.join(sys.argv[1:])}"))


@bench_command.command(name="paper")
@click.option("--quick", is_flag=True, help="Ten minutes: throughput against length. [every curve, two hours a call]")
@click.option(
    "--costs",
    default="npu",
    show_default=True,
    metavar="NAME|FILE",
    help="Costs of the emulated devices: npu, h100, cpu, or a TOML file as `relaygr simulate --save-costs` writes.",
)
@_broker_option
@traffic_options(arrivals="none; with it, a curve more: Poisson beside the log's first 6,000 arrivals")
@click.option("--repeats", type=click.IntRange(1, 20), help="Repeats of measured values. [quick: 1; else 3]")
@click.option(
    "--only",
    type=click.Choice(["fleet", "simulated", "report"]),
    help="fleet: measure what is lacking; simulated: simulate it; report: only report what the folder has.",
)
@click.option("--budget", type=click.FloatRange(60), metavar="SECONDS", help="Time of the run. [quick: 570; else 7200]")
@click.option("--seed", type=click.IntRange(0), default=7, show_default=True, help="Seed of the traffic.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for report.html and report.json. [out/paper, or out/paper-quick]",
)
@source_options
def paper_command(
    quick: bool,
    costs: str,
    broker: BrokerKind | None,
    arrivals: ArrivalLog | None,
    repeats: int | None,
    budget: float | None,
    seed: int,
    out: Path | None,
    only: Literal["fleet", "simulated", "report"] | None,
    files: tuple[str, ...],
    assignments: tuple[str, ...],
) -> None:
    """Measure what each mechanism is worth, on a fleet of emulated devices beside an oracle queue.

    Trigger, workers, broker and client are real processes; devices take the times of a cost file and no processor. Time
    is dilated, so that the fleet fits two cores. Dense curves are simulated. A run that was broken off, or that its
    budget ended, goes on where it was.
    With CHECK=1 in the environment, says which bounds are not kept or, without --quick, not measured, and exits 1.

    \b
    Examples:
      relaygr bench paper --quick
      relaygr bench paper --costs h100 --out out/h100
    """
    settings, engine = (
        with_bench_model(load_settings([profile, *files], parse_flags(assignments)))
        for profile in ("fleet", "slo-quick")
    )
    out = out or Path("out/paper-quick" if quick else "out/paper")
    for name in ("report.json", "report.html"):
        check_writable(out / name, "--out")
    from relaygr_lab.paper.plan import LOGGED_ARRIVALS, PaperOptions
    from relaygr_lab.report.commands import run_paper
    from relaygr_stream.ops.brokers.local import broker_at_hand

    options = PaperOptions(
        quick=quick,
        costs=costs,
        broker=broker or broker_at_hand(),
        samples=100 if quick else 150,
        least_s=8.0 if quick else 20.0,
        stages=1 if quick else 2,
        tolerance=1.1,  # of 15 %, by which simulation and fleet may differ, a wider bracket could not tell
        repeats=repeats or (1 if quick else 3),
        seeds=1 if quick else 2,
        budget_s=budget or (570.0 if quick else 7200.0),
        seed=seed,
        out=out,
        only=only,
        arrivals=None if arrivals is None else arrivals.first(LOGGED_ARRIVALS),
    )
    _run(run_paper(options, settings, engine, f"relaygr {shlex.join(sys.argv[1:])}"))


def _run(bench: Coroutine[Any, Any, list[str]]) -> None:
    """Run it to its end, and judge it. Exits 1 where a bound is not kept."""
    from relaygr_lab.verdicts import judged
    from relaygr_stream.ops.stopping import run_until_stopped
    from relaygr_stream.telemetry.process import loop_factory

    if judged(run_until_stopped(bench, loop_factory())):
        sys.exit(1)


def build_options(preset: str, *, private: bool, flags: dict[str, Any]) -> Any:
    """The preset's options, with those that the flags change. Raises click.UsageError or ConfigError."""
    from relaygr_lab.bench.modes import modes_named
    from relaygr_lab.bench.options import SloOptions
    from relaygr_stream.ops.brokers.local import broker_at_hand

    given = {name: value for name, value in flags.items() if value is not None}
    # The embedded broker becomes slower as its log grows: after two minutes of this load a message takes twice as long.
    broker = given.pop("broker", broker_at_hand())
    if "modes" in given:
        given["modes"] = modes_named(given["modes"])
    for name in ("revisits", "length_revisits", "overload"):
        if name in given:
            given[name] = _ratios(f"--{name.replace('_', '-')}", given[name])
    log = given.get("arrivals")
    if log is not None and log.users is not None and ("revisits" in given or "length_revisits" in given):
        raise click.UsageError(f"--arrivals {log.name} has users, who return as they did; leave --revisits out")
    if "length" in given and math.isfinite(given["length"]):  # SloOptions refuses any other
        given["length"] = round(given["length"])
    if "budget" in given:
        given["budget_s"] = given.pop("budget")
    head = head_start(given)
    shape = {name: value for name, value in given.items() if name not in ("stage_delay", "stage_sigma")}
    options = SloOptions(preset=preset, broker=broker if private else None, **{**PRESETS[preset], **shape})
    return replace(options, delay=replace(options.delay, **head))


def _unit_length(costs: str, slo_ms: float) -> int:
    from relaygr_lab.bench.lengths import costs_named, grid_length

    return grid_length(costs_named(costs), slo_ms)


def _ratios(flag: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(ratio) for ratio in text.split(","))
    except ValueError:
        raise click.UsageError(f"{flag} {text}: write numbers, separated by commas") from None
