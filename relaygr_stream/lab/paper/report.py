"""The report of `relaygr bench paper`: tables for a terminal, JSON, and one page with a chart for each curve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import inf
from typing import Any, Final

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from relaygr_stream.lab.bench.charts import Axis, Series, line_chart
from relaygr_stream.lab.bench.charts import Point as Dot
from relaygr_stream.lab.bench.modes import FLEET_MODES
from relaygr_stream.lab.bench.page import STYLE, table_html
from relaygr_stream.lab.paper.judge import headline, judge
from relaygr_stream.lab.paper.plan import Curve, Setup
from relaygr_stream.lab.paper.results import Outcome, PaperReport, Point, points

MARKS: Final = {"met": "✓", "missed": "✗", "not allowed": "–", "not measured": "–"}
COLOURS: Final = {
    "full-lane": "#b45309",
    "full-any": "#d97706",
    "cache": "#64748b",
    "relay": "#0f766e",
    "relay-anywhere": "#7c3aed",
    "relay-undelegated": "#c026d3",
    "relay-hbm": "#2563eb",
    "relay-lru": "#0891b2",
    "relay-whole": "#be185d",
    "relay-everything": "#65a30d",
}


def make_report(
    outcomes: Sequence[Outcome],
    planned: Sequence[Curve],
    conditions: dict[str, Any],
    left_out: Sequence[str],
    wall_s: float,
) -> PaperReport:
    """The report of these outcomes."""
    known = points(outcomes)
    aside = sum(probe.set_aside for one in outcomes for probe in one.probes)
    every = sum(len(one.probes) for one in outcomes)
    return PaperReport(
        complete=not left_out,
        conditions=conditions,
        points=known,
        curves={curve.name: _rows(curve, known) for curve in planned},
        headline=headline(known, Setup().revisit),
        verdicts=judge(known, outcomes),
        remarks=[
            *left_out,
            f"{aside} of {every} probes were set aside and repeated: devices more than 5 % late, other processes, or a "
            f"machine that stood still",
            *_without_gain(known),
        ],
        wall_s=wall_s,
    )


def _rows(curve: Curve, known: Sequence[Point]) -> list[list[Any]]:
    rows = []
    for step in curve.steps:
        for mode in step.modes:
            one = next((each for each in known if each.setup == step.setup and each.mode == mode.name), None)
            if one is not None:
                low, high = one.interval or (None, None)
                x = getattr(step.setup, curve.x)
                rows.append([x, step.setup.revisit, mode.name, one.value, low, high, one.oracle])
    return rows


def _without_gain(known: Sequence[Point]) -> Iterable[str]:
    """Where the relay is not ahead of another mode, in words."""
    for one in known:
        relay = next((each for each in known if each.mode == "relay" and each.setup == one.setup), None)
        if (
            relay is not None
            and one.mode != "relay"
            and one.value
            and relay.settled
            and (relay.value or 0) <= one.value
        ):
            yield (
                f"no gain: {one.mode} carried {one.value:,.0f}/s and relay {relay.value or 0:,.0f}/s at "
                f"{one.setup.words}"
            )


COLUMNS: Final = (
    "mode",
    "setup",
    "tokens",
    "k",
    "largest/s",
    "interval",
    "oracle/s",
    "of oracle",
    "× full-lane",
    "× full-any",
)


def table_rows(report: PaperReport) -> list[tuple[str, ...]]:
    """One row a point, as in COLUMNS."""
    order = [mode.name for mode in FLEET_MODES]
    full = {
        name: {one.setup.share: one.value for one in report.points if one.mode == name and one.settled}
        for name in ("full-lane", "full-any")
    }
    rows = []
    for one in sorted(report.points, key=lambda one: (one.setup.share, one.setup.revisit, order.index(one.mode))):
        ratios = (full[name].get(one.setup.share) for name in full)
        least = "" if one.settled else "≥ "
        low, high = one.interval or (None, None)
        rows.append(
            (
                one.mode,
                one.setup.words,
                f"{one.length:,}",
                f"{one.factor:g}",
                "none" if one.value is None else f"{least}{one.value:,.0f}",
                "" if low is None else f"{low:,.0f}…{'' if high == inf else f'{high:,.0f}'}",
                f"{one.oracle:,.0f}",
                f"{least}{one.value / one.oracle:.2f}" if one.value and one.oracle else "",
                *(f"{least}{one.value / base:.2f}" if one.value and base else "" for base in ratios),
            )
        )
    return rows


def headline_rows(report: PaperReport) -> list[tuple[str, str, str]]:
    """(baseline, geometric mean, range)."""
    return [
        (f"relay / {name}", f"{mean:.2f} ×", f"{least:.2f}…{most:.2f}")
        for name, (mean, least, most) in report.headline.items()
    ]


def render(report: PaperReport) -> RenderableType:
    """Tables, verdicts and remarks for a terminal."""
    found = _table("Largest rate within the SLO (undilated)", COLUMNS, table_rows(report))
    mean = _table("Half returning, geometric mean over four lengths", ("", "mean", "range"), headline_rows(report))
    targets = _table(
        "Targets",
        ("", "target", "found"),
        [(MARKS[one.state], one.target, one.found or one.state) for one in report.verdicts],
    )
    words = [Text(f"{name}: {text}", style="dim") for name, text in report.conditions["words"].items()]
    return Group(found, mean, targets, *(Text(f"· {remark}") for remark in report.remarks), *words)


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for head in heads:
        table.add_column(head)
    for row in rows:
        table.add_row(*row)
    return table


def page(report: PaperReport, planned: Sequence[Curve]) -> str:
    """One HTML page that loads nothing."""
    charts = "".join(
        f"<h2>{escape(curve.words)}</h2><div class='grid'>{_charts(curve, report.curves[curve.name])}</div>"
        for curve in planned
        if report.curves[curve.name]
    )
    cells = [[escape(cell) for cell in row] for row in table_rows(report)]
    targets = [[MARKS[one.state], escape(one.target), one.state, escape(one.found)] for one in report.verdicts]
    facts = [[escape(name), escape(str(text))] for name, text in report.conditions["words"].items()]
    parts = [
        "<h1>Each claim shown: a fleet of emulated devices</h1>",
        f'<p class="soft">Largest Poisson rate whose P99 is within the SLO; rates and times are undilated, k is the '
        "factor of dilation. Trigger, workers, broker and client are real processes; "
        f"{report.wall_s:,.0f} s in all.</p>",
        "<h2>Half returning, geometric mean over four lengths</h2>",
        table_html(("", "mean", "range"), [[escape(cell) for cell in row] for row in headline_rows(report)]),
        charts,
        "<h2>All points</h2>",
        table_html(COLUMNS, cells),
        "<h2>Targets</h2>",
        table_html(("", "target", "state", "found"), targets, wide=True),
        "<h2>Remarks</h2>",
        f"<ul>{''.join(f'<li>{escape(remark)}</li>' for remark in report.remarks)}</ul>",
        "<h2>Conditions</h2>",
        table_html(("", ""), facts, wide=True),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>relaygr bench paper</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _charts(curve: Curve, rows: Sequence[Sequence[Any]]) -> str:
    """A chart for each revisit ratio; in the chart of a curve over revisit ratios they are the axis."""
    ratios = [None] if curve.x == "revisit" else sorted({row[1] for row in rows})
    figures = []
    for ratio in ratios:
        mine = [row for row in rows if ratio is None or row[1] == ratio]
        title = curve.words if ratio is None else f"{curve.words}, revisit {ratio:.0%}"
        chart = line_chart(list(_series(mine)), Axis(curve.axis), Axis("requests/s within the SLO", log=True))
        words = "Dots: measured. Dashed: the oracle queue. Lines up and down: the interval."
        figures.append(f"<figure><figcaption>{escape(title)}<span>{words}</span></figcaption>{chart}</figure>")
    return "".join(figures)


def _series(rows: Sequence[Sequence[Any]]) -> Iterable[Series]:
    for mode in dict.fromkeys(row[2] for row in rows):
        mine = [row for row in rows if row[2] == mode]
        colour = COLOURS.get(mode, "#1f2933")
        measured = [Dot(row[0], row[3]) for row in mine if row[3]]
        spread = [(row[0], row[4], row[5]) for row in mine if row[4] and row[5] and row[5] != inf]
        yield Series(mode, colour, measured, spread=spread)
        yield Series(
            f"{mode}, oracle", colour, [Dot(row[0], row[6]) for row in mine if row[6]], dots=False, dashed=True
        )


def as_json(report: PaperReport) -> bytes:
    """The report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1)
