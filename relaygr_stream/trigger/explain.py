"""Why a request is admitted or not: the numbers behind each decision, as a table or as JSON.

Calls the trigger's own `decide` and collects the numbers that it compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import msgspec
from rich import box
from rich.table import Table

from relaygr_stream.telemetry.printable import printable, printable_json
from relaygr_stream.trigger.decision import Decision, LaneState, Policy, Reason, decide
from relaygr_stream.trigger.delegation import Delegation
from relaygr_stream.wire.fleet import Claim
from relaygr_stream.wire.messages import RequestEvent, prefix_length
from relaygr_stream.wire.worker_status import charge_ms, prefix_bytes


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One decision and the numbers it compared; None: unknown, since the lane has no owner."""

    request_id: str
    user_id: str
    tenant: str = ""
    lane: int
    at_s: float  # seconds since the first event
    tokens: int
    candidates: int
    age_ms: float
    stale_ms: float
    owner: str | None
    queue_ms: float | None
    predicted_ms: float | None  # full inference plus the owner's queue
    risk_ms: float  # at risk above this
    nbytes: int | None  # of the prefix KV
    outstanding_bytes: int  # pinned at the owner, or in signals that it has not read
    budget_bytes: int
    on_hold: bool  # there may be unread signals of unknown size
    cost_ms: float | None  # expected device time of the pre-inference
    level_ms: float  # device time that the lane may request now
    rate_ms_per_s: float | None  # the refill of level_ms
    reason: Reason
    delegate: str | None = None  # the worker that would compute the prefix KV for the owner
    signalled: bool | None = None  # whether the running trigger sent a signal; None: not a live sample


def explain(
    event: RequestEvent,
    *,
    policy: Policy,
    lane_number: int,
    lane: LaneState,
    owner: Claim | None,
    age_ms: float,
    now_s: float,
    at_s: float,
    delegation: Delegation | None = None,
) -> tuple[Explanation, Decision]:
    """The decision and its numbers; like `decide`, books nothing. at_s: the event's time in the explanation."""
    decision = decide(event, policy=policy, lane=lane, owner=owner, age_ms=age_ms, now_s=now_s, delegation=delegation)
    tokens = prefix_length(event)
    explanation = Explanation(
        request_id=event.request_id,
        user_id=event.user_id,
        tenant=event.tenant,
        lane=lane_number,
        at_s=at_s,
        tokens=tokens,
        candidates=event.candidates,
        age_ms=age_ms,
        stale_ms=policy.stale_ms,
        owner=None if owner is None else owner.worker.name,
        queue_ms=None if owner is None else owner.worker.queue_ms,
        predicted_ms=None if owner is None else lane.costs.full_ms(tokens, event.candidates) + owner.worker.queue_ms,
        risk_ms=policy.risk_ms,
        nbytes=None if owner is None else prefix_bytes(tokens, owner.worker),
        outstanding_bytes=lane.ledger.outstanding,
        budget_bytes=lane.ledger.budget,
        on_hold=lane.ledger.on_hold,
        cost_ms=None if owner is None else charge_ms(lane.costs, tokens, owner.worker),
        level_ms=lane.load_left_ms(now_s),
        rate_ms_per_s=None if owner is None else owner.lane.device_ms_per_s,
        reason=decision.reason,
        delegate=None if decision.delegate is None else decision.delegate.worker,
    )
    return explanation, decision


def as_json(rows: Sequence[Explanation]) -> str:
    """One JSON object a line."""
    return "".join(printable_json(msgspec.json.encode(asdict(row)).decode()) + "\n" for row in rows)


def as_table(rows: Sequence[Explanation]) -> Table:
    """A table for a terminal, with compared numbers side by side."""
    live = any(row.signalled is not None for row in rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("at s", "request", "user"):
        table.add_column(name)
    for name in (
        "lane",
        "tokens",
        "age ms",
        "predicted / risk ms",
        "KiB",
        "outstanding / budget KiB",
        "cost / level ms",
    ):
        table.add_column(name, justify="right")
    table.add_column("owner")
    table.add_column("decision", style="bold")
    if live:
        table.add_column("signalled")
    for row in rows:
        table.add_row(
            f"{row.at_s:.3f}",
            printable(row.request_id),
            printable(row.user_id),
            str(row.lane),
            str(row.tokens),
            f"{row.age_ms:.0f}",
            f"{_number(row.predicted_ms)} / {row.risk_ms:.1f}",
            "–" if row.nbytes is None else f"{row.nbytes / 1024:.0f}",
            f"{row.outstanding_bytes / 1024:.0f} / {row.budget_bytes / 1024:.0f}" + (" on hold" if row.on_hold else ""),
            f"{_number(row.cost_ms)} / {row.level_ms:.1f}",
            printable(row.owner or "–"),
            row.reason if row.delegate is None else f"{row.reason} to {printable(row.delegate)}",
            *(["yes" if row.signalled else "no"] if live else []),
        )
    return table


def summary(rows: Sequence[Explanation]) -> str:
    """The number of requests by reason, most frequent first."""
    counts = Counter(row.reason for row in rows)
    parts = [f"{reason} {count} ({count / len(rows):.0%})" for reason, count in counts.most_common()]
    return f"{len(rows)} requests: {', '.join(parts)}" if rows else "no requests"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
