"""Parts of the page as HTML. What processes state of themselves is foreign text: it is escaped here."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Final

from relaygr_stream.ops.dashboard.charts import Series, nice
from relaygr_stream.telemetry.printable import printable

_NONE: Final = "–"


def escaped(text: str) -> str:
    """Foreign text for HTML, on one line."""
    return html.escape(printable(text))


def chart_panel(title: str, now: Sequence[str], chart: str, top: str, legend: str = "") -> str:
    """A titled panel: its values now, a chart over fifteen minutes with the value of its top, and a legend."""
    keys = f'<ul class="legend">{legend}</ul>' if legend else ""
    return (
        f'<section class="panel"><h2>{title}</h2><p class="now">{"".join(now)}</p>{chart}'
        f'<p class="axis"><span>15 min ago</span><span>top: {top}</span><span>now</span></p>{keys}</section>'
    )


def value_now(
    name: str,
    value: float | None,
    unit: str,
    *,
    bad_above: float = float("inf"),
    bad_below: float = float("-inf"),
) -> str:
    """A number with its unit, in the colour of what is odd outside the bounds."""
    bad = value is not None and not bad_below <= value <= bad_above
    return f"<span{' class=bad' if bad else ''}>{data(name, value)} <small>{unit}</small></span>"


def data(name: str, value: float | None) -> str:
    """A number for people, and the exact one for programs."""
    return f'<data id="{name}" value="{"" if value is None else repr(value)}">{format_number(value)}</data>'


def legend_key(name: str, text: str) -> str:
    """A line of a legend, in the colour of this class."""
    return f'<li class="{name}"><i></i><span>{text}</span></li>'


def marked_above(value: float | None, text: str, most: float) -> str:
    """The text of a value, in the colour of what is odd above `most`."""
    if value is None:
        return _NONE
    return f'<b class="bad">{text}</b>' if value > most else text


def axis_top(values: Series) -> float:
    """The top of an axis for these values."""
    return nice(max((value for value in values if value is not None), default=0.0))


def percent(share: float | None) -> float | None:
    """A share in percent."""
    return None if share is None else 100 * share


def format_share(share: float | None) -> str:
    """A share in whole percent; a dash for none."""
    return _NONE if share is None else f"{share:.0%}"


def format_number(value: float | None) -> str:
    """Three digits that count; whole from 100 on."""
    if value is None:
        return _NONE
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
