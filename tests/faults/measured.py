"""What the fault tests measured, kept as one JSON line per run, and the table of it.

usage: python -m tests.faults.measured    prints, per fault, median and worst over all runs kept
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tests.faults.load import Impact

FILE: Final = Path(__file__).parents[2] / ".cache" / "faults" / "measured.jsonl"


def record(fault: str, cost: Impact, *, owned_s: float | None = None) -> None:
    """Keep one run's figures. owned_s: from the fault until every lane had a serving owner again."""
    FILE.parent.mkdir(parents=True, exist_ok=True)
    line = {"fault": fault, "owned_s": owned_s, **asdict(cost)}
    print(f"\n{json.dumps(line)}")
    with FILE.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def table() -> str:
    """Markdown, one row per fault."""
    runs: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    if FILE.exists():
        for line in FILE.read_text(encoding="utf-8").splitlines():
            run = json.loads(line)
            runs[run["fault"]].append(run)
    rows = [
        "| fault | runs | recovery s: median, worst | lanes owned s: median, worst | requests in the window | scored | "
        "in time | which is, s | one user without scores, worst s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for fault, of_it in sorted(runs.items()):
        sent = sum(run["sent"] for run in of_it)
        owned = [run["owned_s"] for run in of_it if run["owned_s"] is not None]
        rows.append(
            f"| {fault} | {len(of_it)} | {_median_and_worst([run['recovery_s'] for run in of_it])} | "
            f"{_median_and_worst(owned)} | {sent} | {_share(sum(run['scored'] for run in of_it), sent)} | "
            f"{_share(sum(run['in_time'] for run in of_it), sent)} | "
            f"{statistics.median(run['patience_s'] for run in of_it):.1f} | "
            f"{max(run['silence_s'] for run in of_it):.1f} |"
        )
    return "\n".join(rows)


def _median_and_worst(values: list[float]) -> str:
    return f"{statistics.median(values):.1f}, {max(values):.1f}" if values else "–"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


if __name__ == "__main__":
    print(table())
