"""The report of `bench paper`, as blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import inf
from statistics import median
from typing import Final

from relaygr_lab.bench.modes import ABLATIONS, BASELINES, FLEET_MODES, RELAY
from relaygr_lab.paper.plan import ANCHORS_WORDS, AT_LOADS, HIGH, IN_TIME, REGIMES, Curve, Shown
from relaygr_lab.paper.results import TIERS, PaperReport, Point
from relaygr_lab.report.blocks import Block, Charts, Facts, Lines, Result, Rows, verdict_rows
from relaygr_lab.report.paper_charts import charts
from relaygr_lab.report.paper_readings import PLACES, find
from relaygr_stream.workload.report import HIT_WORDS

#: Curves with tables of their own.
OWN_TABLES: Final = ("anchors", "parts", "modes")
#: What the cells of a curve's table are.
CELLS: Final[dict[Shown, str]] = {
    "rate": "",
    "p99": "In the table: P99 in milliseconds, and the share within the SLO.",
    "goodput": "In the table: scores within the SLO a second, of what the oracle could serve.",
    "hits": "In the table: the share of returns that found prefix KV.",
}


def blocks(report: PaperReport, planned: Sequence[Curve]) -> list[Block]:
    """The tables, the headline first; each curve; and then what they rest on."""
    return [
        Result(
            "Each claim shown: a fleet of emulated devices",
            "Largest rate whose P99 is within the SLO; rates and times are undilated, k is the factor of dilation. "
            "Measured: trigger, workers, broker and client are real processes. Simulated: the same core, bus and "
            "devices in simulated time. Oracle: a queue that knows everything, without bus.",
        ),
        Rows("Half returning, geometric mean over four lengths", ("", "", "mean", "range"), headline_rows(report)),
        Rows("Largest rate within the SLO, undilated", COLUMNS, table_rows(report)),
        Rows(ANCHORS_WORDS, COLUMNS, table_rows(report, real=True)),
        Rows("What each mechanism is worth: largest rate without it (relay ÷ that)", PARTS_COLUMNS, parts_rows(report)),
        Rows(
            "Each mode at and beyond saturation (load: of the oracle's largest rate)", MODES_COLUMNS, modes_rows(report)
        ),
        Rows("Short and long users at the largest rate", KINDS_COLUMNS, kinds_rows(report)),
        *_curves(report, planned),
        verdict_rows(report.verdicts),
        Lines("Remarks", report.remarks),
        Facts("Conditions", [(name, str(text)) for name, text in report.conditions["words"].items()]),
    ]


def _curves(report: PaperReport, planned: Sequence[Curve]) -> Iterator[Block]:
    """A chart and its table; a table alone where the axis has no order."""
    for curve in planned:
        if curve.name not in OWN_TABLES and report.curves[curve.name]:
            if curve.drawn:
                yield Charts(curve.words, partial(charts, curve, report.curves[curve.name]), CELLS[curve.shown])
            yield Rows("" if curve.drawn else curve.words, *curve_rows(curve, report.points), terminal=not curve.drawn)


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
    "bus P50 / P99, ms",
)


def table_rows(report: PaperReport, *, real: bool = False) -> list[tuple[str, ...]]:
    """One row for each largest rate that was measured, as in COLUMNS. real: of the real engine, else of fleets."""
    order = [mode.name for mode in FLEET_MODES]
    measured = [one for one in report.points if one.where == "fleet" and one.given is None and one.setup.real == real]
    rows: list[tuple[str, ...]] = []
    for one in sorted(measured, key=lambda one: (one.setup.words, order.index(one.mode))):
        simulated = find(report.points, one.setup, one.mode, "simulated")
        least = "" if one.settled else "≥ "
        low, high = one.interval or (None, None)
        other = simulated.value if simulated is not None and simulated.settled and one.settled else None
        rows.append(
            (
                one.mode,
                one.setup.words,
                f"{one.length:,}",
                f"{one.factor:g}",
                rate_text(one),
                "" if low is None else f"{low:,.0f}…{'' if high == inf else f'{high:,.0f}'}",
                "" if simulated is None else rate_text(simulated),
                f"{one.value / other - 1:+.0%}" if one.value and other else "",
                f"{one.oracle:,.0f}",
                f"{least}{one.value / one.oracle:.2f}" if one.value and one.oracle else "",
                " / ".join(f"{ms:.1f}" for ms in one.bus_ms),
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
            cells = [f"{found[RELAY.name].oracle:,.0f}", rate_text(found[RELAY.name])]
            for mode in ABLATIONS:
                one = found.get(mode.name)
                value = one.value if one is not None else None
                ratio = f" ({relay / value:.2f}×)" if relay and value else ""
                cells.append("" if one is None else rate_text(one) + ratio)
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


MODES_COLUMNS: Final = (
    "mode",
    "load",
    "",
    "within the SLO",
    "P99, ms",
    "announced that hit",
    "decisions",
    "devices",
    "HBM, GiB",
    "DRAM, GiB",
)


def modes_rows(report: PaperReport) -> list[tuple[str, ...]]:
    """One row for each mode at and beyond saturation, as in MODES_COLUMNS."""
    order = [mode.name for mode in FLEET_MODES]
    some = [one for one in report.points if one.setup in (*AT_LOADS, HIGH)]
    return [
        (
            one.mode,
            f"{one.setup.load:.0%}{', timeouts of an SLO' * (one.setup == IN_TIME)}",
            one.where,
            f"{median(one.within):.1%}" if one.within else "",
            f"{median(one.p99_ms):,.1f}" if one.p99_ms else "",
            hits_text(one),
            shares_text(one.decisions),
            f"{one.busy:.0%}",
            *(f"{one.tiers[name]:,.0f}" if name in one.tiers else "" for name in TIERS),
        )
        for one in sorted(some, key=lambda one: (one.setup.load, one.where, order.index(one.mode)))
    ]


def hits_text(one: Point) -> str:
    """What became of its announced requests that hit; "": none was announced."""
    if not one.announced:
        return ""
    counts = {words: one.outcomes.get(name, 0) for name, words in HIT_WORDS.items()}
    found = ", ".join(f"{count / one.announced:.0%} {words}" for words, count in counts.items())
    return f"{sum(counts.values()) / one.announced:.1%}: {found}"


def shares_text(counted: Mapping[str, int]) -> str:
    """Each name with its share, the largest first."""
    every = sum(counted.values())
    largest = sorted(counted.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {count / every:.0%}" for name, count in largest if count)


KINDS_COLUMNS: Final = ("mode", "setup", "", "requests/s", "P99 short, ms", "P99 long, ms")


def kinds_rows(report: PaperReport) -> list[tuple[str, ...]]:
    """One row for each largest rate where users are short or long, as in KINDS_COLUMNS."""
    return [
        (
            one.mode,
            one.setup.words,
            one.where,
            rate_text(one),
            *(f"{median(values):,.1f}" if values else "" for values in (one.p99_short, one.p99_long)),
        )
        for one in report.points
        if one.given is None and (one.p99_short or one.p99_long)
    ]


def rate_text(one: Point) -> str:
    """Its largest rate; where none passed, the least that failed."""
    if one.value is None:
        return f"< {min(one.failed):,.0f}" if one.failed else "none"
    return f"{'' if one.settled else '≥ '}{one.value:,.0f}"


def curve_rows(curve: Curve, known: Sequence[Point]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Column heads, and a row for each setup of a curve: what it shows of each mode, simulated and measured."""
    columns = list(dict.fromkeys((mode.name, step.where) for step in curve.steps for mode in step.modes))
    columns.sort(key=lambda column: [mode.name for mode in FLEET_MODES].index(column[0]))
    heads = ("", *(f"{mode}, measured" if where == "fleet" else mode for mode, where in columns))
    rows = []
    for setup in dict.fromkeys(step.setup for step in curve.steps):
        points = [find(known, setup, mode, where) for mode, where in columns]
        if any(points):
            rows.append((setup.words, *("" if one is None else _shown_text(curve.shown, one) for one in points)))
    return heads, rows


def _shown_text(what: Shown, one: Point) -> str:
    if what == "rate":
        return rate_text(one)
    if what == "p99":
        return f"{median(one.p99_ms):,.1f}{f' ({median(one.within):.0%})' if one.within else ''}" if one.p99_ms else ""
    if what == "goodput":
        good = one.shown(what)
        return f"{good[0]:,.0f} of {one.ideal:,.0f}" if good else ""
    return f"{median(one.reused):.0%}, {median(one.from_dram):.0%} from DRAM" if one.reused else ""
