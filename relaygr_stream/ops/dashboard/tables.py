"""The page's tables as HTML: workers, lanes, and a traced request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from relaygr_stream.ops.dashboard.charts import bar, cells
from relaygr_stream.ops.dashboard.parts import escaped, format_number, format_share, marked_above
from relaygr_stream.ops.dashboard.picture import Lane, Picture, WorkerRow
from relaygr_stream.ops.dashboard.trace import RequestTrace
from relaygr_stream.ops.status.overload import BUSY

_HEAT: Final = 5  # steps of colour of a lane
_COLUMNS: Final = 32  # lanes in a row


def traced(found: RequestTrace | str | None = None, request_id: str = "", user_id: str = "") -> str:
    """The form that asks for a request, and what was found of it; a text: why nothing was looked for."""
    form = (
        f'<form action="trace"><label>request id<input name="id" value="{escaped(request_id)}" required></label>'
        f'<label>user id, if known: one lane is searched<input name="user" value="{escaped(user_id)}"></label>'
        f"<button>trace</button></form>"
    )
    shown = "" if found is None else f'<p class="bad">{found}</p>' if isinstance(found, str) else _steps(found)
    is_open = "" if found is None else " open"
    summary = "<summary>Trace a request of the last minute</summary>"
    return f'<details class="panel trace"{is_open}>{summary}{form}{shown}</details>'


def _steps(found: RequestTrace) -> str:
    rows = "".join(
        f'<tr><td class="name"><span>{step.what}</span></td>'
        f'<td data-label="after"><span>{step.at_ms - found.steps[0].at_ms} ms</span></td>'
        f'<td class="facts">{", ".join(f"{name} {escaped(text)}" for name, text in step.facts.items())}</td></tr>'
        for step in found.steps
    )
    table = f'<table class="table" id="traced"><tbody>{rows}</tbody></table>' if rows else "<p>Nothing was found.</p>"
    return table + "".join(f'<p class="bad">{escaped(why)}</p>' for why in found.missing)


def workers_table(picture: Picture) -> str:
    """A row for each worker."""
    head = ("worker", "state", "lanes", "rankings/s", "P99 relay", "hits", "busy", "queue", "unread", "HBM", "DRAM")
    heads = "".join(f"<th>{each}</th>" for each in head)
    rows = "".join(_worker(row, head, picture) for row in picture.workers)
    more = picture.all_workers - len(picture.workers)
    rest = f"<p>{more} more: <code>relaygr status</code> lists them.</p>" if more else ""
    return (
        f'<section class="panel wide"><h2>Workers</h2><table class="table" id="workers"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table>{rest}</section>"
    )


def _worker(row: WorkerRow, head: Sequence[str], picture: Picture) -> str:
    status = row.status
    shares = [
        (status.hbm_used_bytes / status.hbm_bytes if status.hbm_bytes else None),
        (status.dram_used_bytes / status.dram_bytes if status.dram_bytes else None),
    ]
    texts = [
        escaped(status.name),
        escaped(status.state),
        str(len(status.lanes)),
        format_number(row.rate),
        marked_above(row.p99_ms, f"{format_number(row.p99_ms)} ms", picture.slo_ms),
        format_share(row.hit_rate),
        marked_above(status.busy_share, bar(status.busy_share) + format_share(status.busy_share), BUSY),
        marked_above(status.queue_ms, f"{format_number(status.queue_ms)} ms", picture.slo_ms),
        str(status.lag),
        *(bar(share) + format_share(share) for share in shares),
    ]
    cells_ = "".join(
        f'<td{" class=name" if label == "worker" else ""} data-label="{label}"><span>{text}</span></td>'
        for label, text in zip(head, texts, strict=True)
    )
    return f"<tr>{cells_}</tr>"


def lanes_map(picture: Picture) -> str:
    """A cell for each lane, in the colour of its load."""
    rates = [lane.per_s for lane in picture.lanes if lane.per_s is not None]
    most = max(rates, default=0.0)
    classes = [
        "none" if lane.owner is None else f"h{round(_HEAT * (lane.per_s or 0.0) / most) if most else 0}"
        for lane in picture.lanes
    ]
    each = -(-picture.all_lanes // max(1, len(picture.lanes)))
    text = "Pre-infer signals a second by lane, lately; the darkest has the most"
    if each > 1:
        text += f"; a cell is the busiest of {each} lanes"
    if most:
        hottest = max(picture.lanes, key=lambda lane: lane.per_s or 0.0)
        mean = sum(rates) / len(rates)
        text += f": lane {hottest.number} with {format_number(most)}, {format_number(most / mean)} times the mean"
    grid = cells(classes, [_title(lane) for lane in picture.lanes], _COLUMNS)
    legend = f'<p class="axis">{text}. Red: no owner.</p>'
    return f'<section class="panel wide" id="lanes"><h2>Lanes</h2>{grid}{legend}</section>'


def _title(lane: Lane) -> str:
    if lane.owner is None:
        return f"lane {lane.number}: no owner"
    rate = "" if lane.per_s is None else f", {format_number(lane.per_s)} signals/s"
    pinned = "" if lane.pinned is None else f", {lane.pinned:.0%} of its pinned budget in use"
    return f"lane {lane.number}: {escaped(lane.owner)}{rate}{pinned}"
