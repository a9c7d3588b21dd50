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
from relaygr_stream.lab.bench.modes import ABLATIONS, BASELINES, FLEET_MODES, RELAY
from relaygr_stream.lab.bench.page import STYLE, table_html
from relaygr_stream.lab.paper.judge import judge
from relaygr_stream.lab.paper.plan import REGIMES, Curve
from relaygr_stream.lab.paper.readings import PLACES, differences, headline
from relaygr_stream.lab.paper.results import Outcome, PaperReport, Point, points
from relaygr_stream.lab.paper.setup import Setup

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


HEADLINE_TITLE: Final = "Half returning, geometric mean over four lengths"
PARTS_TITLE: Final = "What each mechanism is worth: largest rate without it (relay ÷ that)"
#: A value beyond the oracle's by more than this factor is no matter of a search's tolerance.
BEYOND: Final = 1.1


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
        differences=differences(known),
        verdicts=judge(known, outcomes),
        remarks=[
            *left_out,
            f"{aside} of {every} probes were set aside and repeated: devices more than 5 % late, other processes, or a "
            f"machine that stood still",
            *_codes(outcomes),
            *_beyond(known),
        ],
        wall_s=wall_s,
    )


def _rows(curve: Curve, known: Sequence[Point]) -> list[list[Any]]:
    """[x, value of curve.by, mode, where, what, median, least, greatest, oracle] of each point; two of one of hits."""
    shown = {"hits": ("hits", "dram")}.get(curve.shown, (curve.shown,))
    rows = []
    for step in curve.steps:
        for mode in step.modes:
            one = next((p for p in known if (p.setup, p.mode, p.where) == (step.setup, mode.name, step.where)), None)
            for what in shown if one is not None else ():
                assert one is not None
                value = one.shown(what) or (None, None, None)
                rows.append(
                    [
                        getattr(one.setup, curve.x),
                        getattr(one.setup, curve.by),
                        one.mode,
                        one.where,
                        what,
                        *value,
                        one.oracle,
                    ]
                )
    return rows


def _codes(outcomes: Sequence[Outcome]) -> Iterable[str]:
    codes = {one.code for one in outcomes}
    if len(codes) > 1:
        yield f"outcomes of {len(codes)} versions of the code: the run was continued after a change"


def _beyond(known: Sequence[Point]) -> Iterable[str]:
    """Values beyond the oracle's, in words: the probes were too short, or the oracle does not know the setup."""
    for one in known:
        if one.value and one.given is None and one.oracle and one.value > BEYOND * one.oracle:
            yield (
                f"beyond the oracle: {one.mode} ({one.where}) {one.value:,.0f} of {one.oracle:,.0f}/s at "
                f"{one.setup.words}"
            )


COLUMNS: Final = (
    "mode",
    "setup",
    "tokens",
    "k",
    "fleet/s",
    "interval",
    "simulated/s",
    "differs",
    "oracle/s",
    "of oracle",
)


def table_rows(report: PaperReport) -> list[tuple[str, ...]]:
    """One row for each largest rate that was measured, as in COLUMNS."""
    order = [mode.name for mode in FLEET_MODES]
    measured = [one for one in report.points if one.where == "fleet" and one.given is None]
    rows: list[tuple[str, ...]] = []
    for one in sorted(measured, key=lambda one: (one.setup.words, order.index(one.mode))):
        simulated = next(
            (p for p in report.points if (p.where, p.setup, p.mode) == ("simulated", one.setup, one.mode)), None
        )
        least = "" if one.settled else "≥ "
        low, high = one.interval or (None, None)
        other = simulated.value if simulated is not None else None
        rows.append(
            (
                one.mode,
                one.setup.words,
                f"{one.length:,}",
                f"{one.factor:g}",
                "none" if one.value is None else f"{least}{one.value:,.0f}",
                "" if low is None else f"{low:,.0f}…{'' if high == inf else f'{high:,.0f}'}",
                "" if other is None else f"{other:,.0f}",
                f"{one.value / other - 1:+.0%}" if one.value and other and one.settled else "",
                f"{one.oracle:,.0f}",
                f"{least}{one.value / one.oracle:.2f}" if one.value and one.oracle else "",
            )
        )
    return rows


PARTS_COLUMNS: Final = ("regime", "oracle/s", *(mode.name for mode in (RELAY, *ABLATIONS)))


def parts_rows(report: PaperReport) -> list[tuple[str, ...]]:
    """One row for each regime and place: the relay's largest rate, and that of each ablation with relay ÷ ablation."""
    rows = []
    for regime, setup in REGIMES.items():
        for where in PLACES:
            found = {one.mode: one for one in report.points if (one.setup, one.where) == (setup, where)}
            if RELAY.name not in found or len(found) <= len(BASELINES):
                continue
            relay = found[RELAY.name].value
            cells = [f"{found[RELAY.name].oracle:,.0f}", "none" if relay is None else f"{relay:,.0f}"]
            for mode in ABLATIONS:
                one = found.get(mode.name)
                value = one.value if one is not None else None
                ratio = f" ({relay / value:.2f}×)" if relay and value else ""
                cells.append("" if one is None else f"{value:,.0f}{ratio}" if value else "none")
            rows.append((f"{regime} ({where})", *cells))
    return rows


