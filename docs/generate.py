"""Fills in what the code knows: settings, metrics, commands, messages, benches, the model API. A hook of mkdocs
(mkdocs.yml); nothing that it makes is kept.

A page says `<!-- generated: NAME -->` where the text belongs. A name that does not exist ends the build, and so do a
note on a metric that does not exist, and a message in messages.toml with other fields than its type has.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import click
import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from relaygr_stream.bus.renewed import RenewalsCollector
from relaygr_stream.cli.config_table import render_scenario_markdown, render_settings_markdown
from relaygr_stream.cli.main import main
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.gateway.metrics import Metrics as GatewayMetrics
from relaygr_stream.handover.desk import HandoverMetrics
from relaygr_stream.models.api import (
    RankingModel,
    ScoreInput,
    SteppedModel,
    Tokens,
    WarmedModel,
    digest,
    takes_suffix,
    version_of,
)
from relaygr_stream.models.decoder import DecoderModel
from relaygr_stream.models.kv import KVLayout, KVRegion
from relaygr_stream.ops.planner.metrics import PlannerMetrics
from relaygr_stream.ops.rollout.run import RolloutMetrics
from relaygr_stream.settings.load import REMOVED, RETIRED, replacement_of
from relaygr_stream.telemetry.loopwatch import LoopWatch
from relaygr_stream.telemetry.otlp import SpanCounts
from relaygr_stream.telemetry.process import _describe
from relaygr_stream.telemetry.server import export_readiness
from relaygr_stream.trigger.metrics import TriggerMetrics
from relaygr_stream.wire import messages
from relaygr_stream.wire.features import FeatureColumn, FeatureSchema
from relaygr_stream.wire.history import HistoryReference
from relaygr_stream.worker.histories import HistoryMetrics
from relaygr_stream.worker.metrics import WorkerMetrics

ROOT: Final = Path(__file__).parents[1]
NOTES: Final = ROOT / "docs" / "reference" / "metrics.toml"
#: What the fields of messages mean; docs/contract.py reads it, too.
FIELDS: Final[dict[str, dict[str, str]]] = tomllib.loads(NOTES.with_name("messages.toml").read_text(encoding="utf-8"))
#: Types that protocol.md gives a name.
NAMED_TYPES: Final[dict[Any, str]] = {
    messages.Id: "id",
    messages.Label: "label",
    NoneType: "nil",
    bytes: "bin",
    memoryview: "bin",
    dict: "map",
}
MARKER: Final = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
#: What the author of a model meets, in the page's order.
MODEL_API: Final[tuple[Any, ...]] = (
    RankingModel, SteppedModel, WarmedModel, Tokens, ScoreInput, KVLayout, KVRegion, FeatureColumn, FeatureSchema,
    DecoderModel, digest, version_of, takes_suffix,
)  # fmt: skip
#: Public, and for the package itself: what clients and workers do with columns, and the cache with regions.
NOT_FOR_MODELS: Final = {
    "pack", "check", "check_digest", "values", "zeros", "to_words", "from_words", "key", "table", "row_bytes",
    "copy_from", "kv_per_token", "time_elements", "elements_per_token",
}  # fmt: skip
TARGET: Final = re.compile(r"^(bench-\w[\w-]*|example-movielens):.*## (.*)", re.MULTILINE)
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


def message_fields(name: str) -> str:
    """The fields of a message: name, type, default, and what messages.toml says of each."""
    fields = msgspec.structs.fields(HistoryReference if name == HistoryReference.__name__ else getattr(messages, name))
    if odd := {field.name for field in fields} ^ FIELDS[name].keys():
        raise ValueError(f"messages.toml and the type {name} differ in {', '.join(sorted(odd))}")
    rows = (
        f"| `{one.name}` | {_wire_type(one.type)} | {_wire_default(one)} | {FIELDS[name][one.name]} |" for one in fields
    )
    return "\n".join(["| field | type | default | meaning |", "| --- | --- | --- | --- |", *rows])


def python_client() -> str:
    """The client of examples/clients in Python."""
    code = (ROOT / "examples" / "clients" / "python" / "client.py").read_text(encoding="utf-8")
    return f"```python\n{code}```"


def benches() -> str:
    """What measures: the targets of the Makefile, and what it says of each."""
    found = TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8"))
    return "\n".join(
        ["| command | what it measures |", "| --- | --- |", *(f"| `make {name}` | {what} |" for name, what in found)]
    )


def model_api() -> str:
    """Each class and function of MODEL_API: its docstring, its fields with their types, its methods."""
    return "\n\n".join(_class(one) if inspect.isclass(one) else _function(one) for one in MODEL_API)


def _class(one: type) -> str:
    fields = inspect.get_annotations(one)
    lines = [f"## {one.__name__}", _broken(inspect.cleandoc(one.__doc__ or ""), fields)]
    if fields:
        rows = [f"| `{name}` | `{_plain(kind)}` |" for name, kind in fields.items() if not name.startswith("_")]
        lines.append("\n".join(["| field | type |", "| --- | --- |", *rows]))
    elif "__init__" in vars(one):
        lines.append(f"`{one.__name__}{_parameters(one)}`")
    members = [_member(name, member) for name, member in vars(one).items() if not name.startswith("_")]
    lines.append("\n".join(filter(None, members)))
    return "\n\n".join(filter(None, lines))


def _broken(text: str, fields: Iterable[str]) -> str:
    """The text with a line of its own for each field that it describes at the start of a line."""
    return re.sub(rf"\n(?=({'|'.join(fields)}): )", "  \n", text) if fields else text


def _function(one: Callable[..., Any]) -> str:
    return f"## {one.__name__}\n\n`{_called(one.__name__, one)}`\n\n{inspect.cleandoc(one.__doc__ or '')}"


def _member(name: str, member: object) -> str:
    """A method or property, as an item of a list; "" for anything else."""
    if isinstance(member, classmethod | staticmethod):
        called, doc = _called(name, inspect.unwrap(member.__func__)), member.__doc__
    elif inspect.isfunction(member):
        called, doc = _called(name, inspect.unwrap(member)), member.__doc__
    elif isinstance(member, property | cached_property):
        getter = member.fget if isinstance(member, property) else member.func
        called, doc = f"{name}: {_plain(inspect.get_annotations(getter)['return'])}", member.__doc__  # type: ignore[arg-type]
    else:
        return ""
    return "" if name in NOT_FOR_MODELS else f"- `{called}`: {' '.join((doc or '').split())}"


def _called(name: str, function: Callable[..., Any]) -> str:
    returned = inspect.signature(function).return_annotation
    return f"{name}{_parameters(function)} -> {_plain(returned)}"


def _parameters(called: Callable[..., Any]) -> str:
    shown: list[str] = []
    starred = False
    for one in inspect.signature(called).parameters.values():
        if one.name in ("self", "cls"):
            continue
        if one.kind is one.KEYWORD_ONLY and not starred:
            shown, starred = [*shown, "*"], True
        default = "" if one.default is one.empty else f" = {_default(one.default)}"
        shown.append(f"{one.name}: {_plain(one.annotation)}{default}")
    return f"({', '.join(shown)})"


def _default(value: object) -> str:
    if isinstance(value, type):
        return value.__name__
    return "NO_FEATURES" if isinstance(value, FeatureSchema) else repr(value)


def _plain(annotation: object) -> str:
    """An annotation as the code writes it, without what messages are checked by."""
    return re.sub(r"Annotated\[(\w+), Meta\(.*\)\]", r"\1", str(annotation))


def _wire_type(kind: Any) -> str:
    """A field's type as MessagePack has it, or by the name that protocol.md gives it."""
    origin, inside = get_origin(kind) or kind, get_args(kind)
    if kind not in NAMED_TYPES and origin is Annotated:
        return _wire_type(inside[0])
    if origin in (Union, UnionType):
        return " or ".join(_wire_type(one) for one in inside if one is not msgspec.UnsetType)
    if origin is tuple:
        return f"array of {_wire_type(inside[0])}"
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in inside)
    if isinstance(origin, type) and issubclass(origin, msgspec.Struct):
        return "map"
    return NAMED_TYPES.get(kind) or NAMED_TYPES.get(origin) or str(origin.__name__)


def _wire_default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "*required*"
    if field.default is msgspec.UNSET:
        return "absent"
    if field.default is None:
        return "nil"
    if isinstance(field.default, int | float):
        return f"{field.default:g}"
    return f"`{field.default}`" if field.default and isinstance(field.default, str) else "empty"


def _registries() -> dict[str, CollectorRegistry]:
    made = {
        title: CollectorRegistry()
        for title in ("Every process", "Worker", "Trigger", "Client", "Gateway", "Rollout", "Planner")
    }
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
    RolloutMetrics(made["Rollout"])
    PlannerMetrics(made["Planner"])
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
    "scenario": render_scenario_markdown,
    "former": former_settings,
    "metrics": metric_tables,
    "commands": commands_list,
    "model": model_api,
    "python_client": python_client,
    "benches": benches,
    **{name: partial(message_fields, name) for name in FIELDS},
}
