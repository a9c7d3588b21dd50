"""Charts for an HTML page, drawn by matplotlib as inline SVG: lines over two axes, and stacked horizontal bars."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from relaygr_lab.drawing import INSTALL, can_draw, log_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Of a file, and of a chart in a page: narrow, so that its words can be read at the 390 pixels of a telephone.
FILE_INCHES: Final = (6.4, 3.4)
PAGE_INCHES: Final = (4.8, 3.0)
#: Heights in a chart of bars: of each bar, and of the legend.
BAR_HEIGHT_INCHES: Final = 0.36
LEGEND_HEIGHT_INCHES: Final = 0.7
#: Names of more letters than this stand in two columns of the legend, so that it is no wider than the chart.
LONG_NAME: Final = 24
#: Room for a bar's text, as a share of the longest bar's length.
ROOM_FOR_WORDS: Final = 0.4
#: A logarithmic axis has no zero.
LEAST: Final = 1e-6
NOTHING: Final = '<p class="none">Nothing was measured for this chart.</p>'

#: Text stays text, in the page's font; ids are the same in every run; `$` does not begin a formula.
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "relaygr",
    "text.parse_math": False,
    "font.size": 9,
}
#: Parts that inline SVG does not need: name spaces, and unused ids, which would occur in several charts.
_NEEDLESS: Final = re.compile(r' xmlns(:\w+)?="[^"]*"| id="[\w.]+_\d+"')

#: Colours that a dark page replaces (STYLE of report/blocks.py): ink, ground, and what is too dark on it.
_THEMED: Final = {
    "#000000": "currentColor",
    "#ffffff": "var(--panel)",
    "#0072b2": "var(--blue)",
    "#b91c1c": "var(--red)",
}
_ON_PAGE: Final = re.compile("|".join(_THEMED))


@dataclass(frozen=True)
class Point:
    """A point of a line. hollow: not an exact value, for example a lower bound."""

    x: float
    y: float
    hollow: bool = False


@dataclass(frozen=True)
class Series:
    """A named line; dots mark its points."""

    name: str
    colour: str
    points: Sequence[Point]
    dots: bool = True
    dashed: bool = False
    spread: Sequence[tuple[float, float, float]] = ()  # (x, low, high): vertical lines
    lines: bool = True  # between its points
    faint: bool = False


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis."""

    words: str
    log: bool = False


@dataclass(frozen=True)
class Bar:
    """One horizontal bar of parts (name, amount); mark: a line across at this amount."""

    name: str
    parts: Sequence[tuple[str, float]]
    words: str = ""  # behind the bar
    mark: float | None = None


def line_chart(series: Sequence[Series], x: Axis, y: Axis, limit: tuple[float, str] | None = None) -> str:
    """Lines with dots; limit: (y, name) of a horizontal line."""
    if not any(one.points for one in series):
        return NOTHING
    return _svg(PAGE_INCHES[1], lambda axes: draw_lines(axes, series, x, y, limit))


def line_file(series: Sequence[Series], x: Axis, y: Axis, limit: tuple[float, str] | None = None) -> str:
    """The same as a whole SVG file, for documents. Raises ImportError without matplotlib."""
    return _drawn(FILE_INCHES, lambda axes: draw_lines(axes, series, x, y, limit))


def bar_chart(bars: Sequence[Bar], colours: dict[str, str], unit: str = "") -> str:
    """Stacked bars on one scale from 0; `colours` by part, in the order of the legend."""
    if not bars:
        return NOTHING
    height = LEGEND_HEIGHT_INCHES + BAR_HEIGHT_INCHES * len(bars)
    return _svg(height, lambda axes: draw_bars(axes, bars, colours, unit))


def draw_lines(axes: Axes, series: Sequence[Series], x: Axis, y: Axis, limit: tuple[float, str] | None = None) -> None:
    """As `line_chart`, into matplotlib's axes."""
    for one in series:
        points = sorted(one.points, key=lambda point: point.x)
        xs, ys = ([max(LEAST, at) if axis.log else at for at in values] for axis, values in (
            (x, [point.x for point in points]), (y, [point.y for point in points])
        ))  # fmt: skip
        style = ("--" if one.dashed else "-") if one.lines else ""
        width, alpha = (1.0, 0.5) if one.faint else (1.6, 1.0)
        axes.plot(xs, ys, linestyle=style, color=one.colour, linewidth=width, alpha=alpha, label=one.name)
        for at, low, high in one.spread:
            axes.vlines(at, low, high, color=one.colour, linewidth=1.2)
        if one.dots:
            fills = ["white" if point.hollow else one.colour for point in points]
            axes.scatter(xs, ys, s=26, c=fills, edgecolors=one.colour, zorder=3)
    if limit:
        axes.axhline(limit[0], color="#b91c1c", linestyle=":", linewidth=1.3, label=limit[1])
    for axis, of, log in ((x, axes.xaxis, axes.set_xscale), (y, axes.yaxis, axes.set_yscale)):
        of.set_label_text(axis.words)
        if axis.log:
            log("log")
            log_ticks(of)
    axes.margins(0.06)
    if not y.log:
        axes.set_ylim(bottom=0.0)
    axes.grid(which="both", alpha=0.25, linewidth=0.6)
    handles, names = axes.get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize=8, framealpha=0.9)


def draw_bars(axes: Axes, bars: Sequence[Bar], colours: dict[str, str], unit: str = "") -> None:
    """As `bar_chart`, into matplotlib's axes."""
    rows = range(len(bars))
    starts = [0.0] * len(bars)
    for name, colour in colours.items():
        amounts = [sum(amount for part, amount in bar.parts if part == name) for bar in bars]
        if any(amount > 0 for amount in amounts):
            axes.barh(rows, amounts, left=starts, color=colour, height=0.66, label=name)
            starts = [start + amount for start, amount in zip(starts, amounts, strict=True)]
    ends = [max(end, bar.mark or 0.0) for end, bar in zip(starts, bars, strict=True)]
    longest = max(ends) or 1.0
    for row, bar in enumerate(bars):
        if bar.mark is not None:
            axes.plot([bar.mark, bar.mark], [row - 0.42, row + 0.42], color="black", linewidth=1.8)
        axes.text(ends[row] + 0.015 * longest, row, bar.words, va="center", fontsize=8)
    axes.set_xlim(0, longest * (1 + ROOM_FOR_WORDS))
    axes.set_yticks(rows, [bar.name for bar in bars])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: "" if unit == " %" and value > 100 else f"{value:g}{unit}")
    axes.locator_params(axis="x", nbins=6)
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[1]:
        columns = 2 if max(map(len, colours)) > LONG_NAME else 3
        axes.figure.legend(loc="outside upper left", ncols=columns, fontsize=7.5, frameon=False, columnspacing=1.2)


def _svg(height_inches: float, draw: Callable[[Axes], None]) -> str:
    """Inline in a page."""
    if not can_draw():
        return f'<p class="none">No chart: {escape(INSTALL)}</p>'
    text = _drawn((PAGE_INCHES[0], height_inches), draw)
    return _ON_PAGE.sub(lambda found: _THEMED[found[0]], _NEEDLESS.sub("", text[text.index("<svg") :]))


def _drawn(inches: tuple[float, float], draw: Callable[[Axes], None]) -> str:
    import matplotlib  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure.subplots())
        out = StringIO()
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return out.getvalue()
