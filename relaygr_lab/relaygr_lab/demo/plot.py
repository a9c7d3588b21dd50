"""The picture of a demo run: latencies of rankings, relayed and in full, and where their prefix KV was found.

Matplotlib, the optional extra `plot`, is imported only for drawing.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from relaygr_lab.demo.report import PREPARED_WORDS, DemoResult, hit_share
from relaygr_lab.drawing import (
    BLUE,
    GREEN,
    INSTALL,
    ORANGE,
    OUTCOME_COLOURS,
    PINK,
    RED,
    SKY,
    can_draw,
    log_ticks,
)
from relaygr_stream.errors import ConfigError
from relaygr_stream.workload.quantiles import quantile, quantile_name
from relaygr_stream.workload.report import HIT_WORDS, OUTCOMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RELAY: Final = BLUE
FULL: Final = RED
#: Colours of pre-infer signals, by their result.
TOOK_COLOURS: Final = {"hbm": BLUE, "dram": SKY, "extended": PINK, "computed": ORANGE, "joined": GREEN}
MARKED: Final = ((0.5, "o", "●"), (0.99, "s", "■"))
SIZE_INCHES: Final = (11.0, 4.9)
DPI: Final = 150
TITLE_WIDTH: Final = 130  # characters at the subtitle's font size


def check_can_draw(path: Path) -> None:
    """Raise ConfigError if matplotlib is missing; called before a run."""
    if not can_draw():
        raise ConfigError(f"cannot draw {path}: {INSTALL}")


def save_plot(result: DemoResult, path: Path) -> Path:
    """Draw the run into a PNG, and make its folder. Raises ConfigError if matplotlib is missing."""
    figure = draw(result, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def draw(result: DemoResult, path: Path) -> Figure:
    """The run as a figure; path: its file, for the error message."""
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
    log_ticks(axes.xaxis)
    axes.set_ylim(0, 1.22)  # room above the curves for the legend
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("milliseconds from ranking request to scores (logarithmic)")
    axes.set_ylabel("share of requests answered by then")
    pairs = "each also in full" if len(result.relay_ms) == len(result.full_ms) else f"{len(result.full_ms):,} in full"
    # Only quantiles that are drawn are named: with too few answers there is no P99.
    named = ", ".join(f"{sign} {quantile_name(q)}" for q, _, sign in MARKED if q in marked)
    title = f"Ranking latency\n{len(result.relay_ms):,} answers, {pairs}{f'; {named}' if named else ''}"
    axes.set_title(title, fontsize=10)
    axes.grid(which="both", alpha=0.25, linewidth=0.6)
    if result.relay_ms or result.full_ms:
        axes.legend(loc="upper left", fontsize=9, framealpha=0.95)


def _draw_hits(axes: Axes, result: DemoResult) -> None:
    """Bars: where rankings found their prefix KV and, below, how pre-infer signals made them ready."""
    found: Counter[str] = Counter(result.outcomes)
    at = 0.0
    ticks: list[tuple[float, str]] = []
    longest = max([1, *found.values(), *result.prepared.values()])
    for heading, colours, words, counts in (
        ("rankings", OUTCOME_COLOURS, OUTCOMES, found),
        ("pre-infer signals", TOOK_COLOURS, PREPARED_WORDS, result.prepared),
    ):
        total = sum(counts.get(kind, 0) for kind in colours)
        if not total and counts is not found:
            continue
        axes.text(0, at, f"{total:,} {heading}", fontsize=9, fontweight="bold", va="center")
        for kind, colour in colours.items():
            at += 1
            count = counts.get(kind, 0)
            axes.barh([at], [count], color=colour, height=0.7)
            label = f"{count:,}  {count / total:.1%}" if total else "0"
            axes.text(count + 0.015 * longest, at, label, fontsize=8, va="center")
            ticks.append((at, words[kind]))
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
        hits += f", {sum(found[name] for name in HIT_WORDS) / result.announced:.1%} of all {result.announced:,}"
    axes.set_title(f"Where the prefix KV was, and what made it ready\n{hits}", fontsize=10, loc="right")


def _integer_locator() -> Any:
    """A locator with ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    return MaxNLocator(integer=True)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, TITLE_WIDTH))
