"""`relaygr up`: a trigger and workers on this host, or those of every scenario of a fleet, and who moves them."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from relaygr_stream.cli.options import given, parse_flags, refuse_others, source_options
from relaygr_stream.errors import ConfigError, RelayError
from relaygr_stream.settings.scenarios import RESERVE
from relaygr_stream.settings.section import MAX_PORT
from relaygr_stream.telemetry.printable import printable

if TYPE_CHECKING:
    from relaygr_stream.ops.door import RollDoor
    from relaygr_stream.ops.supervisor import Supervised, Supervisor
    from relaygr_stream.settings.scenarios import Scenario
    from relaygr_stream.settings.schema import Settings
    from relaygr_stream.settings.worker import Worker

#: Time beyond worker.drain_ms before a process is killed: for leaving the group and closing clients.
BEYOND_DRAIN_S = 5.0


#: What a worker takes beside its tiers: the interpreter, torch and a small model, measured.
WORKER_BYTES = 400 << 20

#: Said where no model is set.
PACKAGED_LINE = (
    "no model is set: serves the packaged one, which knows the users of `relaygr replay --generate`. Yours: --set "
    "model.checkpoint=FOLDER or model.factory=MODULE:FACTORY; random weights: --set model.checkpoint="
)


@click.command(name="up")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(0, 256), help="Worker processes.")
@click.option("--trigger/--no-trigger", default=True, show_default=True, help="Also run a trigger.")
@click.option(
    "--name",
    help="Names of workers are NAME-0, NAME-1, …. [the host's name, with a number where another `up` has it]",
)
@click.option(
    "--fleet",
    metavar="FILE",
    help="Run a trigger and min_workers workers for each [scenario.NAME] of this file that has workers of its own, and "
    "make all topics. Devices beyond these get a worker each, by priority in turn, and a planner that moves workers "
    "runs, too. --workers: of what is of no scenario, none by default.",
)
@click.option(
    "--reserve",
    default=0,
    type=click.IntRange(0, 256),
    help="With --fleet: so many further workers stand by, without a model, until the planner moves them.",
)
@click.option("--devices", metavar="DEVICE[,DEVICE…]", help="Devices, assigned to workers in turn: cuda:0,cuda:1.")
@click.option(
    "--rolling",
    is_flag=True,
    help="Restart the processes of the `up` that runs on this host (of several: --name), one at a time, and wait.",
)
@source_options
@click.option("--bootstrap", metavar="HOST:PORT", help="Kafka brokers; short for --set kafka.bootstrap=…")
def up_command(
    workers: int,
    trigger: bool,
    name: str | None,
    fleet: str | None,
    reserve: int,
    devices: str | None,
    rolling: bool,
    files: tuple[str, ...],
    assignments: tuple[str, ...],
    bootstrap: str | None,
) -> None:
    """Keep a trigger and workers running on this host.

    A process that fails or hangs is restarted, after a pause that doubles up to 30 s. The first SIGTERM or Ctrl-C stops
    the trigger, then the workers, which drain; a second one kills all. `relaygr up --rolling`, or SIGUSR1 (without a
    terminal SIGHUP, too), restarts all, one at a time, with their files read again, and starts those that were
    stopped; it ends at a process that does not come back. A process that cannot start with its settings at first ends
    all at once. Logs go to stderr, the state of each to stdout. Where nothing in [model] is set, workers serve the
    packaged model. If telemetry.port or handover.port is N, the first process gets N, the next N+1, and so on.

    \b
    Examples:
      relaygr up --workers 2 --profile cpu --bootstrap kafka:9092
      relaygr up --fleet fleet.toml --devices cuda:0,cuda:1,cuda:2,cuda:3 --bootstrap kafka:9092
    """
    from relaygr_stream.ops.door import RollDoor
    from relaygr_stream.ops.names import reserved_name
    from relaygr_stream.ops.scenarios import make_groups
    from relaygr_stream.ops.supervisor import Supervised, Supervisor
    from relaygr_stream.settings.load import PACKAGED_MODEL, load_settings, with_packaged_model
    from relaygr_stream.settings.scenarios import groups_of

    if rolling:
        _roll(name)
    workers, trigger = _of_no_scenario(workers, trigger, fleet, reserve)
    files = files if fleet is None else (*files, fleet)
    # Loaded here so that a mistake is reported once, of each process's own settings, too, which it loads itself.
    config = load_settings(files, {"kafka.bootstrap": bootstrap, **parse_flags(assignments)})
    scenarios = groups_of(config.settings.scenarios) if fleet is not None else ()
    if fleet is not None and not scenarios:
        raise ConfigError(f"--fleet {fleet}: no section [scenario.NAME]; write one, or leave out --fleet")
    settings = with_packaged_model(config)
    if settings is not config.settings and (workers or any(not each.model for each in scenarios)):
        click.echo(PACKAGED_LINE)
        assignments = (*assignments, f"model.checkpoint={PACKAGED_MODEL}")
    shared = [
        *(argument for file in files for argument in ("--config", file)),
        *(argument for assignment in assignments for argument in ("--set", assignment)),
        *(("--bootstrap", bootstrap) if bootstrap else ()),
    ]
    with (
        reserved_name(name, settings) as host,
        tempfile.TemporaryDirectory(prefix="relaygr-up-", ignore_cleanup_errors=True) as folder,
    ):
        processes, roles = [], Counter[str]()
        planned = plan(host, workers, scenarios, settings, devices, reserve, trigger=trigger)
        for process in planned:
            flags = {"kafka.bootstrap": bootstrap, **parse_flags((*assignments, *process.assignments))}
            own = load_settings(files, flags).settings
            if process.scenario not in ("", RESERVE):
                own.serving(process.scenario)
            arguments = [process.role, *shared, *process.arguments]
            processes.append(Supervised(process.name, arguments, Path(folder), settings.telemetry.host))
            roles[process.role] += 1
        if workers := roles["worker"]:
            _say_memory(settings.worker, workers, {*_listed(devices or settings.worker.device)} == {"cpu"})
        if scenarios and 0 < (count := len(_listed(devices or ""))) < workers:
            click.echo(f"warning: {workers} workers share {count} devices; lower min_workers, or list more devices")
        if scenarios:
            asyncio.run(make_groups(config.settings, click.echo))
        stop_s = settings.worker.drain_ms / 1e3 + BEYOND_DRAIN_S
        door = RollDoor(host)
        first = processes[: len(processes) - workers]
        supervisor = Supervisor(processes, stop_s, partial(_print_state, door), first)
        ended_well = asyncio.run(_run(supervisor, door))
    sys.exit(0 if ended_well else 1)


@dataclass(frozen=True)
class Planned:
    """A process that `up` keeps. assignments: its own settings. scenario: that it serves; "": none; RESERVE: for which
    it stands by."""

    name: str
    role: str  # "trigger", "planner", "worker"
    assignments: tuple[str, ...]
    scenario: str = ""

    @property
    def arguments(self) -> list[str]:
        """Of its command, behind its role and what all processes have."""
        own = [argument for assignment in self.assignments for argument in ("--set", assignment)]
        acts = ("--mode", "act") if self.role == "planner" else ()
        of = ("--reserve",) if self.scenario == RESERVE else ("--scenario", self.scenario) if self.scenario else ()
        return [*own, *acts, *of]


def plan(
    host: str,
    workers: int,
    scenarios: Sequence[Scenario],
    settings: Settings,
    devices: str | None = None,
    reserve: int = 0,
    *,
    trigger: bool = True,
) -> list[Planned]:
    """Triggers first, then a planner where there are workers to move, then workers: those of no scenario, then those of
    each, in the order of the names, then so many in reserve.

    Devices and ports are given in turn. Raises ConfigError where ports are not enough, or devices for the reserve.
    """
    of = {each.name: each.min_workers for each in scenarios}
    listed = _listed(devices or "")
    serving = workers + sum(of.values())
    if listed and reserve and serving + reserve > len(listed):
        raise ConfigError(
            f"--reserve {reserve}: {serving} workers serve, and --devices has {len(listed)}; each that stands by "
            f"needs a device of its own: list {serving + reserve}, or have fewer"
        )
    spare = max(0, len(listed) - serving - reserve) if scenarios else 0
    for _, each in zip(range(spare), cycle(sorted(scenarios, key=lambda each: -each.priority)), strict=False):
        of[each.name] += 1
    first = [("trigger", name) for name in (*([""] if trigger else []), *of)]
    if reserve or (spare and len(scenarios) > 1):
        first.append(("planner", ""))
    numbered = [
        (name, number) for name, count in ({"": workers} | of | {RESERVE: reserve}).items() for number in range(count)
    ]
    telemetry = _ports("telemetry.port", settings.telemetry.port, len(first) + len(numbered))
    handover = _ports("handover.port", settings.handover.port, len(numbered))
    found = [Planned(f"{role}-{name}" if name else role, role, tuple(telemetry.pop(0)), name) for role, name in first]
    for index, (name, number) in enumerate(numbered):
        full = f"{host}-{name}-{number}" if name else f"{host}-{number}"
        device = [f"worker.device={listed[index % len(listed)]}"] if listed else []
        own = (*telemetry.pop(0), *handover[index], f"worker.name={full}", *device)
        found.append(Planned(full, "worker", own, name))
    return found


def _listed(devices: str) -> list[str]:
    return [each.strip() for each in devices.split(",")] if devices else []


def _of_no_scenario(workers: int, trigger: bool, fleet: str | None, reserve: int) -> tuple[int, bool]:
    """How many workers of no scenario run, and whether their trigger. Raises click.UsageError for what clashes."""
    if fleet is None and reserve:
        raise click.UsageError("--reserve is for a fleet's scenarios: name its file by --fleet")
    if fleet is None and not (workers or trigger):
        raise click.UsageError("nothing to run: --workers 0 and --no-trigger; leave out one of them")
    if fleet is None or "workers" in (on_line := given()):
        return workers, trigger
    if "trigger" in on_line:
        raise click.UsageError(
            "--no-trigger is of workers of no scenario, of which --fleet runs none; give --workers N"
        )
    return 0, False


def _roll(name: str | None) -> NoReturn:
    """Have a running `up` restart its processes; the exit code says whether all came back."""
    from relaygr_stream.ops.door import ask_to_roll

    refuse_others(
        "--rolling restarts processes with the options of their own `up`, and their files read again", "rolling", "name"
    )
    failed = ask_to_roll(name, click.echo)
    if failed:
        raise RelayError(f"--rolling: {printable(failed)}; what was not restarted runs on as it was")
    sys.exit(0)


def _say_memory(worker: Worker, workers: int, on_cpu: bool) -> None:
    """Print what the workers take of this host's memory, and a warning if that is more than there is."""
    from relaygr_stream.cache.host import available_host_bytes

    tiers = (worker.hbm_bytes if on_cpu else 0) + worker.dram_bytes
    when = "as users come, for their prefix KV up to" if on_cpu else "for prefix KV"
    names = "worker.hbm_bytes and worker.dram_bytes" if on_cpu else "worker.dram_bytes"
    each = "the worker takes" if workers == 1 else f"each of {workers} workers takes"
    click.echo(f"{each} {_gib(WORKER_BYTES)} of memory at its start and, {when} {_gib(tiers)} more ({names})")
    available = available_host_bytes()
    if available is not None and workers * (WORKER_BYTES + tiers) > available:
        click.echo(f"warning: this host has {_gib(available)} available; lower {names}, or --workers")


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"


def _ports(key: str, first: int, count: int) -> list[list[str]]:
    """Assignments that give `count` processes the ports from `first` on; none if `first` is 0 (any free port)."""
    if first + count > MAX_PORT + 1:
        raise ConfigError(
            f"{key} = {first}: {count} processes need ports {first}…{first + count - 1}, beyond {MAX_PORT}; choose a "
            f"lower one"
        )
    return [[f"{key}={first + index}"] if first else [] for index in range(count)]


async def _run(supervisor: Supervisor, door: RollDoor) -> bool:
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            supervisor.kill()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGUSR1, supervisor.roll)
    if not sys.stdin.isatty():  # else it says that the terminal has gone, which ends this process
        loop.add_signal_handler(signal.SIGHUP, supervisor.roll)
    async with door.open(supervisor.roll):
        return await supervisor.run(stop)


def _print_state(door: RollDoor, process: Supervised) -> None:
    restarts = process.restarts.count
    pid = f"pid {process.pid}" if process.pid else "–"
    again = f"  restarts {restarts}" if restarts else ""
    line = f"{process.name:<20} {pid:<12} {printable(process.state)}{again}"
    door.tell(line)
    click.echo(line)
