"""`relaygr demo` on the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import click

from relaygr_stream.cli.options import SOURCES, check_cluster, parse_flags, refuse_others, source_options
from relaygr_stream.settings.files import check_writable
from relaygr_stream.settings.load import load_settings
from relaygr_stream.workload.packaged import is_packaged


@click.command(name="demo")
@click.option(
    "--broker",
    type=click.Choice(["embedded", "kafka"]),
    help="Private broker to start: the embedded one, or Apache Kafka from KAFKA_HOME. [embedded]",
)
@click.option("--bootstrap", metavar="HOST:PORT", help="Use this running cluster instead of a private broker.")
@click.option(
    "--seconds", type=click.FloatRange(1, 3600), default=30.0, show_default=True, help="Length of each phase."
)
@click.option("--rate", type=click.FloatRange(0.1, 10_000), default=4.0, show_default=True, help="Requests per second.")
@click.option("--seed", type=click.IntRange(0), default=7, show_default=True, help="Seed of the traffic.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of the picture. [out/relaygr-demo.png; out/relaygr-demo-rollout.png; out/relaygr-demo-scenarios.png]",
)
@click.option(
    "--events",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Requests of this log of interactions (formats of `replay`); goes with --checkpoint.",
)
@click.option(
    "--checkpoint", metavar="FOLDER", help="Rank with this model of yours; the default is trained on generated users."
)
@click.option(
    "--by-reference", is_flag=True, help="Keep histories in a local store; requests with the relay refer to them."
)
@click.option("--rollout", is_flag=True, help="Show a rollout under load instead: hits and latencies through it.")
@click.option(
    "--scenarios", is_flag=True, help="Show a day of two scenarios instead: a planner moves workers between them."
)
@source_options
def demo_command(
    broker: Literal["embedded", "kafka"] | None,
    bootstrap: str | None,
    seconds: float,
    rate: float,
    seed: int,
    out: Path | None,
    events: Path | None,
    checkpoint: str | None,
    by_reference: bool,
    rollout: bool,
    scenarios: bool,
    files: tuple[str, ...],
    assignments: tuple[str, ...],
) -> None:
    """Run the whole relay on this machine and show what it does.

    Starts a broker, a trigger, two workers and a client that acts as a recommendation service. Sends requests first
    with the relay, then the same requests with full inference, and with the newest behaviours only. Shows latencies and
    how often the true next item is in the first ten. Exits 0 only if every request was answered and no score deviated.
    What a short run cannot judge is said, and is no fault.

    \b
    Examples:
      relaygr demo --broker kafka --seconds 10
      relaygr demo --by-reference
      relaygr demo --rollout
      relaygr demo --scenarios
      relaygr demo --events ml-100k/u.data --checkpoint out/movielens
    """
    from relaygr_lab.demo.plot import check_can_draw
    from relaygr_lab.demo.rollout import run_rollout_demo
    from relaygr_lab.demo.run import DemoOptions, run_demo
    from relaygr_lab.demo.scenarios import run_scenarios_demo
    from relaygr_stream.ops.stopping import run_until_stopped

    check_cluster(broker, bootstrap)
    which = "rollout" if rollout else "scenarios" if scenarios else ""
    out = out or Path(f"out/relaygr-demo-{which}.png" if which else "out/relaygr-demo.png")
    if which:
        refuse_others(f"--{which} sends requests of its own to models of its own", which, "broker", "out", *SOURCES)
    check_writable(out, "--out")
    check_can_draw(out)
    flags = {"kafka.bootstrap": bootstrap, "model.checkpoint": checkpoint, **parse_flags(assignments)}
    settings = load_settings(["demo", *files], flags).settings
    if events is not None and is_packaged(settings.model):
        raise click.UsageError("--events goes with --checkpoint FOLDER: the packaged model knows generated items only")
    kind = None if bootstrap else broker or "embedded"
    if rollout or scenarios:
        instead = run_rollout_demo if rollout else run_scenarios_demo
        sys.exit(run_until_stopped(instead(kind, settings, out)))
    options = DemoOptions(
        broker=kind,
        seconds=seconds,
        rate=rate,
        seed=seed,
        out=out,
        events=events,
        by_reference=by_reference,
    )
    sys.exit(run_until_stopped(run_demo(options, settings)))
