"""The overview as text within 80 columns, and as JSON. What processes state of themselves is foreign text."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table

from relaygr_stream.ops.status.odd import oddities
from relaygr_stream.ops.status.overview import Overview, Seen
from relaygr_stream.ops.status.tally import KINDS, Tally, lately
from relaygr_stream.telemetry.printable import listing, printable, printable_json
from relaygr_stream.wire.messages import WITHHELD, WorkerStatus
from relaygr_stream.wire.routes import POSITIONS, Figures, Routes

GIB = 1 << 30
MIB = 1 << 20


def render(view: Overview) -> RenderableType:
    """Tables of triggers, rankings and workers, and the oddities."""
    workers, triggers = view.living_workers(), view.living_triggers()
    head = (
        f"{len(triggers)} trigger(s), {len(workers)} worker(s), {view.topics.lanes} lanes at "
        f"{view.settings.kafka.bootstrap}, prefix {view.settings.kafka.prefix!r}"
    )
    odd = oddities(view)
    lines = "\n".join(f"odd: {printable(line)}" for line in odd) if odd else "nothing is odd"
    # What is odd comes before the workers: a screen that is refreshed shows no more than its height.
    parts: list[RenderableType] = [head, lines, ""]
    parts += [_groups(view.routes), ""] if view.routes else []
    parts += [_scenarios(view), ""] if view.scenarios else []
    parts += [f"in reserve: {printable(', '.join(sorted(reserve)))}", ""] if (reserve := view.living_reserve()) else []
    parts += [_triggers(view), ""] if triggers else []
    parts += [_rankings(view), "", _workers(view)] if workers else []
    return Group(*parts)


def as_json(view: Overview) -> str:
    """The overview as one JSON object, on one line."""
    workers = []
    for name, status in sorted(view.living_workers().items()):
        plain: dict[str, Any] = msgspec.to_builtins(status)
        tally, rate = lately([view.workers[name]], view.scenario)
        hits = {"hit_rate": Tally.between(None, status).hit_rate(), "hit_rate_now": tally.hit_rate()}
        workers.append({**plain, **hits, "rankings": _figures(tally, rate)})
    found = msgspec.json.encode(
        {
            "bootstrap": view.settings.kafka.bootstrap,
            "prefix": view.settings.kafka.prefix,
            "lanes": view.topics.lanes,
            "triggers": [msgspec.to_builtins(status) for _, status in sorted(view.living_triggers().items())],
            "rankings": _figures(*lately((view.workers[name] for name in view.living_workers()), view.scenario)),
            "workers": workers,
            "reserve": [msgspec.to_builtins(status) for _, status in sorted(view.living_reserve().items())],
            "routes": msgspec.to_builtins(view.routes),
            "scenarios": [
                {"scenario": name, "group": group, **msgspec.json.decode(as_json(of))}
                for name, group, of in view.scenarios
            ],
            "silent": view.silent(),
            "odd": oddities(view),
        }
    )
    return printable_json(found.decode())


def _figures(tally: Tally, rate: float) -> dict[str, Any]:
    """Rankings lately, for JSON: rates a second, latencies in milliseconds, null where there were none."""
    return {
        "per_second": rate,
        "errors_per_second": rate * tally.errors / tally.all if tally.all else 0.0,
        "within_slo": tally.slo_share(),
        **{kind: {"p50_ms": tally.quantile_ms(0.5, kind), "p99_ms": tally.quantile_ms(0.99, kind)} for kind in KINDS},
    }


def _scenarios(view: Overview) -> Table:
    """One row for each group of each scenario: what serves it, and its rankings lately."""
    numbers = ("triggers", "workers", "lanes", "a second", "hits", "P99 ms", "in SLO")
    table = listing(("scenario", "group", *numbers), numbers=numbers)
    for scenario, group, of in view.scenarios:
        workers = of.living_workers()
        tally, rate = lately((of.workers[name] for name in workers), scenario)
        p99 = max((ms for kind in KINDS if (ms := tally.quantile_ms(0.99, kind)) is not None), default=None)
        owned = len({lane.lane for status in workers.values() for lane in status.lanes})
        table.add_row(
            printable(scenario), printable(group or "default"), str(len(of.living_triggers())), str(len(workers)),
            f"{owned} of {of.topics.lanes}", f"{rate:.1f}", _share(tally.hit_rate()),
            "–" if p99 is None else f"{p99:.1f}", _share(tally.slo_share()),
        )  # fmt: skip
    return table


def _groups(routes: Routes) -> RenderableType:
    """The groups of workers, and the rollout that wrote the routes last, with what each did in its step."""
    numbers = ("users", "lanes", "answers", "errors", "late", "hits", "P99 ms")
    table = listing(("group", "model", *numbers), numbers=numbers)
    rollout = routes.rollout or None
    for part in routes.parts:
        seen = rollout.figures.get(part.group, Figures()) if rollout else Figures()
        told = (
            str(seen.answers), str(seen.errors), str(seen.late), _share(seen.hits), f"{seen.p99_ms:.1f}"
        ) if seen.answers else ("–",) * 5  # fmt: skip
        name, users = printable(part.group or "default"), _share(part.share / POSITIONS)
        table.add_row(name, printable(seen.version), users, str(part.lanes), *told)
    if rollout is None:
        return table
    step = f", step {rollout.step + 1} of {len(rollout.steps)}" if rollout.state == "moving" else ""
    why = f": {rollout.reason}" if rollout.reason else ""
    return Group(printable(f"rollout to {rollout.group or 'default'} is {rollout.state}{step}{why}"), table)


def _rankings(view: Overview) -> Table:
    """Of all workers together, lately: those that found prefix KV, those that did not, those without scores."""
    tally, rate = lately(view.workers[name] for name in view.living_workers())
    numbers = ("a second", "share", "P50 ms", "P99 ms")
    table = listing(("rankings", *numbers), numbers=numbers)
    rows = [(kind, sum(tally.outcomes[each] for each in outcomes)) for kind, outcomes in KINDS.items()]
    for name, count in (*rows, ("no scores", tally.errors)):
        share = count / tally.all if tally.all else None
        quantiles = (tally.quantile_ms(q, name) if name in KINDS else None for q in (0.5, 0.99))
        milliseconds = ("–" if each is None else f"{each:.1f}" for each in quantiles)
        table.add_row(name, f"{rate * (share or 0.0):.1f}", _share(share), *milliseconds)
    within = tally.slo_share()
    if within is not None:
        table.add_row(f"within {view.slo_in_words}", f"{rate * within:.1f}", _share(within), "", "")
    return table


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
    """The hit rate lately; without rankings lately, since the worker's start."""
    now, whole = lately([seen])[0].hit_rate(), Tally.between(None, seen.last)
    if now is None and whole.hit_rate() is None and whole.answers["ok"]:
        return WITHHELD
    return _share(whole.hit_rate() if now is None else now)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _of(used: int, whole: int) -> str:
    if not whole:
        return "–"
    unit, name = (GIB, "G") if whole >= GIB else (MIB, "M")
    return f"{used / whole:.0%} of {whole / unit:.3g}{name}"
