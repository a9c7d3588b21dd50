"""`relaygr rollout`: another model, or another number of lanes, for more and more users."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Final

import click

from relaygr_stream.cli.options import SOURCES, given, parse_flags, parse_share, refuse_others, source_options
from relaygr_stream.ops.stopping import run_until_stopped

#: Seconds in a unit of --hold.
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
#: Parameters that --back takes.
ASKED_BACK: Final = ("back", "group", *SOURCES)
_NAME = re.compile(r"(default|[a-z0-9][a-z0-9-]{0,23})")


def _seconds(_: click.Context, __: click.Parameter, value: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", value)
    if found is None:
        raise click.BadParameter(f"{value!r}: write 30s, 10m or 1h")
    return float(found[1]) * _UNITS[found[2] or "s"]


def _steps(_: click.Context, __: click.Parameter, value: str) -> list[float]:
    """Percent, with or without the sign."""
    return [parse_share(part if part.strip().endswith("%") else f"{part}%") for part in value.split(",")]


def group_name(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """The group that an option names; "" for `default`."""
    if value is not None and not _NAME.fullmatch(value):
        raise click.BadParameter(f"{value!r}: up to 24 of a–z, 0–9 and -, or `default`")
    return "" if value == "default" else value


@click.command(name="rollout")
@click.option(
    "--checkpoint",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False),
    help="Start workers with this model here, with `relaygr up`.",
)
@click.option(
    "--in-place",
    is_flag=True,
    help="Workers that run serve the new model, one after the other, where memory has no room for two versions.",
)
@click.option(
    "--workers", default=1, show_default=True, type=click.IntRange(1, 256), help="So many; with --checkpoint."
)
@click.option("--devices", metavar="DEVICE[,DEVICE…]", help="Their devices, in turn; with --checkpoint.")
@click.option("--canary", default="5%", show_default=True, callback=_steps, help="Part of the users in the first step.")
@click.option("--steps", default="25,50,100", show_default=True, callback=_steps, help="Percent in the next ones.")
@click.option("--hold", default="10m", show_default=True, callback=_seconds, help="How long a step lasts at least.")
@click.option(
    "--group", metavar="NAME", callback=group_name, help="Group to move to. [next, or default if all are in next]"
)
@click.option(
    "--lanes", default=0, type=click.IntRange(0, 10_000), help="Lanes of a group that is made now. [as before]"
)
@click.option("--cold", is_flag=True, help="Do not prefill users in the group before they move to it.")
@click.option(
    "--unlike", is_flag=True, help="Move users though the new model ranks the same candidates in another order."
)
@click.option("--back", is_flag=True, help="Only move all users back to the group they came from.")
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port of /metrics. [any free one]")
@source_options
@click.option("--bootstrap", metavar="HOST:PORT", help="Kafka brokers; short for --set kafka.bootstrap=…")
def rollout_command(
    checkpoint: str | None,
    in_place: bool,
    workers: int,
    devices: str | None,
    canary: list[float],
    steps: list[float],
    hold: float,
    group: str | None,
    lanes: int,
    cold: bool,
    unlike: bool,
    back: bool,
    port: int,
    files: tuple[str, ...],
    assignments: tuple[str, ...],
    bootstrap: str | None,
) -> None:
    """Move users to another group of workers by steps, and back by itself where that group is worse.

    A group has topics, triggers and workers of its own, behind kafka.prefix and its name: another model, or another
    number of lanes. This command makes its topics. With --checkpoint it starts a trigger and workers on this host, and
    keeps them to its end; without, start them with RELAYGR_KAFKA_PREFIX set to the group's prefix. When each lane has
    an owner, they rank copies of what was just ranked in the old group. Nobody moves where they put the same candidates
    in another order, as a model with other item ids does. Then users move, each to stay. All go back, and it exits with
    1, where answers of the new group fail, audits deviate, lanes have no owner, late answers or P99 grow, or scores
    have another distribution.

    \b
    Examples:
      relaygr rollout --checkpoint models/new --hold 10m
      relaygr rollout --checkpoint models/new --in-place
      relaygr rollout --group next --canary 1% --steps 10,50,100
      relaygr rollout --back
    """
    on_line = given()
    if back:
        refuse_others("--back moves all users back, and does nothing else", *ASKED_BACK)
    if in_place and (flags := [flag for name, flag in on_line.items() if name in ("workers", "devices")]):
        raise click.UsageError(f"--in-place starts no workers, those that run move: leave out {', '.join(flags)}")
    if checkpoint is None and (flags := [flag for name, flag in on_line.items() if name in ("workers", "devices")]):
        raise click.UsageError(
            f"{' and '.join(flags)}: for workers that --checkpoint starts here; give it, or leave out these"
        )
    import msgspec

    from relaygr_stream.ops.rollout.process import RolloutRequest, run_rollout, take_back
    from relaygr_stream.ops.rollout.run import Plan
    from relaygr_stream.settings.load import load_settings
    from relaygr_stream.telemetry.process import run_process

    settings = load_settings(files, {"kafka.bootstrap": bootstrap, **parse_flags(assignments)}).settings
    if back:
        line = "stopped; `relaygr status` says where the users are"
        run_until_stopped(take_back(settings, group, click.echo), line=line)
        return
    shared = [
        *(argument for file in files for argument in ("--config", file)),
        *(argument for assignment in assignments for argument in ("--set", assignment)),
        *(("--bootstrap", bootstrap) if bootstrap else ()),
    ]
    up, model = (shared, "") if in_place else (None, None)
    if checkpoint is not None:
        if in_place and settings.model.factory:
            raise click.UsageError("--in-place: workers take a checkpoint, not model.factory, from another process")
        if not (settings.model.factory or (Path(checkpoint) / "config.json").is_file()):
            raise click.UsageError(f"--checkpoint {checkpoint}: no checkpoint is there, since it has no config.json")
        if in_place:
            model = str(Path(checkpoint).resolve())  # a link may name another folder when a worker starts again
        else:
            of_group = ("--set", f"model.checkpoint={checkpoint}", "--workers", str(workers))
            up = [*shared, *of_group, *(("--devices", devices) if devices else ())]
    asked = RolloutRequest(Plan.from_shares([*canary, *steps], hold), group, lanes, up, not cold, unlike, model)
    settings = msgspec.structs.replace(settings, telemetry=msgspec.structs.replace(settings.telemetry, port=port))
    sys.exit(run_process("rollout", settings, partial(run_rollout, asked=asked, say=click.echo)))
