"""`relaygr replay` on the command line; workload/publish.py implements it."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Any

import click

from relaygr_stream.cli.options import check_pace, config_options, flag_of, head_start, taken, traffic_options
from relaygr_stream.settings.files import check_writable, write_private
from relaygr_stream.settings.load import Config, with_packaged_model
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.process import ProcessContext, run_process
from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema
from relaygr_stream.workload.columns import ColumnMap
from relaygr_stream.workload.formats import FORMATS
from relaygr_stream.workload.generator import GeneratorOptions
from relaygr_stream.workload.items import StageDelay
from relaygr_stream.workload.packaged import ITEM_EXPONENT, is_packaged, packaged_items
from relaygr_stream.workload.publish import LogOptions, PublishOptions, publish
from relaygr_stream.workload.replay import ReplayOptions
from relaygr_stream.workload.report import PublishReport, print_report
from relaygr_stream.workload.values import UNITS

#: Flags of one source only; given with the other one, they are refused.
LOG_FLAGS = ("format", "columns", "time_unit", "item_ids", "speed", "which", "min_history")
GENERATOR_FLAGS = (
    "arrivals",
    "tide",
    "users",
    "zipf",
    "revisit",
    "return_s",
    "length",
    "sigma",
    "mix",
    "growth",
    "items",
    "item_exponent",
)


@click.command(name="replay")
@click.option("--events", type=click.Path(path_type=Path), help="Replay this log of interactions.")
@click.option("--generate", is_flag=True, help="Send a generated workload instead.")
@click.option(
    "--requests", type=click.IntRange(min=0), help="Requests to send; 0 with --generate: until stopped. [1000]"
)
@traffic_options(
    rate="20",
    arrivals="",
    tide="",
    users="2000",
    zipf="1",
    revisit="30%",
    return_s="2",
    length="512, at most half of relay.max_prefix_tokens",
    sigma="0.8",
    mix="",
    growth="3",
    suffix="8",
    candidates="100, the true next item included",
    stage_delay="80",
    stage_sigma="0.25",
)
@click.option("--timeout", type=float, help="Seconds a ranking may take. [client.timeout_ms]")
@click.option("--seed", type=click.IntRange(min=0), default=7, show_default=True, help="Seed of every random choice.")
@click.option("--mode", type=click.Choice(["auto", "full"]), default="auto", show_default=True, help="full: no relay.")
@click.option("--announce/--no-announce", default=True, show_default=True, help="Publish request events.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report to this file."
)
@click.option("--format", type=click.Choice(FORMATS), help="Format of --events. [detected]")
@click.option(
    "--columns", metavar="user=A,item=B,action=C,time=D", help="Names (or numbers from 1) of the log's columns."
)
@click.option(
    "--features",
    type=click.Path(path_type=Path),
    help="JSON file with the list `features` that the model reads, such as its checkpoint's config.json. Generated "
    "requests have values of 0. [none]",
)
@click.option("--time-unit", type=click.Choice(UNITS), help="Unit of the log's times. [by magnitude]")
@click.option(
    "--item-ids", type=click.Choice(["number", "name"]), help="number: keep item ids; name: number them anew."
)
@click.option("--speed", type=float, help="Keep the log's times, this many times faster, instead of --rate.")
@click.option(
    "--which", type=click.Choice(["all", "last"]), help="Requests from all interactions, or each user's last. [all]"
)
@click.option("--min-history", type=int, help="Behaviours a user must have before a request. [16]")
@click.option(
    "--items",
    type=int,
    help="Generated items. [those of the packaged model; with another one 50000, at most its vocabulary]",
)
@click.option("--item-exponent", type=float, help="Zipf exponent over items. [0.25 for the packaged model, else 1.0]")
@config_options
def replay_command(config: Config, json_path: Path | None, **flags: Any) -> None:
    """Replay a log and measure its rankings.

    Sends a log of interactions through the relay, or a generated workload with --generate: where nothing in [model] is
    set, one for the packaged model, which `relaygr up` serves then.

    Sends a request event and a ranking request for each interaction. Prints HR@10 and NDCG@10 of the rankings beside
    those of chance and popularity, latencies from the scheduled send time, prefix hits and errors. Exits 1 if a request
    was not answered.

    \b
    Examples:
      relaygr replay --events ml-100k/u.data
      relaygr replay --events shop.csv --columns user=uid,item=sku,action=type,time=ts --speed 60
      relaygr replay --events shop.parquet --features checkpoint/config.json
      relaygr replay --generate --rate 100 --requests 5000 --json out/report.json
    """
    settings = with_packaged_model(config) if flags["generate"] else config.settings
    options = build_options(settings, flags)
    if json_path is not None:
        check_writable(json_path, "--json")
    reports: list[PublishReport] = []

    async def main(ctx: ProcessContext) -> None:
        reports.append(await publish(options, ctx))

    code = run_process("replay", settings, main)
    for report in reports:
        print_report(report)
        if json_path is not None:
            write_private(json_path, report.json())
        code = code or int(not report.complete)
    sys.exit(code)


def build_options(settings: Settings, flags: dict[str, Any]) -> PublishOptions:
    """The options of the flags. Raises click.UsageError or ConfigError if flags clash."""
    events, generate = flags["events"], flags["generate"]
    if (events is None) != generate:
        raise click.UsageError("give either --events FILE or --generate")
    for name in GENERATOR_FLAGS if events is not None else LOG_FLAGS:
        if flags[name] is not None:
            other = "--generate" if events is not None else "--events"
            raise click.UsageError(f"{flag_of(name)} goes with {other} only")
    check_pace(flags["speed"], flags["rate"])
    if flags["timeout"] is not None and not 0 < flags["timeout"] <= 3600:
        raise click.UsageError(f"--timeout {flags['timeout']:g}: must be within 0…3600 seconds")
    head = head_start(flags)
    if not 0 < head.get("median_ms", 1.0) <= 60_000:
        raise click.UsageError(f"--stage-delay {flags['stage_delay']:g}: must be within 0…60000 ms")
    shape = taken(flags, "rate", "suffix", "candidates", "seed")
    shape |= {"max_prefix": settings.relay.max_prefix_tokens, "delay": StageDelay(**head)}
    # Workers keep the ids of answered requests: a second run's requests must not count as duplicates of the first's.
    shape["run"] = f"{secrets.token_hex(4)}-"
    features = NO_FEATURES if flags["features"] is None else FeatureSchema.read(flags["features"])
    requests = 1000 if flags["requests"] is None else flags["requests"]
    source: LogOptions | GeneratorOptions
    if events is not None:
        if requests == 0:
            raise click.UsageError("--requests 0 (until stopped) goes with --generate only")
        source = LogOptions(
            path=events,
            columns=None if flags["columns"] is None else ColumnMap.parse(flags["columns"]),
            features=features,
            replay=ReplayOptions(requests=requests, **taken(flags, "speed", "which", "min_history"), **shape),
            **taken(flags, "format", "time_unit", "item_ids"),
        )
    else:
        if is_packaged(settings.model):
            shape["items"] = max(packaged_items(), 2 * shape.get("candidates", 0))
            shape["item_exponent"] = ITEM_EXPONENT
        else:
            from relaygr_stream.models.loading import config_of

            shape["items"] = min(50_000, config_of(settings.model).vocab)
        shape["length"] = min(GeneratorOptions.length, settings.relay.max_prefix_tokens / 2)
        source = GeneratorOptions(features=features, **(shape | taken(flags, *GENERATOR_FLAGS)))
    return PublishOptions(
        source=source,
        requests=requests or None,
        timeout_ms=None if flags["timeout"] is None else flags["timeout"] * 1000,
        mode=flags["mode"],
        announce=flags["announce"],
    )
