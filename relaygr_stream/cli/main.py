"""The `relaygr` command. Each subcommand imports only what it needs: `relaygr trigger` does not load torch."""

from __future__ import annotations

import asyncio
import io
import sys
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final

import click

from relaygr_stream.cli.options import config_options, scenario_option, settings_options
from relaygr_stream.errors import ConfigError, PartitionsAway, RelayError
from relaygr_stream.ops.stopping import Interrupted, stopped
from relaygr_stream.settings.files import FILE_TROUBLE, discard_output
from relaygr_stream.settings.load import Config
from relaygr_stream.settings.schema import Settings

#: Entry points of this group are commands of `relaygr`, too: those of the laboratory, the package relaygr-lab.
_ENTRY_POINTS: Final = "relaygr.commands"
#: What the laboratory brings, so that its absence can be told from a typing error.
_LABORATORY: Final = frozenset({"bench", "demo", "simulate"})
#: The exit code of a command that left out partitions without a broker.
PARTLY: Final = 4
#: Commands in modules of their own, which are imported on demand.
_COMMANDS: Final = {
    "broker": "relaygr_stream.cli.broker:broker_command",
    "dashboard": "relaygr_stream.cli.dashboard:dashboard_command",
    "dead-letters": "relaygr_stream.cli.dead_letters:dead_letters_command",
    "explain": "relaygr_stream.cli.explain:explain_command",
    "history": "relaygr_stream.cli.history:history_command",
    "lanes": "relaygr_stream.cli.lanes:lanes_command",
    "model": "relaygr_stream.cli.model:model_command",
    "plan": "relaygr_stream.cli.planner:plan_command",
    "planner": "relaygr_stream.cli.planner:planner_command",
    "replay": "relaygr_stream.cli.replay:replay_command",
    "rollout": "relaygr_stream.cli.rollout:rollout_command",
    "status": "relaygr_stream.cli.status:status_command",
    "up": "relaygr_stream.cli.up:up_command",
}


