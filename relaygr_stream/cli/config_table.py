"""The settings as tables: the effective ones for `relaygr config show`, the defaults for docs/operations.md.

Both come from settings.py alone, so that neither can tell something else than the program does.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import inspect as msgspec_inspect

from relaygr_stream.settings.load import FIELDS, Config, Field

_UNITS: Final = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_TYPES: Final = {
    msgspec_inspect.BoolType: "true, false",
    msgspec_inspect.IntType: "integer",
    msgspec_inspect.FloatType: "number",
    msgspec_inspect.StrType: "text",
}


def render_settings_table(config: Config) -> str:
    """Every setting, one line each: key, effective value (secrets hidden), where it comes from, what it means."""
    rows = [("key", "value", "source", "meaning")]
    for value in config.values:
        meaning = value.field.description
        rows.append((value.field.key, _sized(value.field, value.value) or value.shown, value.source, meaning))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def render_settings_markdown() -> str:
    """Every setting as a Markdown table: key, default, what it accepts, what it means. The docs hold this text."""
    lines = ["| key | default | accepts | meaning |", "| --- | --- | --- | --- |"]
    for field in FIELDS.values():
        default = _sized(field, field.default) or msgspec.json.encode(field.default).decode()
        cells = (f"`{field.key}`", f"`{default}`", _accepts(field), field.description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _sized(field: Field, value: Any) -> str:
    """A whole number of binary units as such ("2GiB"); nothing for other settings and values."""
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
