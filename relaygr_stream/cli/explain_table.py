"""Explanations of a trigger's decisions (trigger/explain.py) as a table or as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import msgspec
from rich import box
from rich.table import Table

from relaygr_stream.telemetry.printable import printable, printable_json
from relaygr_stream.trigger.explain import Explanation
from relaygr_stream.trigger.explain_answers import TRUNCATED


def as_json(rows: Sequence[Explanation]) -> str:
    """One JSON object a line."""
    return "".join(printable_json(msgspec.json.encode(asdict(row)).decode()) + "\n" for row in rows)


def as_table(rows: Sequence[Explanation]) -> Table:
    """A table for a terminal, with compared numbers side by side."""
    live = any(row.signalled is not None for row in rows)
    scenarios = any(row.scenario for row in rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("at s", "request", "user", *(["scenario"] if scenarios else [])):
        table.add_column(name)
    for name in (
        "lane",
        "tokens",
        "age ms",
        "predicted ms",
        "KiB",
        "outstanding / budget KiB",
        "cost / wait ms",
    ):
        table.add_column(name, justify="right")
    table.add_column("owner")
    table.add_column("decision", style="bold")
    if live:
        table.add_column("signalled")
        table.add_column("ranked")
    for row in rows:
        table.add_row(
            f"{row.at_s:.3f}",
            printable(row.request_id),
            printable(row.user_id),
            *([printable(row.scenario or "default")] if scenarios else []),
            str(row.lane),
            str(row.tokens),
            f"{row.age_ms:.0f}",
            _number(row.predicted_ms),
            _kib(row.nbytes),
            f"{_kib(row.outstanding_bytes)} / {_kib(row.budget_bytes)}",
            f"{_number(row.cost_ms)} / {_number(row.wait_ms)}",
            printable(row.owner or "–"),
            row.reason if row.delegate is None else f"{row.reason} to {printable(row.delegate)}",
            *(["yes" if row.signalled else "no", _ranked(row)] if live else []),
        )
    return table


def summary(rows: Sequence[Explanation]) -> str:
    """The number of requests by reason, most frequent first, and how many overload refused, cut or made late."""
    counts = Counter(row.reason for row in rows)
    parts = [f"{reason} {count} ({count / len(rows):.0%})" for reason, count in counts.most_common()]
    found = f"{len(rows)} requests: {', '.join(parts)}" if rows else "no requests"
    overload, answered = sum(row.overload for row in rows), sum(row.answer is not None for row in rows)
    if overload:
        cut = sum(row.overload and row.answer == TRUNCATED for row in rows)
        found += f"\noverload: busy devices refused {overload - cut} of {answered} rankings, or were late with them"
        found += f", and cut {cut} to their newest behaviours" if cut else ""
    return found


def _ranked(row: Explanation) -> str:
    if row.answer is None:
        return "–"
    if row.overload:
        return f"{row.answer}: overload"
    return row.answer


def _kib(nbytes: int | None) -> str:
    return "–" if nbytes is None else f"{nbytes / 1024:.0f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
