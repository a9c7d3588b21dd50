"""The report of `relaygr bench paper`: tables for a terminal, JSON, and one page with a chart for each curve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from relaygr_lab.bench.page import page_html, table_html
from relaygr_lab.charts import line_chart
from relaygr_lab.paper.drawings import drawings
from relaygr_lab.paper.judge import judge
from relaygr_lab.paper.plan import Curve
from relaygr_lab.paper.readings import differences, find, headline
from relaygr_lab.paper.results import Outcome, PaperReport, Point, points
from relaygr_lab.paper.setup import Setup
from relaygr_lab.paper.tables import curve_rows, tables

MARKS: Final = {"met": "✓", "missed": "✗", "not allowed": "–", "not measured": "–"}
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
    """[x, revisit ratio, mode, where, what, median, least, greatest, oracle, settled] of each point; two of one of
    hits. oracle: of goodput, what the oracle could serve of the load."""
    shown = {"hits": ("hits", "dram")}.get(curve.shown, (curve.shown,))
    rows = []
    for step in curve.steps:
        for mode in step.modes:
            one = find(known, step.setup, mode.name, step.where)
            if one is None:
                continue
            x, by = getattr(one.setup, curve.x), one.setup.revisit
            for what in shown:
                value = one.shown(what) or (None, None, None)
                oracle = one.ideal if what == "goodput" else one.oracle
                rows.append([x, by, one.mode, one.where, what, *value, oracle, one.settled])
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


def _charts(curve: Curve, rows: Sequence[Sequence[Any]]) -> str:
    """A chart for each revisit ratio, if that is not the axis."""
    figures = []
    for title, series, x, y, words in drawings(curve, rows):
        figures.append(
            f"<figure><figcaption>{escape(title)}<span>{words}</span></figcaption>{line_chart(series, x, y)}</figure>"
        )
    return "".join(figures)


def render(report: PaperReport) -> RenderableType:
    """Tables, verdicts and remarks for a terminal."""
    found = [_table(*each) for each in tables(report)]
    targets = _table(
        "Targets",
        ("", "target", "found"),
        [(MARKS[one.state], one.target, one.found or one.state) for one in report.verdicts],
    )
    words = [Text(f"{name}: {text}", style="dim") for name, text in report.conditions["words"].items()]
    return Group(*found, targets, *(Text(f"· {remark}") for remark in report.remarks), *words)


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
        f"{_escaped(*curve_rows(curve, report.points))}"
        for curve in planned
        if curve.drawn and report.curves[curve.name]
    )
    drawn = [f"<h2>{escape(title)}</h2>{_escaped(heads, rows)}" for title, heads, rows in tables(report)]
    targets = [[MARKS[one.state], escape(one.target), one.state, escape(one.found)] for one in report.verdicts]
    facts = [[escape(name), escape(str(text))] for name, text in report.conditions["words"].items()]
    parts = [
        "<h1>Each claim shown: a fleet of emulated devices</h1>",
        '<p class="soft">Largest rate whose P99 is within the SLO; rates and times are undilated, k is the '
        "factor of dilation. Measured: trigger, workers, broker and client are real processes. Simulated: the same "
        "core, bus and devices in simulated time. Oracle: a queue that knows everything, without bus.</p>",
        *drawn,
        charts,
        "<h2>Targets</h2>",
        table_html(("", "target", "state", "found"), targets, wide=True),
        "<h2>Remarks</h2>",
        f"<ul>{''.join(f'<li>{escape(remark)}</li>' for remark in report.remarks)}</ul>",
        "<h2>Conditions</h2>",
        table_html(("", ""), facts, wide=True),
    ]
    return page_html("relaygr bench paper", parts)


def _escaped(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table_html(heads, [[escape(cell) for cell in row] for row in rows])


def as_json(report: PaperReport) -> bytes:
    """The report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1)
