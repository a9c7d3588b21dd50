"""The overview as text within 80 columns, and as JSON. What processes state of themselves is foreign text."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table

from relaygr_stream.ops.status.odd import oddities
from relaygr_stream.ops.status.overview import Overview, Seen
from relaygr_stream.telemetry.printable import listing, printable, printable_json
from relaygr_stream.wire.messages import HITS, MISSES, WITHHELD, WorkerStatus

GIB = 1 << 30
MIB = 1 << 20


def hit_rate(status: WorkerStatus, since: WorkerStatus | None = None) -> float | None:
    """Share of scored rankings that found prefix KV; None: there were none.

    since: an earlier status of the same incarnation, from which to count; None: from the worker's start.
    """
    before = since.counters if since is not None and since is not status else {}
    of = {
        name: status.counters.get(f"outcome_{name}", 0.0) - before.get(f"outcome_{name}", 0.0)
        for name in (*HITS, *MISSES)
    }
    scored = sum(of.values())
    return sum(of[name] for name in HITS) / scored if scored > 0 else None


def render(view: Overview) -> RenderableType:
    """Tables of triggers and workers, and the oddities."""
    workers, triggers = view.living_workers(), view.living_triggers()
    head = (
        f"{len(triggers)} trigger(s), {len(workers)} worker(s), {view.topics.lanes} lanes at "
        f"{view.settings.kafka.bootstrap}, prefix {view.settings.kafka.prefix!r}"
    )
    odd = oddities(view)
    lines = "\n".join(f"odd: {printable(line)}" for line in odd) if odd else "nothing is odd"
    # What is odd comes before the workers: a screen that is refreshed shows no more than its height.
    parts: list[RenderableType] = [head, lines, ""]
    parts += [_triggers(view), ""] if triggers else []
    parts += [_workers(view)] if workers else []
    return Group(*parts)


def as_json(view: Overview) -> str:
    """The overview as one JSON object, on one line."""
    workers = []
    for name, status in sorted(view.living_workers().items()):
        plain: dict[str, Any] = msgspec.to_builtins(status)
        workers.append(
            {**plain, "hit_rate": hit_rate(status), "hit_rate_now": hit_rate(status, view.workers[name].first)}
        )
    found = msgspec.json.encode(
        {
            "bootstrap": view.settings.kafka.bootstrap,
            "prefix": view.settings.kafka.prefix,
            "lanes": view.topics.lanes,
            "triggers": [msgspec.to_builtins(status) for _, status in sorted(view.living_triggers().items())],
            "workers": workers,
            "silent": view.silent(),
            "odd": oddities(view),
        }
    )
    return printable_json(found.decode())


def _triggers(view: Overview) -> Table:
    """One row each; a column of the delegated ones where there are any: with it, long names pass 80 columns."""
    living = sorted(view.living_triggers().items())
    reasons = ["admitted", *(["delegated"] if any("delegated" in status.decisions for _, status in living) else [])]
    numbers = ("lanes", *reasons, "of events", "backlog")
    table = listing(("trigger", "group", *numbers), numbers=numbers)
    for name, status in living:
        events = sum(status.decisions.values())
        shares = (_share(status.decisions.get(reason, 0.0) / events if events else None) for reason in reasons)
        names = printable(name), printable(status.group)
        table.add_row(*names, str(len(status.lanes)), *shares, f"{events:.0f}", str(status.backlog))
    return table


def _workers(view: Overview) -> Table:
    numbers = ("lanes", "hits", "busy", "queue ms", "lag", "HBM", "DRAM")
    table = listing(("worker", "state", *numbers), numbers=numbers)
    for name, status in sorted(view.living_workers().items()):
        table.add_row(
            printable(name), printable(status.state), str(len(status.lanes)), _hits(view.workers[name]),
            _share(status.busy_share), f"{status.queue_ms:.1f}", str(status.lag),
            _of(status.hbm_used_bytes, status.hbm_bytes),
            _of(status.dram_used_bytes, status.dram_bytes),
        )  # fmt: skip
    return table


def _hits(seen: Seen[WorkerStatus]) -> str:
    """The hit rate since this viewer's start; without rankings since then, since the worker's start."""
    lately = hit_rate(seen.last, seen.first)
    if lately is None and seen.last.counters.get("answers_ok") and hit_rate(seen.last) is None:
        return WITHHELD
    return _share(hit_rate(seen.last) if lately is None else lately)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _of(used: int, whole: int) -> str:
    if not whole:
        return "–"
    unit, name = (GIB, "G") if whole >= GIB else (MIB, "M")
    return f"{used / whole:.0%} of {whole / unit:.3g}{name}"
