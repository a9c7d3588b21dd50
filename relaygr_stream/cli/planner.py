"""`relaygr planner`, and `relaygr plan`: how many workers each scenario wants."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from relaygr_stream.cli.options import settings_options
from relaygr_stream.errors import RelayError
from relaygr_stream.settings.scenarios import RESERVE
from relaygr_stream.settings.schema import Settings

if TYPE_CHECKING:
    from rich.table import Table

    from relaygr_stream.wire.planner_status import FleetPlan, PlannerStatus, ScenarioPlan, SharedGroup


@click.command(name="planner")
@click.option(
    "--mode",
    default="advise",
    show_default=True,
    type=click.Choice(["advise", "act"]),
    help="advise: propose; act: also move workers, one at a time, while no other planner does.",
)
@click.option(
    "--period",
    default=10.0,
    show_default=True,
    type=click.FloatRange(1, 600),
    metavar="SECONDS",
    help="Time between decisions.",
)
@click.option(
    "--record", type=click.Path(path_type=Path), metavar="FILE", help="Append each observation, for `plan replay`."
)
@settings_options
def planner_command(settings: Settings, mode: str, period: float, record: Path | None) -> None:
    """Propose how many workers each scenario wants, or see to it.

    Reads the statuses of all groups. The gauges relaygr_workers_wanted{scenario}, _current and
    relaygr_slo_headroom_seconds are for an autoscaler, `relaygr plan show` is for people. With `--mode act` workers
    that run move between scenarios; of several such planners one acts, and the others stand by.

    \b
    Examples:
      relaygr planner --config fleet.toml --bootstrap kafka:9092
      relaygr planner --mode act --config fleet.toml --bootstrap kafka:9092
    """
    from relaygr_stream.ops.planner.process import PlannerOptions, run_planner, scenarios_of
    from relaygr_stream.settings.files import check_writable
    from relaygr_stream.telemetry.process import run_process

    scenarios_of(settings)
    if record is not None:
        check_writable(record, "--record")
    sys.exit(
        run_process("planner", settings, partial(run_planner, options=PlannerOptions(period, record, mode == "act")))
    )


@click.group(name="plan")
def plan_command() -> None:
    """Show what a planner proposes, or would have proposed."""


@plan_command.command(name="show")
@click.option("--json", "as_json", is_flag=True, help="Print the planner's status as a JSON object.")
@settings_options
def show_command(settings: Settings, as_json: bool) -> None:
    """Show the newest plan of the planner that runs.

    Example: relaygr plan show --bootstrap kafka:9092
    """
    import msgspec

    from relaygr_stream.ops.looking import look
    from relaygr_stream.telemetry.printable import print_table, printable, printable_json

    status = look(settings.kafka, _newest(settings))
    if status is None:
        raise RelayError("no planner has published a plan here; start one: relaygr planner --config FILE")
    if as_json:
        click.echo(printable_json(msgspec.json.encode(status).decode()))
        return
    stands_by = ", stands by" if status.state == "standby" else ""
    click.echo(printable(f"planner {status.name}, mode {status.mode}{stands_by}, {_ago(status)}"))
    print_table(_table(status.plan))
    click.echo(printable(status.moves or _moves(status.plan)))
    if status.plan.shared is not None:
        click.echo(printable(_shared(status.plan.shared)))


@plan_command.command(name="replay")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_lines", is_flag=True, help="Print each plan as a JSON object, one a line.")
@settings_options
def replay_command(settings: Settings, file: Path, as_lines: bool) -> None:
    """Say what the planner proposes over a recorded day.

    FILE: observations that `relaygr planner --record FILE` wrote. Prints each change; a proposal that nothing carries
    out stands until the recorded numbers of workers change.

    Example: relaygr plan replay day.ndjson --config fleet.toml
    """
    import msgspec

    from relaygr_stream.ops.planner.process import scenarios_of
    from relaygr_stream.ops.planner.replay import plans, read_observations
    from relaygr_stream.telemetry.printable import print_table

    scenarios = scenarios_of(settings)
    last = None
    for plan in plans(read_observations(file), scenarios):
        if as_lines:
            click.echo(msgspec.json.encode(plan).decode())
        elif last is None or _changes(plan) != _changes(last):
            click.echo(_line(plan))
        last = plan
    if last is None:
        raise RelayError(f"{file} has no observation; `relaygr planner --record FILE` writes one every period")
    if not as_lines:
        print_table(_table(last))


async def _newest(settings: Settings) -> PlannerStatus | None:
    from contextlib import aclosing, suppress

    from relaygr_stream.bus.contents import read_back
    from relaygr_stream.bus.topics import verify_topics
    from relaygr_stream.errors import DecodeError
    from relaygr_stream.wire.planner_status import KEY_PREFIX, read_planner
    from relaygr_stream.wire.topic_files import load_topics
    from relaygr_stream.wire.worker_status import StatusReader

    await verify_topics(settings.kafka)
    topics = load_topics(settings.kafka)
    reader = StatusReader.from_settings(settings, topics)
    await reader.prepare()
    stopped, standby = set(), None
    async with aclosing(read_back(settings.kafka, topics.worker_status.name)) as chunks:
        async for chunk in chunks:
            for record in reversed(chunk):
                if record.value is None and (record.key or b"").startswith(KEY_PREFIX.encode()):
                    stopped.add(record.key)
                with suppress(DecodeError):
                    found = read_planner(record, reader)
                    if found is None or record.key in stopped:
                        continue
                    if found.state != "standby":
                        return found
                    standby = standby or found
    return standby


def _ago(status: PlannerStatus) -> str:
    import time

    seconds = max(0.0, time.time() - status.sent_ms / 1e3)
    return f"{seconds:.0f} s ago" if seconds < 3 * 60 else f"{seconds / 60:.0f} minutes ago: it may have ended"


def _table(plan: FleetPlan) -> Table:
    from relaygr_stream.telemetry.printable import listing, printable

    numbers = ("workers", "wanted", "demand", "headroom ms")
    table = listing(("scenario", *numbers, "reason"), numbers=numbers)
    for name, each in sorted(plan.scenarios.items()):
        headroom = "–" if each.headroom_ms is None else f"{each.headroom_ms:.1f}"
        counts = ("–", "–") if each.served_by else (str(each.workers), str(each.wanted))
        table.add_row(printable(name), *counts, f"{each.demand:.2f}", headroom, printable(each.reason))
    return table


def _moves(plan: FleetPlan) -> str:
    if plan.move is None:
        return "no worker should move now"
    source = "the reserve" if plan.move.source == RESERVE else plan.move.source
    return f"proposes to move a worker from {source} to {plan.move.target}: {plan.move.reason}"


def _shared(group: SharedGroup) -> str:
    first, *others = group.scenarios
    return f"proposes one group for {first} and {' and '.join(others)} (served_by): {group.reason}"


def _groups(plan: FleetPlan) -> list[tuple[str, ScenarioPlan]]:
    return sorted((name, each) for name, each in plan.scenarios.items() if not each.served_by)


def _changes(plan: FleetPlan) -> tuple[object, ...]:
    numbers = {name: (each.workers, each.wanted) for name, each in _groups(plan)}
    return numbers, plan.move and plan.move.target, plan.shared and plan.shared.scenarios


def _line(plan: FleetPlan) -> str:
    from datetime import UTC, datetime

    from relaygr_stream.telemetry.printable import printable

    at = datetime.fromtimestamp(plan.at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    groups = ", ".join(f"{name} {each.workers}, wants {each.wanted}" for name, each in _groups(plan))
    proposals = [] if plan.move is None else [_moves(plan)]
    if plan.shared is not None:
        proposals.append(_shared(plan.shared))
    return printable("; ".join([f"{at}  {groups}", *proposals]))
