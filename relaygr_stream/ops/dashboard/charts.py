"""Charts as SVG, without text or style: shapes stretch to the width they get, the page's style gives the colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

Series = Sequence[float | None]
#: The height of a chart in its own units; its width is the number of values.
HEIGHT: Final = 40


def nice(most: float) -> float:
    """A round number at or above this, for an axis; 1 for 0."""
    if most <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(most))
    return next(unit * step for step in (1, 2, 2.5, 5, 10) if unit * step >= most * (1 - 1e-9))


def lines(series: Sequence[tuple[str, Series]], top: float, marks: Sequence[tuple[str, float]] = ()) -> str:
    """A line for each series, broken where it has no value. marks: horizontal lines. Names are classes of the style."""
    width = max(1, max((len(values) for _, values in series), default=1) - 1)
    parts = [
        f'<line class="{name}" x1="0" x2="{width}" y1="{_y(value, top)}" y2="{_y(value, top)}"/>'
        for name, value in marks
        if value <= top
    ]
    for name, values in series:
        path = " ".join(
            f"{'M' if at == 0 or values[at - 1] is None else 'L'}{at} {_y(value, top)}"
            + (f"L{at + 0.5} {_y(value, top)}" if _alone(values, at) else "")
            for at, value in enumerate(values)
            if value is not None
        )
        parts.append(f'<path class="line {name}" d="{path}"/>' if path else "")
    return _svg(width, parts)


def stack(series: Sequence[tuple[str, Series]], top: float) -> str:
    """Areas one upon the other; no value counts as 0."""
    length = max((len(values) for _, values in series), default=0)
    below, parts = [0.0] * length, []
    for name, values in series:
        above = [low + (value or 0.0) for low, value in zip(below, values, strict=True)]
        if above != below:
            there = " ".join(f"{at} {_y(value, top)}" for at, value in enumerate(above))
            back = " ".join(f"{at} {_y(below[at], top)}" for at in reversed(range(length)))
            parts.append(f'<path class="area {name}" d="M{there} {back}Z"/>')
        below = above
    return _svg(max(1, length - 1), parts)


def bar(share: float | None) -> str:
    """A bar that is filled to that share."""
    width = 0.0 if share is None else 100 * min(1.0, max(0.0, share))
    return (
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="rest" width="100" height="8"/><rect class="part" width="{width:.1f}" height="8"/></svg>'
    )


def cells(classes: Sequence[str], titles: Sequence[str], columns: int) -> str:
    """A grid of squares, row by row; titles are escaped HTML, shown where one points."""
    rows = -(-len(classes) // columns)
    squares = [
        f'<rect class="{name}" x="{at % columns}.05" y="{at // columns}.05" width=".9" height=".9">'
        f"<title>{title}</title></rect>"
        for at, (name, title) in enumerate(zip(classes, titles, strict=True))
    ]
    return f'<svg class="heat" viewBox="0 0 {columns} {rows}" role="img">{"".join(squares)}</svg>'


def _y(value: float, top: float) -> str:
    return f"{HEIGHT * (1 - min(1.0, max(0.0, value / top))):.1f}"


def _alone(values: Series, at: int) -> bool:
    """Whether a value has none beside it: a line of one point would not show."""
    beside = (values[each] for each in (at - 1, at + 1) if 0 <= each < len(values))
    return all(value is None for value in beside)


def _svg(width: int, parts: Sequence[str]) -> str:
    shapes = "".join(parts)
    grid = "".join(f'<line class="grid" x1="0" x2="{width}" y1="{y}" y2="{y}"/>' for y in (0, HEIGHT // 2, HEIGHT))
    return (
        f'<svg class="chart" viewBox="0 0 {width} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
        f"{grid}{shapes}</svg>"
    )
