"""The command `relaygr trigger`, and `relaygr trigger explain`: flags to options. What they do is service.py's and
explain.py's business."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from relaygr_stream.cli.options import config_options, settings_options
from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.load import Config
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.messages import CostModel


@click.group(name="trigger", invoke_without_command=True)
@settings_options
@click.pass_context
def trigger_command(context: click.Context, settings: Settings) -> None:
    """Run a trigger: read request events, admit those worth a pre-inference.

    Example: relaygr trigger --bootstrap kafka:9092
    """
    if context.invoked_subcommand is not None:
        given = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise click.UsageError(f"options go behind the subcommand: relaygr trigger {context.invoked_subcommand} …")
        return
    from relaygr_stream.telemetry.process import run_process
    from relaygr_stream.trigger.service import run_trigger

    sys.exit(run_process("trigger", settings, run_trigger))


@trigger_command.command(name="explain")
@click.option("--events", type=click.Path(path_type=Path), help="Decide on the requests of this log of interactions.")
@click.option("--seconds", type=click.FloatRange(min=0.1, max=3600), help="Look on at running triggers instead.")
@click.option("--requests", type=click.IntRange(min=1), default=100, show_default=True, help="Of the log, its latest.")
@click.option("--rate", type=float, help="Requests of the log per second, Poisson arrivals. [20]")
@click.option("--speed", type=float, help="Keep the log's times, this many times faster, instead of --rate.")
@click.option("--candidates", type=int, default=100, show_default=True, help="Items that each ranking will bring.")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="That serve the log.")
@click.option("--costs", metavar="C0,C1,C2,C3[,C4]", help="Of a worker, in ms; with --bootstrap those stated there.")
@click.option("--only", metavar="REASON", help="Show only requests with this decision.")
@click.option("--json", "as_json_lines", is_flag=True, help="One JSON object a line instead of a table.")
@config_options
def explain_command(config: Config, only: str | None, as_json_lines: bool, **flags: Any) -> None:
    """Show for each request the numbers behind its decision.

    \b
    Examples:
      relaygr trigger explain --events ml-100k/u.data --rate 200
      relaygr trigger explain --events ml-100k/u.data --bootstrap kafka:9092
      relaygr trigger explain --bootstrap kafka:9092 --seconds 5

    With --events, time is the log's, and the workers are simulated; their costs are those given, or those that a worker
    states on the Kafka of --bootstrap, or the ones that triggers take for a worker that has measured nothing. With
    --seconds, what really happens is looked on at: nothing is written, no group is joined. Where a trigger runs on that
    Kafka, its settings decide, and otherwise those given here; stderr says which.
    """
    from relaygr_stream.telemetry.printable import SafeConsole
    from relaygr_stream.trigger.decision import REASONS
    from relaygr_stream.trigger.explain import as_json, as_table, summary

    if (flags["events"] is None) == (flags["seconds"] is None):
        raise click.UsageError("give either --events FILE or --seconds N")
    if only is not None and only not in REASONS:
        raise click.UsageError(f"--only {only}: one of {', '.join(REASONS)}")
    seconds = flags.pop("seconds")
    if seconds is not None:
        from relaygr_stream.trigger.explain_live import explain_live, running_policy

        policy, whose = asyncio.run(running_policy(config.settings))
        click.echo(whose, err=True)
        rows = asyncio.run(explain_live(config.settings, policy, seconds))
    else:
        rows = _explain_events(config, **flags)
    shown = [row for row in rows if only is None or row.reason == only]
    if as_json_lines:
        sys.stdout.write(as_json(shown))
        return
    console = SafeConsole(width=None if sys.stdout.isatty() else 200)
    console.print(as_table(shown))
    console.print(summary(rows))


def _explain_events(
    config: Config,
    *,
    events: Path,
    requests: int,
    rate: float | None,
    speed: float | None,
    candidates: int,
    workers: int,
    costs: str | None,
) -> list[Any]:
    from relaygr_stream.bus.topics import load_topics
    from relaygr_stream.lab.workload.explain_log import GRANULE_TOKENS, Fleet, built_in_bytes_per_token, explain_log
    from relaygr_stream.lab.workload.logs import read_log
    from relaygr_stream.lab.workload.replay import Replay, ReplayOptions
    from relaygr_stream.trigger.explain_live import running_policy, stated_by_a_worker
    from relaygr_stream.wire.costs import FALLBACK_COSTS

    if speed is not None and rate is not None:
        raise click.UsageError("--speed keeps the log's times, --rate replaces them; give one of them")
    settings, policy = config.settings, None
    model, per_token, queue_ms = FALLBACK_COSTS, built_in_bytes_per_token(settings), 0.0
    alloc = GRANULE_TOKENS * per_token
    if any(value.field.key == "kafka.bootstrap" and value.source != "default" for value in config.values):
        status = asyncio.run(stated_by_a_worker(settings))
        if status is None:
            raise ConfigError(f"no worker states itself at {settings.kafka.bootstrap}; start one, or leave it out")
        policy, whose = asyncio.run(running_policy(settings))
        click.echo(whose, err=True)
        model, per_token, alloc, queue_ms = status.costs, status.bytes_per_token, status.alloc_bytes, status.queue_ms
    if costs is not None:
        model = _cost_model(costs)
    shape = {"rate": rate} if rate is not None else {}
    options = ReplayOptions(
        requests=requests,
        speed=speed,
        candidates=candidates,
        max_prefix=settings.relay.max_prefix_tokens,
        **shape,  # type: ignore[arg-type]
    )
    fleet = Fleet(workers, load_topics(settings.kafka).lanes, model, per_token, alloc, queue_ms)
    return list(explain_log(Replay(read_log(events), options), settings, fleet, policy))


def _cost_model(text: str) -> CostModel:
    try:
        c0, c1, c2, c3, *more = (float(part) for part in text.split(","))
        (c4,) = more or (0.0,)
    except ValueError:
        raise click.UsageError(f"--costs {text}: four or five numbers, in ms, between commas") from None
    if min(c0, c1, c2, c3, c4) < 0:
        raise click.UsageError(f"--costs {text}: no coefficient may be negative")
    return CostModel(c0=c0, c1=c1, c2=c2, c3=c3, c4=c4)