def headline_rows(report: PaperReport) -> list[tuple[str, str, str, str]]:
    """(baseline, place, geometric mean, range)."""
    return [
        (
            f"relay / {one.baseline}",
            one.where,
            f"{'≥ ' if one.bound else ''}{one.mean:.2f} ×",
            f"{one.least:.2f}…{one.most:.2f}",
        )
        for one in report.headline
    ]


def render(report: PaperReport) -> RenderableType:
    """Tables, verdicts and remarks for a terminal."""
    mean = _table(HEADLINE_TITLE, ("", "", "mean", "range"), headline_rows(report))
    found = _table("Largest rate within the SLO (undilated)", COLUMNS, table_rows(report))
    parts = _table(PARTS_TITLE, PARTS_COLUMNS, parts_rows(report))
    targets = _table(
        "Targets",
        ("", "target", "found"),
        [(MARKS[one.state], one.target, one.found or one.state) for one in report.verdicts],
    )
    words = [Text(f"{name}: {text}", style="dim") for name, text in report.conditions["words"].items()]
    return Group(mean, found, parts, targets, *(Text(f"· {remark}") for remark in report.remarks), *words)


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
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = [
        (HEADLINE_TITLE, ("", "", "mean", "range"), headline_rows(report)),
        (PARTS_TITLE, PARTS_COLUMNS, parts_rows(report)),
        ("Largest rates, measured and simulated", COLUMNS, table_rows(report)),
    ]
    drawn = [
        f"<h2>{escape(title)}</h2>{table_html(heads, [[escape(cell) for cell in row] for row in rows])}"
        for title, heads, rows in tables
        if rows
    ]
    targets = [[MARKS[one.state], escape(one.target), one.state, escape(one.found)] for one in report.verdicts]
    facts = [[escape(name), escape(str(text))] for name, text in report.conditions["words"].items()]
    parts = [
        "<h1>Each claim shown: a fleet of emulated devices</h1>",
        '<p class="soft">Largest Poisson rate whose P99 is within the SLO; rates and times are undilated, k is the '
        "factor of dilation. Measured: trigger, workers, broker and client are real processes. Simulated: the same "
        "core, bus and devices in simulated time. Oracle: a queue that knows everything, without bus.</p>",
        *drawn[:1],
        charts,
        *drawn[1:],
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


Y_WORDS: Final = {
    "rate": Axis("requests/s within the SLO", log=True),
    "p99": Axis("P99, ms", log=True),
    "hits": Axis("share of returns"),
}


BY_WORDS: Final = {"revisit": "{:.0%} returning", "width": "{:g} × width"}


def _charts(curve: Curve, rows: Sequence[Sequence[Any]]) -> str:
    """A chart for each value of curve.by, if that is not the axis."""
    figures = []
    for title, series, x, y, words in drawings(curve, rows):
        figures.append(
            f"<figure><figcaption>{escape(title)}<span>{words}</span></figcaption>{line_chart(series, x, y)}</figure>"
        )
    return "".join(figures)


def drawings(curve: Curve, rows: Sequence[Sequence[Any]]) -> Iterable[tuple[str, list[Series], Axis, Axis, str]]:
    """Title, lines, axes and legend of each chart of a curve."""
    values = [None] if curve.x == curve.by else sorted({row[1] for row in rows})
    words = "Lines: simulated, with the range of the seeds. Dots: measured. Dashed: the oracle queue."
    for value in values:
        mine = [row for row in rows if value is None or row[1] == value]
        title = curve.words if value is None else f"{curve.words}, {BY_WORDS[curve.by].format(value)}"
        yield title, list(_series(mine, curve)), Axis(curve.axis, log=curve.log), Y_WORDS[curve.shown], words


def _series(rows: Sequence[Sequence[Any]], curve: Curve) -> Iterable[Series]:
    for mode, what in dict.fromkeys((row[2], row[4]) for row in rows):
        mine = [row for row in rows if (row[2], row[4]) == (mode, what)]
        colour, name = COLOURS.get(mode, "#1f2933"), f"{mode}, of DRAM" if what == "dram" else mode
        simulated, measured = ([row for row in mine if row[3] == where and row[5]] for where in ("simulated", "fleet"))
        spread = [(row[0], row[6], row[7]) for row in mine if row[6] and row[7] and row[7] != inf]
        yield Series(
            name, colour, [Dot(row[0], row[5]) for row in simulated], dots=False, spread=spread, dashed=what == "dram"
        )
        if measured:
            yield Series(f"{name}, measured", colour, [Dot(row[0], row[5]) for row in measured], lines=False)
        if curve.shown == "rate":
            bounds = {row[0]: row[8] for row in mine if row[8]}
            yield Series(
                f"{mode}, oracle", colour, [Dot(*pair) for pair in bounds.items()], dots=False, dashed=True, faint=True
            )


def as_json(report: PaperReport) -> bytes:
    """The report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1)
