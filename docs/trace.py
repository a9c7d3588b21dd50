"""Draws a captured trace: `python docs/trace.py SPANS.ndjson docs/trace.png`.

SPANS: what the receiver `oteltap` prints (`python -u -m oteltap --port 4318 > SPANS.ndjson`). Of its traces, that with
the most spans is drawn, of those with a hit if there are any.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

#: Whose spans they are, by the beginning of their names.
COLOURS: Final = {
    "relaygr.re": "#4878a8",
    "relaygr.rank": "#4878a8",
    "relaygr.decide": "#c08830",
    "relaygr.pre-infer": "#559955",
    "relaygr.ranking": "#559955",
}
LEGEND: Final = {"client": "#4878a8", "trigger": "#c08830", "worker": "#559955", "its parts": "#a8d0a0"}


def chosen(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The spans of one trace, parents before children, by their start."""
    traces: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for span in spans:
        traces[span["traceId"]].append(span)

    def worth(trace: list[dict[str, Any]]) -> tuple[bool, int]:
        hit = any(each["value"].get("stringValue") == "hbm" for span in trace for each in span["attributes"])
        return hit, len(trace)

    trace = max(traces.values(), key=worth)
    children: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    ids = {span["spanId"] for span in trace}
    for span in sorted(trace, key=lambda span: int(span["startTimeUnixNano"])):
        children[span["parentSpanId"] if span["parentSpanId"] in ids else ""].append(span)
    ordered: list[dict[str, Any]] = []

    def walk(parent: str, depth: int) -> None:
        for span in children[parent]:
            ordered.append(span | {"depth": depth})
            walk(span["spanId"], depth + 1)

    walk("", 0)
    return ordered


def draw(trace: list[dict[str, Any]], picture: Path) -> None:
    """One bar a span, milliseconds from the first one's start."""
    begin = min(int(span["startTimeUnixNano"]) for span in trace)
    end = max(int(span["endTimeUnixNano"]) for span in trace)
    whole = (end - begin) / 1e6
    figure, axes = plt.subplots(figsize=(9, 0.36 * len(trace) + 1.1), dpi=120)
    for row, span in enumerate(trace):
        start = (int(span["startTimeUnixNano"]) - begin) / 1e6
        length = (int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / 1e6
        colour = next(
            (COLOURS[name] for name in sorted(COLOURS, key=len, reverse=True) if span["name"].startswith(name)),
            LEGEND["its parts"],
        )
        axes.barh(row, max(length, whole / 500), left=start, color=colour, height=0.62)
        label, late = f"{length:.2f} ms", start + length > 0.85 * whole
        axes.text(
            start - whole / 150 if late else start + length + whole / 150, row, label, va="center", fontsize=8,
            ha="right" if late else "left",
        )  # fmt: skip
    axes.set_yticks(range(len(trace)), ["   " * span["depth"] + span["name"] for span in trace], fontsize=9)
    for tick in axes.get_yticklabels():
        tick.set_horizontalalignment("left")
    axes.tick_params(axis="y", pad=130, length=0)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the request was entered")
    axes.set_xlim(-whole / 100, whole * 1.02)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(
        [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in LEGEND.values()], list(LEGEND),
        loc="upper center", bbox_to_anchor=(0.4, 1.16), ncols=4, fontsize=8, frameon=False,
    )  # fmt: skip
    figure.tight_layout()
    figure.savefig(picture)


def main(captured: str, picture: str) -> None:
    """Draw the trace of a file."""
    try:
        lines = Path(captured).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        sys.exit(f"error: {captured}: {error.strerror}")
    spans = [json.loads(line) for line in lines if line.startswith('{"traceId"')]
    if not spans:
        sys.exit(f"error: no spans in {captured}: capture them with `python -u -m oteltap --port 4318 > {captured}`")
    draw(chosen(spans), Path(picture))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
