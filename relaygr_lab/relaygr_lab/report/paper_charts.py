"""The charts of `relaygr bench paper`: lines of each curve, and the first one's lengths against rates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, Final

from relaygr_lab.charts import Axis, Series, line_chart, line_file
from relaygr_lab.charts import Point as Dot
from relaygr_lab.drawing import can_draw
from relaygr_lab.paper.plan import Curve
from relaygr_lab.paper.results import PaperReport

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
}
Y_WORDS: Final = {
    "rate": Axis("requests/s within the SLO", log=True),
    "p99": Axis("P99, ms", log=True),
    "goodput": Axis("scores within the SLO, 1/s"),
    "hits": Axis("share of returns"),
}


def charts(curve: Curve, rows: Sequence[Sequence[Any]]) -> Iterator[tuple[str, str, str]]:
    """Title, words and SVG of each chart of a curve, for a page."""
    for title, series, x, y, words in drawings(curve, rows):
        yield title, words, line_chart(series, x, y)


def write_charts(report: PaperReport, planned: Sequence[Curve], folder: Path) -> None:
    """Each chart as a file of its own, for documents; none without matplotlib."""
    if not can_draw():
        return
    folder.mkdir(exist_ok=True)
    for curve in planned:
        for number, (_, series, x, y, _) in enumerate(drawings(curve, report.curves[curve.name])):
            if any(one.points for one in series):
                name = f"{curve.name}-{number}.svg" if number else f"{curve.name}.svg"
                (folder / name).write_text(line_file(series, x, y), encoding="utf-8")


def drawings(curve: Curve, rows: Sequence[Sequence[Any]]) -> Iterable[tuple[str, list[Series], Axis, Axis, str]]:
    """Title, lines, axes and legend of each chart of a curve; rates over lengths are drawn the other way, too."""
    if not curve.drawn:
        return
    values = [None] if curve.x == "revisit" else sorted({row[1] for row in rows})
    words = (
        "Lines: simulated, with the range of the seeds, or the bracket of one. Dots: measured; hollow: a lower bound. "
        "Dashed: the oracle queue."
    )
    turned = []
    x, y = Axis(curve.axis, log=curve.log), Y_WORDS[curve.shown]
    for value in values:
        mine = [row for row in rows if value is None or row[1] == value]
        by = "" if value is None else f", {value:.0%} returning"
        series = list(_series(mine, curve))
        yield f"{curve.words}{by}", series, x, y, words
        if curve.x == "share":
            turned.append((f"Length against throughput within the SLO{by}", [_turned(one) for one in series]))
    for title, series in turned:
        yield title, series, y, replace(x, log=True), words


def _turned(one: Series) -> Series:
    """The same with x and y exchanged."""
    return replace(one, points=[replace(point, x=point.y, y=point.x) for point in one.points], spread=())


def _series(rows: Sequence[Sequence[Any]], curve: Curve) -> Iterable[Series]:
    for mode, what in dict.fromkeys((row[2], row[4]) for row in rows):
        mine = [row for row in rows if (row[2], row[4]) == (mode, what)]
        colour, name = COLOURS.get(mode, "#1f2933"), f"{mode}, of DRAM" if what == "dram" else mode
        known = [row for row in mine if row[5] is not None]
        simulated, measured = ([row for row in known if row[3] == where] for where in ("simulated", "fleet"))
        spread = [(row[0], row[6], row[7]) for row in simulated if row[7] != inf]
        yield Series(
            name, colour, [Dot(row[0], row[5]) for row in simulated], dots=False, spread=spread, dashed=what == "dram"
        )
        if measured:
            dots = [Dot(row[0], row[5], hollow=not row[9]) for row in measured]
            yield Series(f"{name}, measured", colour, dots, lines=False)
        if curve.shown in ("rate", "goodput"):
            bounds = {row[0]: row[8] for row in mine if row[8]}
            yield Series(
                f"{mode}, oracle", colour, [Dot(*pair) for pair in bounds.items()], dots=False, dashed=True, faint=True
            )
