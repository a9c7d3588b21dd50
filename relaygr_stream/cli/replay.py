"""The command `relaygr publish`: flags to options, and the exit code. What they do is publish.py's business."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Any

import click

from relaygr_stream.cli.options import settings_options
from relaygr_stream.lab.workload.columns import ColumnMap
from relaygr_stream.lab.workload.formats import FORMATS
from relaygr_stream.lab.workload.generator import GeneratorOptions
from relaygr_stream.lab.workload.items import StageDelay
from relaygr_stream.lab.workload.publish import LogOptions, PublishOptions, publish
from relaygr_stream.lab.workload.replay import ReplayOptions
from relaygr_stream.lab.workload.report import PublishReport, print_report
from relaygr_stream.settings.files import check_writable
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.process import ProcessContext, run_process

#: Flags that mean something for one source only; given for the other one, they are refused rather than ignored.
LOG_FLAGS = ("format", "columns", "time_unit", "item_ids", "speed", "which", "min_history")
GENERATOR_FLAGS = (
    "users",
    "user_exponent",
    "items",
    "item_exponent",
    "length_median",
    "length_sigma",
    "revisit",
    "growth",
)


@click.command(name="publish")
@click.option("--events", type=click.Path(path_type=Path), help="Replay this log of interactions.")
@click.option("--generate", is_flag=True, help="Send a generated workload instead.")
@click.option(
    "--requests", type=click.IntRange(min=0), help="Requests to send; 0 with --generate: until stopped. [1000]"
)
@click.option("--rate", type=float, help="Requests per second, Poisson arrivals. [20]")
@click.option("--suffix", type=int, default=8, show_default=True, help="Latest behaviours sent at ranking only.")
@click.option(
    "--candidates", type=int, default=100, show_default=True, help="Items to rank, the true next one included."
)
@click.option(
    "--stage-delay", type=float, default=80.0, show_default=True, help="Median ms from event to ranking request."
)
@click.option("--timeout", type=float, help="Seconds a ranking may take. [client.timeout_ms]")
@click.option("--seed", type=click.IntRange(min=0), default=7, show_default=True, help="Of every random choice.")
@click.option("--mode", type=click.Choice(["auto", "full"]), default="auto", show_default=True, help="full: no relay.")
@click.option("--announce/--no-announce", default=True, show_default=True, help="Whether to publish request events.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report here."
)
@click.option("--format", type=click.Choice(FORMATS), help="Of --events; recognised when not given.")
@click.option(
    "--columns", metavar="user=A,item=B,action=C,time=D", help="Names (or numbers from 1) of the log's columns."
)
@click.option(
    "--time-unit", type=click.Choice(["s", "ms", "iso"]), help="Of the log's times; by magnitude when not given."
)
@click.option(
    "--item-ids", type=click.Choice(["number", "name"]), help="Keep item ids as numbers, or number them anew."
)
@click.option("--speed", type=float, help="Keep the log's times, this many times faster, instead of --rate.")
@click.option(
    "--which", type=click.Choice(["all", "last"]), help="Requests from all interactions, or each user's last. [all]"
)
@click.option("--min-history", type=int, help="Behaviours a user must have before a request. [16]")
@click.option("--users", type=int, help="Generated users. [2000]")
@click.option("--user-exponent", type=float, help="Zipf exponent over users. [1.0]")
@click.option("--items", type=int, help="Generated items. [50000, at most model.vocab]")
@click.option("--item-exponent", type=float, help="Zipf exponent over items. [1.0]")
@click.option("--length-median", type=float, help="Median history of a new user (log-normal). [512]")
@click.option("--length-sigma", type=float, help="Sigma of that log-normal. [0.8]")
@click.option("--revisit", type=float, help="Share of requests by a recent user. [0.3]")
@click.option("--growth", type=float, help="Mean new behaviours of a returning user. [3]")
@settings_options
def publish_command(settings: Settings, json_path: Path | None, **flags: Any) -> None:
    """Send request events and rankings: a replayed log, or a generated workload.

    At the end: HR@10 and NDCG@10 of the served rankings beside chance and popularity, latencies from the scheduled send
    time, prefix hits, errors. Exits 0 if every request was answered, 1 if not.

    \b
    Examples:
      relaygr publish --events ml-100k/u.data
      relaygr publish --events shop.csv --columns user=uid,item=sku,action=type,time=ts --speed 60
      relaygr publish --generate --rate 100 --requests 5000 --json out/report.json
    """
    options = build_options(settings, flags)
    if json_path is not None:
        check_writable(json_path, "--json")
    reports: list[PublishReport] = []

    async def main(ctx: ProcessContext) -> None:
        reports.append(await publish(options, ctx))

    code = run_process("publish", settings, main)
    for report in reports:
        print_report(report)
        if json_path is not None:
            json_path.write_bytes(report.json())
        code = code or int(not report.complete)
    sys.exit(code)


def build_options(settings: Settings, flags: dict[str, Any]) -> PublishOptions:
    """The options that the flags ask for; raises click.UsageError or ConfigError where they clash."""
    events, generate = flags["events"], flags["generate"]
    if (events is None) != generate:
        raise click.UsageError("give either --events FILE or --generate")
    for name in GENERATOR_FLAGS if events is not None else LOG_FLAGS:
        if flags[name] is not None:
            other = "--generate" if events is not None else "--events"
            raise click.UsageError(f"--{name.replace('_', '-')} goes with {other} only")
    if flags["speed"] is not None and flags["rate"] is not None:
        raise click.UsageError("--speed keeps the log's times, --rate replaces them; give one of them")
    if flags["timeout"] is not None and not 0 < flags["timeout"] <= 3600:
        raise click.UsageError(f"--timeout {flags['timeout']:g}: must be within 0…3600 seconds")
    if not 0 < flags["stage_delay"] <= 60_000:
        raise click.UsageError(f"--stage-delay {flags['stage_delay']:g}: must be within 0…60000 ms")

    def given(*names: str) -> dict[str, Any]:
        return {name: flags[name] for name in names if flags[name] is not None}

    shape = given("rate", "suffix", "candidates", "seed")
    shape |= {"max_prefix": settings.relay.max_prefix_tokens, "delay": StageDelay(flags["stage_delay"])}
    # Workers remember the ids of answered requests: a second run must not look like the first one's echo.
    shape["run"] = f"{secrets.token_hex(4)}-"
    requests = 1000 if flags["requests"] is None else flags["requests"]
    source: LogOptions | GeneratorOptions
    if events is not None:
        if requests == 0:
            raise click.UsageError("--requests 0 (until stopped) goes with --generate only")
        source = LogOptions(
            path=events,
            columns=None if flags["columns"] is None else ColumnMap.parse(flags["columns"]),
            replay=ReplayOptions(requests=requests, **given("speed", "which", "min_history"), **shape),
            **given("format", "time_unit", "item_ids"),
        )
    else:
        shape["items"] = min(50_000, settings.model.vocab)
        source = GeneratorOptions(**(shape | given(*GENERATOR_FLAGS)))
    return PublishOptions(
        source=source,
        requests=requests or None,
        timeout_ms=None if flags["timeout"] is None else flags["timeout"] * 1000,
        mode=flags["mode"],
        announce=flags["announce"],
    )
