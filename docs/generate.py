"""Fills in what the code knows: settings, metrics, commands. A hook of mkdocs (mkdocs.yml); nothing it makes is kept.

A page says `<!-- generated: NAME -->` where the text belongs. A name that does not exist ends the build, and so does a
note on a metric that does not exist.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from relaygr_stream.bus.renewed import RenewalsCollector
from relaygr_stream.cli.config_table import render_settings_markdown
from relaygr_stream.cli.main import main
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.gateway.metrics import Metrics as GatewayMetrics
from relaygr_stream.handover.desk import HandoverMetrics
from relaygr_stream.settings.load import REMOVED, RETIRED, replacement_of
from relaygr_stream.telemetry.loopwatch import LoopWatch
from relaygr_stream.telemetry.otlp import SpanCounts
from relaygr_stream.telemetry.process import _describe
from relaygr_stream.telemetry.server import export_readiness
from relaygr_stream.trigger.metrics import TriggerMetrics
from relaygr_stream.worker.histories import HistoryMetrics
from relaygr_stream.worker.metrics import WorkerMetrics

NOTES: Final = Path(__file__).parent / "reference" / "metrics.toml"
MARKER: Final = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
#: What Prometheus adds to a name when it exports it.
SUFFIX: Final = {"counter": "_total", "info": "_info"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for each page."""
    return MARKER.sub(lambda found: GENERATED[found[1]](), markdown)


def settings_tables() -> str:
    """One table a section of the settings: key, default, what is accepted, meaning."""
    heading, rule, *rows = render_settings_markdown().splitlines()
    sections: dict[str, list[str]] = {}
    for row in rows:
        section = row.removeprefix("| `").partition(".")[0]
        sections.setdefault(section, [f"## {section}\n", heading, rule]).append(row)
    return "\n\n".join("\n".join(lines) for lines in sections.values())


def former_settings() -> str:
    """Former settings, and what is in their place."""
    former = {key: replacement_of(key) for key in RETIRED} | {key: f"no effect: {why}" for key, why in REMOVED.items()}
    rows = [f"| `{key}` | {now} |" for key, now in sorted(former.items())]
    return "\n".join(["| former setting | now |", "| --- | --- |", *rows])


def metric_tables() -> str:
    """One table a kind of process: name, type, labels, meaning. Help texts, unless metrics.toml says more."""
    notes = tomllib.loads(NOTES.read_text(encoding="utf-8"))
    tables = []
    for title, registry in _registries().items():
        lines = [f"## {title}\n", "| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
        for name, kind, labels, text in sorted(_metrics(registry)):
            meaning = notes.pop(name, text).replace("|", "\\|")
            lines.append(f"| `{name}` | {kind} | {', '.join(f'`{one}`' for one in labels)} | {meaning} |")
        tables.append("\n".join(lines))
    if notes:
        raise ValueError(f"{NOTES.name} has notes on metrics that do not exist: {', '.join(notes)}")
    return "\n\n".join(tables)


def commands_list() -> str:
    """Every command: usage, what it does, its arguments and options, as its --help has them."""
    return "\n\n".join(_commands(main, click.Context(main, info_name="relaygr", terminal_width=100)))


def _registries() -> dict[str, CollectorRegistry]:
    made = {title: CollectorRegistry() for title in ("Every process", "Worker", "Trigger", "Client", "Gateway")}
    LoopWatch(made["Every process"], stall_s=1.0)
    SpanCounts(made["Every process"])
    _describe(made["Every process"], "trigger")
    export_readiness(made["Every process"], lambda: None)
    made["Every process"].register(RenewalsCollector())
    WorkerMetrics(made["Worker"])
    HistoryMetrics(made["Worker"])
    HandoverMetrics(made["Worker"])
    TriggerMetrics(made["Trigger"])
    ClientMetrics(made["Client"])
    GatewayMetrics(made["Gateway"])
    return made


def _metrics(registry: CollectorRegistry) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    collectors: list[Collector] = list(registry._collector_to_names)
    for collector in collectors:
        for family in collector.collect():
            if family.name.startswith("relaygr_"):
                labels = getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ())
                if not labels:  # an Info has them in its value
                    labels = [name for sample in family.samples for name in sample.labels if name != "le"]
                name = family.name + SUFFIX.get(family.type, "")
                yield name, family.type, tuple(dict.fromkeys(labels)), family.documentation.rstrip(".")


def _commands(command: click.Command, context: click.Context) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _commands(found, click.Context(found, info_name=name, parent=context, terminal_width=100))
        if not command.invoke_without_command:
            return
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```"


GENERATED: Final[dict[str, Callable[[], str]]] = {
    "settings": settings_tables,
    "former": former_settings,
    "metrics": metric_tables,
    "commands": commands_list,
}
