"""Shared parts of the laboratory's pictures: colours, ticks, and the check for matplotlib (the optional extra `plot`).

Matplotlib is imported only for drawing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from matplotlib.axis import Axis

# The Okabe–Ito palette, for colour-blind readers. Labels repeat what colours show.
BLUE: Final = "#0072B2"
SKY: Final = "#56B4E9"
GREEN: Final = "#009E73"
ORANGE: Final = "#E69F00"
RED: Final = "#D55E00"
PINK: Final = "#CC79A7"
GREY: Final = "#999999"
#: Colours of rankings, by where they found their prefix KV.
OUTCOME_COLOURS: Final = {"hbm": BLUE, "dram": SKY, "joined": GREEN, "full": RED}

INSTALL: Final = "matplotlib is missing; `pip install matplotlib` (or relaygr-lab with its extra `plot`)"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415
    except ImportError:
        return False
    return True


def log_ticks(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 of each decade, as plain numbers: the data often spans less than a decade."""
    from matplotlib.ticker import LogLocator  # noqa: PLC0415

    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(lambda *_: "")
