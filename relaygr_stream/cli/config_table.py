"""The settings as tables: effective values for `relaygr config show`, defaults for docs/reference/settings.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from msgspec import inspect as msgspec_inspect
from rich.table import Table

from relaygr_stream.settings.load import FIELDS, Config
from relaygr_stream.settings.scenarios import SECTION, Scenario
from relaygr_stream.settings.section import Field, section_fields
from relaygr_stream.telemetry.printable import listing

_UNITS: Final = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_TYPES: Final = {
    msgspec_inspect.BoolType: "true, false",
    msgspec_inspect.IntType: "integer",
    msgspec_inspect.FloatType: "number",
    msgspec_inspect.StrType: "text",
    msgspec_inspect.VarTupleType: "list of text",
}


def render_settings_table(config: Config) -> Table:
    """One row per setting: key, effective value (secrets hidden), source, meaning."""
    table = listing(("key", "value", "source", "meaning"), whole=("key",))
    for value in config.values:
        shown = _sized(value.field, value.value) or value.shown
        table.add_row(value.field.key, shown, value.source, value.field.description)
    return table


def render_settings_markdown() -> str:
    """A Markdown table with one row per setting: key, default, accepted values, meaning. The docs contain it."""
    return _markdown(FIELDS.values())


def render_scenario_markdown() -> str:
    """The same of the keys of a scenario."""
    return _markdown(field for field in section_fields(f"{SECTION}NAME", Scenario).values() if field.description)


def _markdown(fields: Iterable[Field]) -> str:
    lines = ["| key | default | accepts | meaning |", "| --- | --- | --- | --- |"]
    for field in fields:
        default = _sized(field, field.default) or msgspec.json.encode(field.default).decode()
        cells = (f"`{field.key}`", f"`{default}`", _accepts(field), field.description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _sized(field: Field, value: Any) -> str:
    """A size as a whole number of binary units ("2GiB"); "" for other settings and values."""
    if not field.is_bytes or not value:
        return ""
    return next((f"{value // size}{unit}" for unit, size in _UNITS if value % size == 0), "")


def _accepts(field: Field) -> str:
    kind = msgspec_inspect.type_info(field.kind)
    while isinstance(kind, msgspec_inspect.Metadata):
        kind = kind.type
    if isinstance(kind, msgspec_inspect.LiteralType):
        return ", ".join(str(value) for value in kind.values)
    if isinstance(kind, msgspec_inspect.StrType) and kind.pattern:
        return f"`{kind.pattern}`"
    text = "size" if field.is_bytes else _TYPES[type(kind)]
    bounds = [
        f"{sign} {_bound(field, limit)}"
        for sign, name in ((">", "gt"), ("≥", "ge"), ("<", "lt"), ("≤", "le"))
        if (limit := getattr(kind, name, None)) is not None
    ]
    return " ".join([text, ", ".join(bounds)]).strip()


def _bound(field: Field, limit: float) -> str:
    return f"{limit:,.10g}" + (" B" if field.is_bytes else "")
