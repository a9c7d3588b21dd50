"""Charts as inline SVG: lines over two axes, and stacked horizontal bars. Nothing outside the page is referred to.

Knows nothing of what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

WIDTH: Final = 640
HEIGHT: Final = 300
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 14, 44
BAR: Final = 26
#: Room for the words in front of bars.
BAR_LEFT: Final = 160
#: And for those behind them.
VALUE_ROOM: Final = 140


@dataclass(frozen=True)
class Point:
    """hollow: not quite a value, e.g. a lower bound. words: shown when pointed at."""

    x: float
    y: float
    hollow: bool = False
    words: str = ""


@dataclass(frozen=True)
class Series:
    """A named line; dots mark its points."""

    name: str
    colour: str
    points: Sequence[Point]
    dots: bool = True
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis over what is drawn, `shown` included."""

    words: str
    log: bool = False
    shown: Sequence[float] = field(default=())


@dataclass(frozen=True)
class Bar:
    """One horizontal bar of parts (name, amount); mark: a line across at this amount."""

    name: str
    parts: Sequence[tuple[str, float]]
    words: str = ""  # behind the bar
    mark: float | None = None


def line_chart(series: Sequence[Series], x: Axis, y: Axis, limit: tuple[float, str] | None = None) -> str:
    """Lines with dots; limit: (y, name) of a horizontal line."""
    points = [point for one in series for point in one.points]
    if not points:
        return '<p class="none">Nothing was measured for this chart.</p>'
    ys = [point.y for point in points] + ([limit[0]] if limit else [])
    across = _Scale(x, [point.x for point in points], LEFT, WIDTH - RIGHT)
    up = _Scale(y, ys, HEIGHT - BOTTOM, TOP)
    parts = [*_grid(across, up)]
    if limit:
        at = up(limit[0])
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(limit[1], WIDTH - RIGHT, at - 5, "end", "limit"))
    for one in series:
        ordered = sorted(one.points, key=lambda point: point.x)
        path = " ".join(f"{across(point.x):.1f},{up(point.y):.1f}" for point in ordered)
        dash = ' stroke-dasharray="5 4"' if one.dashed else ""
        parts.append(f'<polyline class="line" points="{path}" stroke="{one.colour}"{dash}/>')
        if one.dots:
            parts += [_dot(point, one, across, up) for point in ordered]
    return _svg(HEIGHT, parts) + legend([(one.name, one.colour) for one in series])


def bar_chart(bars: Sequence[Bar], colours: dict[str, str], unit: str = "") -> str:
    """Stacked bars on one scale from 0; `colours` by part, in the order of the legend."""
    if not bars:
        return '<p class="none">Nothing was measured for this chart.</p>'
    most = max([*(sum(amount for _, amount in bar.parts) for bar in bars), *(bar.mark or 0 for bar in bars)]) or 1.0
    room = WIDTH - BAR_LEFT - VALUE_ROOM
    parts = []
    for row, bar in enumerate(bars):
        y, x = 6 + row * (BAR + 10), float(BAR_LEFT)
        parts.append(_text(bar.name, BAR_LEFT - 10, y + BAR / 2 + 4, "end", "name"))
        for name, amount in bar.parts:
            width = room * amount / most
            if width > 0:
                title = f"<title>{escape(name)}: {amount:,.3g}{escape(unit)}</title>"
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colours[name]}">'
                    f"{title}</rect>"
                )
                x += width
        if bar.mark is not None:
            at = BAR_LEFT + room * bar.mark / most
            parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{y - 3}" y2="{y + BAR + 3}"/>')
            x = max(x, at)
        parts.append(_text(bar.words, x + 8, y + BAR / 2 + 4, kind="value"))
    used = {name for bar in bars for name, amount in bar.parts if amount > 0}
    return _svg(len(bars) * (BAR + 10) + 8, parts) + legend(
        [(name, colour) for name, colour in colours.items() if name in used]
    )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Names beside their colours."""
    items = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in dict(entries).items()
    )
    return f'<div class="legend">{items}</div>'


class _Scale:
    """From values to pixels."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        self.axis = axis
        self._start, self._end = start, end
        known = [*values, *axis.shown]
        low, high = min(known), max(known)
        if axis.log:
            low, high = math.log10(max(low, 1e-6)), math.log10(max(high, 1e-6))
            pad = 0.06 * (high - low) or 0.3
            self._low, self._high = low - pad, high + pad
        else:
            self._low, self._high = min(0.0, low), (high or 1.0) * 1.06

    def __call__(self, value: float) -> float:
        at = math.log10(max(value, 1e-6)) if self.axis.log else value
        return self._start + (self._end - self._start) * (at - self._low) / (self._high - self._low)

    def ticks(self) -> list[float]:
        if self.axis.log:
            decades = range(math.floor(self._low) - 1, math.ceil(self._high) + 1)
            fine = (1, 2, 5) if self._high - self._low > 1.2 else (1, 1.5, 2, 3, 4, 5, 7)
            ticks = [step * 10.0**decade for decade in decades for step in fine]
            return [tick for tick in ticks if self._low <= math.log10(tick) <= self._high]
        span = self._high - self._low
        step = 10.0 ** math.floor(math.log10(span / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
        return [step * k for k in range(math.ceil(self._low / step), math.floor(self._high / step) + 1)]


def _grid(across: _Scale, up: _Scale) -> list[str]:
    parts = []
    for tick in up.ticks():
        y = up(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(f"{tick:,g}", LEFT - 8, y + 4, "end"))
    for tick in across.ticks():
        x = across(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(_text(f"{tick:,g}", x, HEIGHT - BOTTOM + 16, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(_text(across.axis.words, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "middle"))
    parts.append(f'<g transform="rotate(-90 14 {middle})">{_text(up.axis.words, 14, middle, "middle")}</g>')
    return parts


def _text(words: str, x: float, y: float, anchor: str = "start", kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _dot(point: Point, series: Series, across: _Scale, up: _Scale) -> str:
    fill = "#fff" if point.hollow else series.colour
    return (
        f'<circle cx="{across(point.x):.1f}" cy="{up(point.y):.1f}" r="4.2" fill="{fill}" stroke="{series.colour}" '
        f'stroke-width="1.8"><title>{escape(f"{series.name}: {point.words}")}</title></circle>'
    )


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img">{"".join(parts)}</svg>'
