"""`relaygr bench dlrmv3` on the command line."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from relaygr_stream.cli.options import check_cluster, parse_flags, source_options
from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.files import check_writable
from relaygr_stream.settings.load import load_settings

if TYPE_CHECKING:
    from relaygr_stream.ops.brokers.local import BrokerKind

ENGINE: Final = "engine"
MODES: Final = ("full", "cache", "relay", ENGINE)
#: Queries of a run and seconds of all, with --quick and without.
SIZES: Final = {True: (700, 560.0), False: (2000, 3600.0)}
#: What a processor is given: a twentieth of the length and of the candidates, and a smaller model. With a tenth, full
#: inference takes 40 of the SLO's 80 ms, so no query may wait for another: `full` then carries 0.6 queries a second.
ON_CPU: Final[dict[str, Any]] = {"candidates": 102, "scale": 0.05, "layers": 2, "dim": 256}
#: Memory of an emulated device and its host, which takes none here.
EMULATED: Final[dict[str, Any]] = {"worker.hbm_bytes": "40GiB", "worker.dram_bytes": "256GiB"}


@click.command(name="dlrmv3")
@click.option("--quick", is_flag=True, help="Ten minutes, at most 700 queries a run. [an hour, 2,000]")
@click.option("--broker", type=click.Choice(["embedded", "kafka"]), help="Private broker to start. [embedded]")
@click.option("--bootstrap", metavar="HOST:PORT", help="Use this running cluster instead of a private broker.")
@click.option("--device", metavar="cpu|cuda[:N]|npu[:N]", help="Device of the worker. [cpu]")
@click.option(
    "--costs",
    metavar="NAME|FILE",
    help="Emulate a device of these costs, scaled to the model by arithmetic: npu, h100, cpu, or a TOML file.",
)
@click.option("--modes", metavar="NAME,…", help="Of full, cache, relay, engine. [all; with --costs without engine]")
@click.option("--users", type=click.IntRange(1), help="Users of a run, of 5,000. [a quarter of the queries]")
@click.option("--candidates", type=click.IntRange(1, 65536), help="Items to rank. [2,048; cpu: 102]")
@click.option("--scale", type=float, help="Factor of the histories' length. [1; cpu: 0.05]")
@click.option("--layers", type=click.IntRange(1, 64), help="Layers of the model. [5; cpu: 2]")
@click.option("--dim", type=click.IntRange(8), help="Width of the model. [512; cpu: 256]")
@click.option("--queries", type=click.IntRange(1), help="Queries of a run of LoadGen. [those that --budget pays for]")
@click.option("--budget", type=click.FloatRange(1), metavar="SECONDS", help="Time of all runs.")
@click.option("--seed", type=click.IntRange(0, 2**31), default=7, show_default=True, help="Seed of the traffic.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("out/dlrmv3"),
    show_default=True,
    help="Folder for report.json and LoadGen's logs.",
)
@source_options
def dlrmv3_command(
    quick: bool,
    broker: BrokerKind | None,
    bootstrap: str | None,
    device: str | None,
    costs: str | None,
    modes: str | None,
    queries: int | None,
    budget: float | None,
    seed: int,
    out: Path,
    files: tuple[str, ...],
    assignments: tuple[str, ...],
    **shape: Any,
) -> None:
    """Measure the queries a second that MLCommons' LoadGen calls VALID, with DLRMv3's traffic and model.

    full: every query infers the whole history, as the closed division requires. cache: prefix KV of earlier queries
    are extended. relay: each query is announced 20 to 150 ms before. These go through trigger, Kafka and a worker;
    engine is cache without them. LoadGen issues and measures; its summaries are kept. The result is not an MLPerf
    result, and not verified by MLCommons. With CHECK=1 in the environment, says which
    bounds are not kept, and exits 1.

    \b
    Examples:
      relaygr bench dlrmv3 --quick
      relaygr bench dlrmv3 --device cuda --set worker.dtype=bfloat16
      relaygr bench dlrmv3 --quick --costs h100
    """
    check_cluster(broker, bootstrap)
    if costs and device:
        raise click.UsageError("--costs emulates a device, --device names one; give one of them")
    overrides = {"kafka.bootstrap": bootstrap, "worker.device": device, **(EMULATED if costs else {})}
    settings = load_settings(["dlrmv3", *files], {**overrides, **parse_flags(assignments)}).settings
    check_writable(out / "report.json", "--out")
    from relaygr_lab.bench.lengths import costs_named
    from relaygr_lab.bench.modes import MODES as BUS_MODES
    from relaygr_lab.dlrmv3.assemble import run_dlrmv3
    from relaygr_lab.dlrmv3.loadgen import FEWEST, leave, loadgen
    from relaygr_lab.dlrmv3.model import Shape
    from relaygr_lab.dlrmv3.options import Options
    from relaygr_lab.dlrmv3.workload import Workload
    from relaygr_lab.verdicts import judged
    from relaygr_stream.ops.stopping import run_until_stopped
    from relaygr_stream.telemetry.process import loop_factory

    loadgen()
    asked = [name.strip() for name in modes.split(",")] if modes else [*MODES[:-1], *([] if costs else [ENGINE])]
    if unknown := sorted(set(asked) - set(MODES)):
        raise ConfigError(f"modes {', '.join(unknown)}: no such mode; there are {', '.join(MODES)}")
    of_run, seconds = SIZES[quick]
    least = queries or FEWEST
    queries = queries or of_run
    given = {name: value for name, value in shape.items() if value is not None}
    given = {"users": max(1, queries // 4), **({} if costs or settings.worker.device != "cpu" else ON_CPU), **given}
    workload = Workload(seed=seed, **{name: given[name] for name in ("users", "candidates", "scale") if name in given})
    options = Options(
        workload=workload,
        shape=Shape(**{name: given[name] for name in ("layers", "dim") if name in given}),
        modes=tuple(mode for mode in BUS_MODES if mode.name in asked),
        engine=ENGINE in asked,
        broker=None if bootstrap else broker or "embedded",
        queries=queries,
        least_queries=least,
        budget_s=budget or seconds,
        out=out,
        emulated=costs_named(costs) if costs else None,
    )
    if beyond := settings.relay.beyond(prefix=workload.longest(), candidates=workload.candidates):
        raise ConfigError(beyond)
    bench = run_dlrmv3(options, settings, f"relaygr {shlex.join(sys.argv[1:])}")
    try:
        broken = run_until_stopped(bench, loop_factory())
    except SystemExit as stopped:  # by a signal
        leave(int(stopped.code or 0))
        raise
    sys.exit(int(judged(broken)))