class _Group(click.Group):
    """Imports commands on demand; prints this package's errors as one line on stderr."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted({*super().list_commands(context), *_COMMANDS, *entry_points(group=_ENTRY_POINTS).names})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in _COMMANDS:
            module, _, attribute = _COMMANDS[name].partition(":")
            command = getattr(import_module(module), attribute)
        elif (found := super().get_command(context, name)) is not None:
            return found
        elif installed := tuple(entry_points(group=_ENTRY_POINTS, name=name)):
            command = installed[0].load()
        elif name in _LABORATORY:
            raise click.UsageError(
                f"`relaygr {name}` is part of the laboratory, which is not installed: `make setup` in a clone installs "
                f"it, and so does `pip install ./relaygr_lab`"
            )
        else:
            return None
        assert isinstance(command, click.Command)
        return command

    def main(self, *args: Any, **options: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # not every locale's encoding has … or ✓
        try:
            return super().main(*args, **options)
        except OSError as error:
            if error.errno not in FILE_TROUBLE:
                raise
            discard_output()
            self._print_error(error)
            sys.exit(1)

    def invoke(self, context: click.Context) -> object:
        from relaygr_stream.telemetry.logs import print_plain_tracebacks

        print_plain_tracebacks()  # a process sets its own format later
        try:
            result = super().invoke(context)
            sys.stdout.flush()  # reports a full disk here, not in the interpreter's shutdown
        except (KeyboardInterrupt, Interrupted) as interrupt:
            stopped("stopped", *interrupt.args)
        except RelayError as error:
            from relaygr_stream.telemetry.process import error_code

            self._print_error(error)
            partly = isinstance(error, PartitionsAway)
            context.exit(PARTLY if partly else error_code(error, context.invoked_subcommand or ""))
        return result

    def _print_error(self, error: Exception) -> None:
        from relaygr_stream.telemetry.printable import printable_lines

        click.echo(printable_lines(f"error: {error}"), err=True)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="relaygr-stream", prog_name="relaygr")
def main() -> None:
    """RelayGR Stream: rank with long user histories inside a tight P99.

    The relay computes prefix KV while retrieval still runs, on the worker that will rank. Start with `relaygr demo`;
    `relaygr COMMAND --help` describes each command.

    Sources of settings: defaults < TOML files (--config) < environment (RELAYGR_SECTION_KEY) < flags (--set).
    """


@main.command()
@settings_options
@scenario_option
@click.option("--reserve", is_flag=True, help="Stand by, without a model, until a planner moves it to a scenario.")
def worker(settings: Settings, reserve: bool) -> None:
    """Run a worker, which scores ranking requests.

    It holds prefix KV on one device; run one worker per device.

    Example: relaygr worker --profile workers/cpu.toml --set worker.name=w1 --bootstrap kafka:9092
    """
    if reserve and settings.scenario:
        raise click.UsageError("a worker of the reserve serves no scenario yet: leave out --scenario or --reserve")
    settings = settings.standing_by() if reserve else settings
    from relaygr_stream.models.devices import select_device
    from relaygr_stream.telemetry.process import run_process

    select_device(settings.worker.device)  # before any other import of torch, so that a missing driver is reported
    from relaygr_stream.handover.build import handover_for
    from relaygr_stream.worker.run import run_worker

    sys.exit(run_process("worker", settings, partial(run_worker, make_handover=handover_for)))


@main.command()
@settings_options
@scenario_option
@click.option("--here", is_flag=True, help="Stay in this group, also where workers were moved to another in place.")
def trigger(settings: Settings, here: bool) -> None:
    """Run a trigger, which admits request events.

    It reads request events, and sends a pre-infer signal to the worker for those that are worth a pre-inference.

    Example: relaygr trigger --bootstrap kafka:9092
    """
    from relaygr_stream.telemetry.process import run_process
    from relaygr_stream.trigger.service import run_trigger

    sys.exit(run_process("trigger", settings, partial(run_trigger, follows=not here)))


@main.command()
@settings_options
def gateway(settings: Settings) -> None:
    """Run a gateway: announce, rank and cancel over HTTP.

    It serves JSON and MessagePack, and its own documentation at /docs. Needs the extra `gateway`. Any number of
    gateways may run; each takes any request.

    \b
    Example: relaygr gateway --bootstrap kafka:9092
             curl localhost:8080/docs
    """
    from relaygr_stream.telemetry.process import run_process

    try:
        from relaygr_stream.gateway.service import run_gateway
    except ImportError as error:
        raise ConfigError(f"{error}: install this package with its extra `gateway`") from error
    sys.exit(run_process("gateway", settings, run_gateway))


@main.group()
def topics() -> None:
    """Create, check and show the topics (topics/*.toml)."""


@topics.command()
@click.option("--alter", is_flag=True, help="Change existing topics to match their files.")
@settings_options
@scenario_option
def apply(settings: Settings, alter: bool) -> None:
    """Create the topics that are missing; then verify all.

    With scenarios in the settings and no --scenario, those of all their groups, and the routes to these.

    Existing topics keep their number of lanes: `relaygr lanes grow` adds some while everything serves. With --alter and
    kafka.partitions they get so many; stop all processes first (docs/how-to/kafka.md).
    """
    from relaygr_stream.bus.away import Away
    from relaygr_stream.bus.topics import apply_topics

    report = asyncio.run(apply_topics(settings.kafka, alter=alter))
    click.echo(report)
    if settings.scenarios and not settings.scenario:
        from relaygr_stream.ops.scenarios import make_groups

        asyncio.run(make_groups(settings, click.echo, alter=alter))
    Away.from_rows(report.rows).check()


@topics.command()
@settings_options
@scenario_option
def verify(settings: Settings) -> None:
    """Check that every topic exists and that every setting matches its file; name each difference.

    Exits 4 if only a partition has no broker.
    """
    from relaygr_stream.bus.away import Away
    from relaygr_stream.bus.topics import uncompared, verify_topics
    from relaygr_stream.ops.looking import look

    rows = look(settings.kafka, verify_topics(settings.kafka, strict=True))
    hidden = uncompared(rows)
    alike = "have the partitions and replicas of their files" if hidden else "match their files"
    click.echo(f"all {len(rows)} topics {alike}" + (f"\n{hidden}" if hidden else ""))
    Away.from_rows(rows).check()


@topics.command()
@settings_options
@scenario_option
def show(settings: Settings) -> None:
    """Show each topic's file beside the cluster's values."""
    from relaygr_stream.bus.away import Away
    from relaygr_stream.bus.topics import describe_topics
    from relaygr_stream.cli.topics_table import render_topics
    from relaygr_stream.ops.looking import look
    from relaygr_stream.telemetry.printable import print_table

    rows = look(settings.kafka, describe_topics(settings.kafka))
    print_table(render_topics(rows))
    Away.from_rows(rows).check()


@main.group(name="config")
def config_group() -> None:
    """Show the configuration."""


@config_group.command(name="show")
@click.option("--markdown", is_flag=True, help="Print a Markdown table of the defaults, for the documentation.")
@config_options
def config_show(config: Config, markdown: bool) -> None:
    """Print every setting: its effective value, the value's source, and the meaning."""
    from relaygr_stream.cli.config_table import render_settings_markdown, render_settings_table
    from relaygr_stream.telemetry.printable import print_table

    if markdown:
        click.echo(render_settings_markdown())
    else:
        print_table(render_settings_table(config))
