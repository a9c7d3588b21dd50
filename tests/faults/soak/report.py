"""What a soak showed: as a table, as JSON, and in one line while it runs. Knows nothing of how it came about."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from relaygr_stream.workload.quantiles import nearest_rank
from tests.faults.ledger import Ledger
from tests.faults.soak.kinds import CONTROL_KIND, KINDS
from tests.faults.soak.stage import Stage
from tests.faults.soak.traffic import Traffic

#: The driver holds its load if it sends at least this share of what was asked for.
HELD: Final = 0.98
#: Steady requests that get scores, faults included. Every fault may cost its seconds; were it more, the faults would
#: not meet a relay that serves.
SCORED: Final = 0.95
#: P99 of kept lanes while a worker joins or leaves: at most so many times the P99 while a process starts and ends that
#: takes no lane. What a start costs depends on the machine; this is what a move may add to it.
MOVE_COST: Final = 2.0
#: Fewer requests than this have no P99 to compare.
COMPARABLE: Final = 200


@dataclass
class Event:
    """One fault; seconds of the loop's clock. kept: lanes that kept their owner, of a join or a leave."""

    kind: str
    at: float
    over: float = 0.0  # its cause was gone, or left to what went on behind
    until: float = 0.0  # the next fault, or the end
    kept: tuple[int, ...] | None = None


def summary(seed: int, seconds: float, events: list[Event], calm: tuple[float, float], stage: Stage) -> dict[str, Any]:
    """All figures. calm: from when to when the load ran before the first fault."""
    traffic, ledger = stage.traffic, stage.witness.ledger
    moves = [event for event in events if event.kept is not None]
    kept = [ms for e in moves for ms in traffic.latencies_ms(e.at, e.over, e.kept)]
    control = [ms for e in events if e.kind == CONTROL_KIND for ms in traffic.latencies_ms(e.at, e.over)]
    healthy = traffic.latencies_ms(*calm)
    steady = Counter(note.error or "scores" for note in traffic.notes)
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "rate_asked": traffic.rate,
        "rate_held": round(traffic.summary.sent / traffic.summary.seconds, 2) if traffic.summary.seconds else 0.0,
        "sent": ledger.sent.total(),
        "ends": dict(Counter(end for ends in ledger.ends.values() for end in ends)),
        "steady": dict(steady),
        "scored_share": round(steady["scores"] / max(1, steady.total()), 4),
        "lost": len(ledger.lost),
        "offsets_past_unanswered": len(ledger.skipped),
        "answers_lost_with_a_broker": ledger.lost_answers,
        "wrong_scores": len(ledger.wrong),
        "compared": len(ledger.deviations),
        "worst_deviation": max(ledger.deviations.values(), default=0.0),
        "bad_messages": len(ledger.bad),
        "dead-lettered": len(ledger.letters),
        "hedges": dict(stage.clients.hedges()),
        "answers_dropped": dict(stage.clients.dropped()),
        "faults": len(events),
        "recovery_s": _recoveries(events, traffic),
        "healthy_p99_ms": _p99(healthy),
        "kept_lanes_p99_ms": _p99(kept),
        "kept_lanes_requests": len(kept),
        "control_p99_ms": _p99(control),
        "control_requests": len(control),
        "moves": len(moves),
        "longest_without_scores_s": {key: round(traffic.silence(key), 2) for key in ("user", "lane")},
    }


def broken(stage: Stage) -> list[str]:
    """Promises not kept, whatever the machine; empty if all were."""
    return [*stage.witness.ledger.complaints(), *stage.defects]


def outside(figures: dict[str, Any]) -> list[str]:
    """Bounds not kept, which a machine that is too small or busy with other things may be the reason of."""
    found = []
    if figures["rate_held"] < HELD * figures["rate_asked"]:
        found.append(f"the load was not held: {figures['rate_held']} of {figures['rate_asked']} requests/s")
    if (share := figures["scored_share"]) < SCORED:
        found.append(f"{share:.1%} of the steady requests got scores; bound: at least {SCORED:.0%}")
    p99, control = figures["kept_lanes_p99_ms"], figures["control_p99_ms"]
    comparable = min(figures["kept_lanes_requests"], figures["control_requests"]) >= COMPARABLE
    if comparable and p99 > MOVE_COST * control:
        found.append(
            f"P99 of kept lanes during joins and leaves {p99} ms, more than {MOVE_COST:g} times the {control} ms "
            "while a process starts that takes no lane"
        )
    return found


def progress(events: list[Event], seconds: float, ledger: Ledger) -> str:
    """One line for now."""
    ends = Counter(end for ends in ledger.ends.values() for end in ends)
    errors = ", ".join(f"{count} {name}" for name, count in sorted(ends.items()) if name != "scores")
    last = events[-1].kind if events else "none yet"
    return (
        f"{seconds:6.0f} s  {len(events)} faults, last: {last}; {ledger.sent.total()} sent, {ends['scores']} scored"
        f"{', ' + errors if errors else ''}; {len(ledger.wrong)} wrong"
    )


def show(figures: dict[str, Any], console: Console) -> None:
    """The tables."""
    faults = Table(title="Faults: seconds until the last disturbed second was over", title_justify="left")
    for column in ("fault", "times", "median", "worst", "not calm in time"):
        faults.add_column(column, justify="left" if column == "fault" else "right")
    for name, row in figures["recovery_s"].items():
        faults.add_row(name, *(str(row[key]) for key in ("times", "median", "worst", "open")))
    console.print(faults)
    table = Table(show_header=False)
    table.add_column(style="cyan")
    table.add_column(overflow="fold")
    for name, value in figures.items():
        if name != "recovery_s":
            shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
            table.add_row(name.replace("_", " "), shown)
    console.print(table)


def _recoveries(events: list[Event], traffic: Traffic) -> dict[str, dict[str, Any]]:
    """By kind. A fault's own are the seconds until the next fault; `open`: it came although there was no calm."""
    by_kind: defaultdict[str, list[tuple[float, bool]]] = defaultdict(list)
    for event in events:
        took = traffic.disturbed(event.at, event.until)
        by_kind[event.kind].append((took, took >= event.until - event.at - 1.0 and took > 0))
    return {name: _row(by_kind[name]) for name in (kind.name for kind in KINDS) if by_kind[name]}


def _row(found: list[tuple[float, bool]]) -> dict[str, Any]:
    seconds = [took for took, _ in found]
    return {
        "times": len(found),
        "median": round(statistics.median(seconds), 1),
        "worst": round(max(seconds), 1),
        "open": sum(is_open for _, is_open in found),
    }


def _p99(latencies_ms: Sequence[float]) -> float | None:
    return round(nearest_rank(latencies_ms, 0.99), 1) if latencies_ms else None
