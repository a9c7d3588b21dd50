"""`relaygr explain` on the command line; trigger/explain.py implements it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from relaygr_stream.cli.options import SOURCES, check_pace, config_options, refuse_others, scenario_option
from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.load import Config
from relaygr_stream.wire.messages import CostModel


@click.command(name="explain")
@click.option("--events", type=click.Path(path_type=Path), help="Decide on the requests of this log of interactions.")
@click.option("--seconds", type=click.FloatRange(min=0.1, max=3600), help="Observe running triggers for this long.")
@click.option("--requests", type=click.IntRange(min=1), default=100, show_default=True, help="Latest ones of the log.")
@click.option("--rate", type=float, help="Requests of the log per second, Poisson arrivals. [20]")
@click.option("--speed", type=float, help="Keep the log's times, this many times faster, instead of --rate.")
@click.option("--candidates", type=int, default=100, show_default=True, help="Candidates of each ranking.")
@click.option("--workers", type=click.IntRange(1, 10_000), default=1, show_default=True, help="Simulated workers.")
@click.option("--costs", metavar="C0,C1,C2,C3[,C4]", help="A worker's costs in ms. [with --bootstrap: as stated there]")
@click.option("--only", metavar="REASON", help="Show only requests with this decision.")
@click.option("--json", "as_json_lines", is_flag=True, help="One JSON object a line instead of a table.")
@config_options
@scenario_option
def explain_command(config: Config, only: str | None, as_json_lines: bool, **flags: Any) -> None:
    """Show why requests were admitted or not.

    Shows for each request the numbers behind the trigger's decision.

    \b
    Examples:
      relaygr explain --events ml-100k/u.data --rate 200
      relaygr explain --events ml-100k/u.data --bootstrap kafka:9092
      relaygr explain --bootstrap kafka:9092 --seconds 5

    With --events, time is the log's, and the workers are simulated. Their costs are those of --costs, or those that a
    worker states on the Kafka of --bootstrap, or a trigger's defaults for a worker that has measured nothing. With
    --seconds, it observes a running relay; it writes nothing and joins no group. If a trigger runs on that Kafka, its
    settings are used, otherwise the settings given here; stderr names the source. Exits 4 if a partition has no broker.
    """
    from relaygr_stream.bus.away import Away
    from relaygr_stream.cli.explain_table import as_json, as_table, summary
    from relaygr_stream.telemetry.printable import print_table
    from relaygr_stream.trigger.decision import REASONS

    if (flags["events"] is None) == (flags["seconds"] is None):
        raise click.UsageError("give either --events FILE or --seconds N")
    if only is not None and only not in REASONS:
        raise click.UsageError(f"--only {only}: no such decision; write one of {', '.join(REASONS)}")
    seconds, away = flags.pop("seconds"), Away()
    if seconds is not None:
        takes = ("seconds", "only", "as_json_lines", "scenario")
        refuse_others("--seconds observes a relay that runs, with its own requests and costs", *takes, *SOURCES)
        from relaygr_stream.ops.looking import look
        from relaygr_stream.ops.status.overview import LISTEN_S
        from relaygr_stream.trigger.explain import explain_live, running_policy

        policy, whose = look(config.settings.kafka, running_policy(config.settings), LISTEN_S)
        click.echo(whose, err=True)
        rows = look(config.settings.kafka, explain_live(config.settings, policy, seconds, away), seconds)
    else:
        rows = _explain_events(config, **flags)
    shown = [row for row in rows if only is None or row.reason == only]
    if as_json_lines:
        sys.stdout.write(as_json(shown))
    else:
        print_table(as_table(shown))
        click.echo(summary(rows))
    away.check()


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
    from relaygr_stream.ops.looking import look
    from relaygr_stream.ops.status.overview import LISTEN_S
    from relaygr_stream.trigger.explain import running_policy, stated_by_a_worker
    from relaygr_stream.wire.topic_files import load_topics
    from relaygr_stream.wire.worker_status import FALLBACK_COSTS
    from relaygr_stream.workload.explain_log import Fleet, built_in_bytes, explain_log
    from relaygr_stream.workload.replay import Replay, ReplayOptions
    from relaygr_stream.workload.rows import read_log_for

    check_pace(speed, rate)
    settings, policy = config.settings, None
    model, queue_ms, (per_token, alloc) = FALLBACK_COSTS, 0.0, built_in_bytes(settings)
    (source,) = (value.source for value in config.values if value.field.key == "kafka.bootstrap")
    if source != "default":
        status = look(settings.kafka, stated_by_a_worker(settings))
        if status is None:
            raise ConfigError(
                f"no worker runs at {settings.kafka.bootstrap}, which {source} names: start one, or take that away"
            )
        policy, whose = look(settings.kafka, running_policy(settings), LISTEN_S)
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
    log = read_log_for(events, settings.model)
    click.echo(f"{events}: {log.facts()}", err=True)
    fleet = Fleet(workers, load_topics(settings.kafka).lanes, model, per_token, alloc, queue_ms)
    return list(explain_log(Replay(log, options), settings, fleet, policy))


def _cost_model(text: str) -> CostModel:
    from relaygr_stream.wire.worker_status import usable_costs

    try:
        c0, c1, c2, c3, *more = (float(part) for part in text.split(","))
        (c4,) = more or (0.0,)
    except ValueError:
        raise click.UsageError(f"--costs {text}: write four or five numbers, in ms, separated by commas") from None
    if min(c0, c1, c2, c3, c4) < 0:
        raise click.UsageError(f"--costs {text}: no coefficient may be negative")
    if usable_costs(costs := CostModel(c0=c0, c1=c1, c2=c2, c3=c3, c4=c4)) != costs:
        raise click.UsageError(f"--costs {text}: a trigger takes no costs that are all 0, not finite or this large")
    return costs
