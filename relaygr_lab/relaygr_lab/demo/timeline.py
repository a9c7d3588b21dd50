"""A demo's picture over time: two panels above each other, and lines where something happened."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from relaygr_lab.demo.plot import DPI, SIZE_INCHES
from relaygr_lab.drawing import GREY
from relaygr_lab.rollouts import Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Characters of a line below the title: as many as the figure is wide.
LINE_WIDTH: Final = 140


def two_panels(title: str) -> tuple[Figure, Axes, Axes]:
    """A figure with this title, and its panels, the upper first, with one axis of seconds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    lower.set_xlabel("seconds")
    figure.suptitle(title, fontsize=11)
    for axes in (upper, lower):
        axes.grid(alpha=0.25, linewidth=0.6)
    return figure, upper, lower


def as_share(axes: Axes) -> None:
    """Its values are shares."""
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def mark(upper: Axes, lower: Axes, marks: Iterable[tuple[float, str]], since_s: float) -> None:
    """Numbered lines where something happened, and below the title what it was. Times are as of the samples."""
    named = []
    for number, (when, what) in enumerate(marks, 1):
        for axes in (upper, lower):
            axes.axvline(when - since_s, color=GREY, linewidth=0.8, linestyle="--")
        above = upper.get_xaxis_transform()
        upper.text(when - since_s, 1.02, str(number), transform=above, fontsize=9, ha="center", va="bottom")
        named.append(f"{number}: {what}".replace(" ", "\xa0"))
    if named:
        figure = upper.get_figure(root=True)
        assert figure is not None
        figure.suptitle(f"{figure.get_suptitle()}\n{textwrap.fill('   '.join(named), LINE_WIDTH)}", fontsize=11)


def by_time(samples: Sequence[Sample], since_s: float, point_s: float) -> list[tuple[float, list[Sample]]]:
    """Those of each point_s from then on that has some, and its middle in seconds since then."""
    parts: dict[int, list[Sample]] = {}
    for each in samples:
        if each.at_s >= since_s:
            parts.setdefault(int((each.at_s - since_s) // point_s), []).append(each)
    return [((number + 0.5) * point_s, parts[number]) for number in sorted(parts)]
