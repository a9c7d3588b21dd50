"""The picture of a demo run: how long rankings took, relayed and in full, and where their prefix KV was found.

Matplotlib is imported only when a picture is drawn; it is the optional extra `plot`.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from relaygr_stream.errors import ConfigError
from relaygr_stream.lab.demo.report import DemoResult, hit_share, quantile, quantile_name
from relaygr_stream.lab.workload.report import HITS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From the Okabe–Ito palette, which colour-blind readers can tell apart; line style and labels say the same again.
RELAY: Final = "#0072B2"
FULL: Final = "#D55E00"
#: Rankings by where they found their prefix KV, and pre-infer signals by what they took: name, colour.
FOUND: Final[dict[str, tuple[str, str]]] = {
    "hbm": ("ready in HBM", "#0072B2"),
    "dram": ("in DRAM, reloaded", "#56B4E9"),
    "joined": ("being computed, joined", "#009E73"),
    "full": ("nowhere: full inference", "#D55E00"),
}
TOOK: Final[dict[str, tuple[str, str]]] = {
    "hbm": ("in HBM already", "#0072B2"),
    "dram": ("reloaded from DRAM", "#56B4E9"),
    "extended": ("extended", "#CC79A7"),
    "computed": ("computed", "#E69F00"),
    "joined": ("joined another", "#009E73"),
}
MARKED: Final = ((0.5, "o", "●"), (0.99, "s", "■"))
SIZE_INCHES: Final = (11.0, 4.9)
DPI: Final = 150
TITLE_WIDTH: Final = 130  # characters at the subtitle's font size


def check_can_draw(path: Path) -> None:
    """Raises ConfigError when matplotlib is missing: before a run rather than after it."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415
    except ImportError as error:
        raise ConfigError(
            f"cannot draw {path}: matplotlib is missing; install it with: pip install 'relaygr-stream[plot]'"
        ) from error


def save_plot(result: DemoResult, path: Path) -> Path:
    """Draw the run into a PNG, making its folder. Raises ConfigError when matplotlib is missing."""
    figure = draw(result, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def draw(result: DemoResult, path: Path) -> Figure:
    """The run as a figure; path: where it will go, for the error."""
    check_can_draw(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    latencies, hits = figure.subplots(1, 2, width_ratios=(1.4, 1))
    _draw_latencies(latencies, result)
    _draw_hits(hits, result)
    conditions = ", ".join(
        (f"{result.requests:,} requests in {result.wall_s:.0f} s", result.model, result.device, result.broker)
    )
    figure.suptitle(
        "Ranking with a pre-inferred prefix (relay) and without (full inference)\n" + _wrapped(conditions),
        fontsize=11,
    )
    return figure


def _draw_latencies(axes: Axes, result: DemoResult) -> None:
    """Empirical distribution functions on a logarithmic time axis, P50 and P99 marked and named."""
    marked: set[float] = set()
    for values, name, colour, style in (
        (result.relay_ms, "relay", RELAY, "-"),
        (result.full_ms, "full inference", FULL, "--"),
    ):
        if not values:
            continue
        ordered = np.sort(np.asarray(values, float))
        steps, shares = np.repeat(ordered, 2), np.repeat(np.arange(len(ordered) + 1) / len(ordered), 2)[1:-1]
        marks = [(q, at, shape) for q, shape, _ in MARKED if (at := quantile(values, q)) is not None]
        marked |= {q for q, _, _ in marks}
        summary = ", ".join(f"{quantile_name(q)} {at:,.1f} ms" for q, at, _ in marks)
        label = f"{name}: {summary}" if summary else name
        axes.plot(steps, shares, style, color=colour, linewidth=1.8, label=label)
        for q, at, shape in marks:
            axes.plot([at], [q], shape, color=colour, markersize=7, markeredgecolor="white", zorder=3)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(_log_locator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda *_: "")
    axes.set_ylim(0, 1.22)  # room above the curves for the legend
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("milliseconds from ranking request to scores (logarithmic)")
    axes.set_ylabel("share of requests answered by then")
    pairs = "each also in full" if len(result.relay_ms) == len(result.full_ms) else f"{len(result.full_ms):,} in full"
    # Named where it is drawn: too few answers have no P99.
    named = ", ".join(f"{sign} {quantile_name(q)}" for q, _, sign in MARKED if q in marked)
    title = f"Ranking latency\n{len(result.relay_ms):,} answers, {pairs}{f'; {named}' if named else ''}"
    axes.set_title(title, fontsize=10)
    axes.grid(which="both", alpha=0.25, linewidth=0.6)
    if result.relay_ms or result.full_ms:
        axes.legend(loc="upper left", fontsize=9, framealpha=0.95)


def _draw_hits(axes: Axes, result: DemoResult) -> None:
    """Bars: where the rankings found their prefix KV and, below, what the pre-infer signals took to make them ready."""
    found: Counter[str] = Counter(result.outcomes)
    at = 0.0
    ticks: list[tuple[float, str]] = []
    longest = max([1, *found.values(), *result.prepared.values()])
    for heading, kinds, counts in (("rankings", FOUND, found), ("pre-infer signals", TOOK, result.prepared)):
        total = sum(counts.get(kind, 0) for kind in kinds)
        if not total and counts is not found:
            continue
        axes.text(0, at, f"{total:,} {heading}", fontsize=9, fontweight="bold", va="center")
        for kind, (name, colour) in kinds.items():
            at += 1
            count = counts.get(kind, 0)
            axes.barh([at], [count], color=colour, height=0.7)
            label = f"{count:,}  {count / total:.1%}" if total else "0"
            axes.text(count + 0.015 * longest, at, label, fontsize=8, va="center")
            ticks.append((at, name))
        at += 1.3
    axes.set_yticks([where for where, _ in ticks], [name for _, name in ticks], fontsize=8)
    axes.set_ylim(at - 0.5, -0.7)
    axes.set_xlim(0, 1.25 * longest)
    axes.xaxis.set_major_locator(_integer_locator())
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    share = hit_share(result)
    hits = "no request was admitted" if share is None else f"{share:.1%} of {result.admitted:,} admitted requests hit"
    if result.announced and share is not None:
        hits += f", {sum(found[name] for name in HITS) / result.announced:.1%} of all {result.announced:,}"
    axes.set_title(f"Where the prefix KV was, and what made it ready\n{hits}", fontsize=10)


def _log_locator() -> Any:
    """Ticks at 1, 2 and 5 of each decade: latencies often span less than one."""
    from matplotlib.ticker import LogLocator  # noqa: PLC0415

    return LogLocator(base=10, subs=(1.0, 2.0, 5.0))


def _integer_locator() -> Any:
    """Counts have no halves."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    return MaxNLocator(integer=True)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, TITLE_WIDTH))
