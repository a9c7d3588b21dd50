"""`relaygr simulate` on the command line."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relaygr_lab.simulate.bus import BusLatency
from relaygr_stream.cli.options import given as flags_given
from relaygr_stream.cli.options import head_start, parse_flags, share, source_options, taken, traffic_options
from relaygr_stream.errors import ConfigError
from relaygr_stream.ops.stopping import interruptible
from relaygr_stream.settings.files import check_writable
from relaygr_stream.settings.load import load_settings

if TYPE_CHECKING:
    from relaygr_lab.simulate.costs import DeviceCosts
    from relaygr_lab.simulate.plan import Probe
    from relaygr_lab.simulate.scenario import Scenario
    from relaygr_stream.settings.schema import Settings
    from relaygr_stream.workload.traffic import Traffic


#: Steps from which a log has a line for each quarter of them.
QUARTERED_FROM = 20


@click.command(name="simulate")
@click.option(
    "--workers", type=click.IntRange(1, 10_000_000), default=1000, show_default=True, help="Workers in the fleet."
)
@click.option(
    "--lanes-per-worker", type=click.IntRange(1, 1000), default=8, show_default=True, help="Lanes per worker."
)
@traffic_options(
    rate="2000, of all users",
    arrivals="",
    tide="",
    users="1000000",
    zipf="0",
    revisit="50%",
    shift="",
    return_s="20",
    length="1024",
    sigma="0",
    mix="",
    growth="3",
    suffix="8",
    candidates="100",
    stage_delay="80",
    stage_sigma="0.25",
)
@click.option(
    "--mode",
    type=click.Choice(["relay", "cache", "full"]),
    default="relay",
    show_default=True,
    help="cache: no pre-inference; full: no reuse either.",
)
@click.option("--hbm", metavar="BYTES", help="Short for --set worker.hbm_bytes=…, for example 32GiB.")
@click.option("--dram", metavar="BYTES", help="Short for --set worker.dram_bytes=…; 0: no DRAM tier.")
@click.option(
    "--costs",
    default="calibrate",
    show_default=True,
    metavar="NAME|FILE|calibrate",
    help="Device costs: npu, h100, cpu, a TOML file, or measure the configured model on this machine (minutes).",
)
@click.option("--save-costs", type=click.Path(path_type=Path, dir_okay=False), help="Write the costs to this file.")
@click.option(
    "--bus-p50", type=float, default=BusLatency.p50_ms, show_default=True, help="P50 from produce to consume, ms."
)
@click.option(
    "--bus-p99", type=float, default=BusLatency.p99_ms, show_default=True, help="P99 from produce to consume, ms."
)
@click.option(
    "--bus-lasting",
    type=float,
    default=BusLatency.lasting_ms,
    show_default=True,
    help="Correlation time of bus latencies, ms; 0: independent.",
)
@click.option("--answer-p50", type=float, help="P50 from produce to consume of answers, ms. [--bus-p50]")
@click.option("--answer-p99", type=float, help="P99 from produce to consume of answers, ms. [--bus-p99]")
@click.option(
    "--status-loss",
    metavar="SHARE",
    callback=share,
    default="0",
    show_default=True,
    help="Share of worker statuses that are lost.",
)
@click.option(
    "--unranked",
    metavar="SHARE",
    callback=share,
    default="0",
    show_default=True,
    help="Share of announced requests that are never ranked: their clients cancel them when they would be.",
)
@click.option(
    "--fail-rack",
    metavar="SHARE",
    callback=share,
    help="Share of the workers that die at once, e.g. 2%; at least one dies.",
)
@click.option("--at", type=float, default=10.0, show_default=True, help="Seconds of measured time before --fail-rack.")
@click.option("--seconds", type=float, default=30.0, show_default=True, help="Measured simulated time.")
@click.option("--warm-up", type=float, help="Simulated time before the measured one. [three times --return-after]")
@click.option(
    "--sample",
    type=click.IntRange(1),
    default=40,
    show_default=True,
    help="Workers that are simulated; with --fail-rack at least 1 / SHARE.",
)
@click.option(
    "--plan", is_flag=True, help="Find the smallest fleet for this traffic, its memory, and the effect of a failure."
)
@click.option(
    "--pays",
    is_flag=True,
    help="Say whether the relay pays: the smallest fleets of full inference and of the relay, beside each other. "
    "Without --rate, for the traffic of some 20 workers.",
)
@click.option(
    "--hit-target",
    metavar="SHARE",
    callback=share,
    default="90%",
    show_default=True,
    help="With --plan and --pays: share of returning users that hit.",
)
@click.option(
    "--headroom",
    metavar="SHARE",
    callback=share,
    default="0%",
    show_default=True,
    help="With --plan and --pays: share of the fleet's capacity that --rate leaves free.",
)
@click.option(
    "--chart",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.svg",
    help="With --plan and --pays: draw the P99 of every fleet that was tried.",
)
@click.option(
    "--processes", type=click.IntRange(0, 1024), default=0, show_default=True, help="Processes; 0: one per core."
)
@click.option("--seed", type=click.IntRange(0), default=7, show_default=True, help="Seed of every random choice.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write all figures to this file."
)
@source_options
def simulate_command(**given: Any) -> None:  # fmt: skip
    """Simulate a fleet in simulated time.

    Runs the real trigger, assignor, cache and scheduler on simulated devices and a simulated bus.

    Only --sample workers are simulated, with exactly their users. They forward to and prefill for each other within
    groups of at most 50. Results are for the whole fleet, with the error of the sample.

    Example: relaygr simulate --workers 10000 --users 100000000 --rate 100000 --fail-rack 2%
    """
    _check(given)
    flags = {"worker.hbm_bytes": given["hbm"], "worker.dram_bytes": given["dram"], **parse_flags(given["assignments"])}
    settings = load_settings(given["files"], flags).settings
    for option, name in (("--save-costs", "save_costs"), ("--json", "json_file"), ("--chart", "chart")):
        if given[name]:
            check_writable(given[name], option)
    with interruptible():
        _simulate(settings, given)


def _check(given: dict[str, Any]) -> None:
    """Refuse options that contradict each other."""
    if given["plan"] and given["pays"]:
        raise click.UsageError("--plan says how large a fleet is, --pays whether the relay is worth it; give one")
    if given["pays"] and given["mode"] != "relay":
        raise click.UsageError(f"--pays compares the relay with full inference; leave out --mode {given['mode']}")
    if not (given["plan"] or given["pays"]) and (given["chart"] or given["headroom"]):
        raise click.UsageError("--chart and --headroom are for --plan and --pays")
    on_line = flags_given()
    if not (given["plan"] or given["pays"]) and "hit_target" in on_line:
        raise click.UsageError("--hit-target is for --plan and --pays")
    if given["fail_rack"] is None and "at" in on_line:
        raise click.UsageError("--at says when --fail-rack happens; give both")
    if given["headroom"] == 1:
        raise click.UsageError("--headroom 100%: leaves nothing for the traffic; give less")
    if given["chart"]:
        from relaygr_lab.drawing import INSTALL, can_draw

        if not can_draw():
            raise ConfigError(f"--chart: {INSTALL}")


def _simulate(settings: Settings, given: dict[str, Any]) -> None:
    if given["costs"] == "calibrate":  # said before torch is loaded, too
        device = settings.worker.device
        click.echo(f"loading the model, then measuring it on {device}; nothing else should run meanwhile", err=True)
    from relaygr_lab.simulate.report import render, summary
    from relaygr_lab.simulate.run import run_scenario
    from relaygr_stream.telemetry.printable import print_table

    scenario = _scenario(given, settings)
    if given["save_costs"]:
        given["save_costs"].write_text(scenario.costs.as_toml(), encoding="utf-8")
        click.echo(f"costs written to {given['save_costs']}", err=True)
    if given["plan"] or given["pays"]:
        figures = _plan(scenario, given)
    else:
        started = time.perf_counter()
        story = run_scenario(scenario, given["processes"], _progress)
        print_table(render(scenario, story, time.perf_counter() - started))
        figures = summary(scenario, story)
    if given["json_file"]:
        given["json_file"].write_text(json.dumps(figures, indent=1, default=str) + "\n", encoding="utf-8")
        click.echo(f"all figures in {given['json_file']}", err=True)
    if not figures.get("holds", True):
        sys.exit(1)  # with --plan: the SLO held at no size of memory


def _costs(given: dict[str, Any], settings: Settings, traffic: Traffic) -> DeviceCosts:
    if given["costs"] != "calibrate":
        from relaygr_lab.bench.lengths import costs_named

        return costs_named(given["costs"])
    from relaygr_lab.simulate.calibrate import calibrate

    report = partial(_progress, what="rounds", doing="measuring")
    return calibrate(settings, round(traffic.length), traffic.suffix + traffic.candidates, report=report)


def _scenario(given: dict[str, Any], settings: Settings) -> Scenario:
    from relaygr_lab.simulate.scenario import Failure, Scenario

    traffic = _traffic(given, settings)
    bus = BusLatency(given["bus_p50"], given["bus_p99"], given["bus_lasting"])
    answer_p50, answer_p99 = given["answer_p50"], given["answer_p99"]
    answers = BusLatency(
        bus.p50_ms if answer_p50 is None else answer_p50, bus.p99_ms if answer_p99 is None else answer_p99
    )
    failure = None if given["fail_rack"] is None else Failure(share=given["fail_rack"], at=given["at"])
    return Scenario(
        settings=settings,
        costs=_costs(given, settings, traffic),
        traffic=traffic,
        workers=given["workers"],
        lanes_per_worker=given["lanes_per_worker"],
        sample=given["sample"],
        seconds=given["seconds"],
        warm_s=3 * traffic.return_s if given["warm_up"] is None else given["warm_up"],
        mode=given["mode"],
        bus=bus,
        answers=answers,
        status_loss=given["status_loss"],
        unranked=given["unranked"],
        failure=failure,
        seed=given["seed"],
    )


def _traffic(given: dict[str, Any], settings: Settings) -> Traffic:
    from relaygr_stream.workload.items import StageDelay
    from relaygr_stream.workload.traffic import Traffic

    relay = settings.relay
    head = head_start(given)
    if not 0 < head.get("median_ms", 1.0) <= relay.life_window_ms:
        raise ConfigError(f"--stage-delay {given['stage_delay']:g}: must be above 0, at most relay.life_window_ms")
    shape = taken(given, *(field.name for field in dataclasses.fields(Traffic) if field.name in given))
    traffic = Traffic(**{"rate": 2000.0, **shape}, max_prefix=relay.max_prefix_tokens, delay=StageDelay(**head))
    if beyond := relay.beyond(suffix=traffic.suffix, candidates=traffic.candidates):
        raise ConfigError(beyond)
    return traffic


def _plan(scenario: Scenario, given: dict[str, Any]) -> dict[str, Any]:
    from relaygr_lab.simulate.pays import chart, render_pays, with_own_rate
    from relaygr_lab.simulate.planned import plan, render_plan, render_probe
    from relaygr_lab.simulate.run import run_scenario
    from relaygr_stream.telemetry.printable import print_table

    pays, probes = given["pays"], list["Probe"]()

    def tried(probe: Probe) -> None:
        probes.append(probe)
        click.echo(render_probe(probe), err=True)

    if pays and given["rate"] is None:
        scenario = with_own_rate(scenario)
    simulate = partial(run_scenario, processes=given["processes"], report=_progress)
    try:
        planned = plan(scenario, given["hit_target"], simulate, tried, headroom=given["headroom"], fails=not pays)
    finally:
        if given["chart"] and probes:
            given["chart"].write_text(chart(probes, scenario.settings.relay.slo_ms), encoding="utf-8")
            click.echo(f"P99 of every fleet that was tried: {given['chart']}", err=True)
    print_table(render_pays(planned) if pays else render_plan(planned))
    return planned.figures()


def _progress(done: int, of: int, *, what: str = "groups of workers", doing: str = "simulating") -> None:
    """Print progress on stderr: a line that changes on a terminal, else one for each quarter of a long work."""
    if sys.stderr.isatty():
        end = "\n" if done == of else ""
        click.echo(f"\r{doing}: {done} of {of} {what}{end}", err=True, nl=False)
    elif of >= QUARTERED_FROM and 4 * done // of > 4 * (done - 1) // of:
        click.echo(f"{doing}: {done} of {of} {what}", err=True)
