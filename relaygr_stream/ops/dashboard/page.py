"""The page's live part as HTML. What processes state of themselves is foreign text: it is escaped here."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from relaygr_stream.ops.dashboard.charts import Series, bar, cells, lines, nice, stack
from relaygr_stream.ops.dashboard.history import SLOT_S, Slot
from relaygr_stream.ops.dashboard.picture import Lane, Picture, WorkerRow
from relaygr_stream.ops.dashboard.trace import RequestTrace
from relaygr_stream.ops.status.odd import BUSY, SLO_SHARE
from relaygr_stream.ops.status.tally import KINDS
from relaygr_stream.telemetry.printable import printable
from relaygr_stream.wire.messages import WITHHELD

#: Where prefix KV were found, and what that is called here.
FOUND: Final = {
    "hbm": "in HBM",
    "dram": "reloaded from DRAM",
    "joined": "in a prefill under way",
    "full": "nowhere: full inference",
    "truncated": "nowhere: newest behaviours only",
}
#: Decisions with a colour of their own; every other one is grey.
DECIDED: Final = {
    "admitted": "admitted",
    "delegated": "delegated",
    "not_at_risk": "k2",
    "over_footprint": "k3",
    "over_load": "k6",
    "too_late": "k5",
    "no_owner": "k4",
}
REFUSED: Final = {"overloaded": "k3", "deadline_exceeded": "k6", "rejected": "k5", "failed": "k4"}
_NONE: Final = "–"
_HEAT: Final = 5  # steps of colour of a lane
_LEAST_SLO: Final = 0.9  # the bottom of its chart: what matters is near 1
_COLUMNS: Final = 32  # lanes in a row


def escaped(text: str) -> str:
    """Foreign text for HTML, on one line."""
    return html.escape(printable(text))


def live(picture: Picture) -> str:
    """Everything that changes."""
    return (
        _head(picture)
        + f'<div class="panels">{"".join(panel(picture) for panel in _PANELS)}</div>'
        + _workers(picture)
        + _lanes(picture)
    )


def _head(picture: Picture) -> str:
    odd = [f'<li class="{"urgent" if each.urgent else "soon"}">{escaped(each.line)}</li>' for each in picture.odd] or [
        '<li class="fine">Nothing is odd.</li>'
    ]
    clock = time.strftime("%H:%M:%S UTC", time.gmtime(picture.wall_s))
    fleet = f"{picture.triggers} trigger(s), {picture.all_workers} worker(s), {picture.all_lanes} lanes"
    about = f'{fleet} at {escaped(picture.fleet)} · <time id="at">{clock}</time>'
    return f'<p class="fleet">{about}</p><ul class="odd" id="odd">{"".join(odd)}</ul>'


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


# ---- the panels ----


def _rate(picture: Picture) -> str:
    values = _series(picture, lambda slot: slot.tally.all / SLOT_S)
    top = _top(values)
    return _panel(
        "Rankings a second",
        [_value("rate", picture.rate, "now"), _value("rankings", picture.whole.tally.all, "in 15 min")],
        lines([("relay", values)], top),
        _number(top),
    )


def _latency(share: float) -> Callable[[Picture], str]:
    name = f"p{share * 100:.0f}"

    def panel(picture: Picture) -> str:
        series = [
            (kind, _series(picture, lambda slot, kind=kind: slot.tally.quantile_ms(share, kind)))  # type: ignore[misc]
            for kind in KINDS
        ]
        top = nice(max([picture.slo_ms * 1.1, *(value for _, values in series for value in values if value)]))
        now = [
            _value(f"{name}-{kind}", picture.now.quantile_ms(share, kind), f"ms {kind}", bad_above=picture.slo_ms)
            for kind in KINDS
        ]
        legend = "".join(
            _key(kind, f"{kind}, 15 min: {_data(f'{name}-{kind}-15', picture.whole.tally.quantile_ms(share, kind))} ms")
            for kind in KINDS
        )
        slo = f'<li class="bad"><i></i><span>SLO {picture.slo_ms:g} ms</span></li>'
        chart = lines(series, top, [("slo", picture.slo_ms)])
        return _panel(f"{name.upper()} on the worker", now, chart, f"{_number(top)} ms", legend + slo)

    return panel


def _within(picture: Picture) -> str:
    shares = _series(picture, lambda slot: slot.tally.slo_share())
    values = [None if share is None else share - _LEAST_SLO for share in shares]
    whole = picture.whole.tally
    return _panel(
        f"Scores within the SLO, {picture.slo_ms:g} ms",
        [
            _value("slo", _percent(picture.now.slo_share()), "% now", bad_below=100 * SLO_SHARE),
            _value("slo-15", _percent(whole.slo_share()), "% in 15 min", bad_below=100 * SLO_SHARE),
        ],
        lines([("relay", values)], 1.0 - _LEAST_SLO, [("slo", SLO_SHARE - _LEAST_SLO)]),
        f"100 %, bottom: {_LEAST_SLO:.0%}",
    )


def _found(picture: Picture) -> str:
    told = picture.whole.tally.hit_rate() is not None or not picture.whole.tally.answers["ok"]
    return _stacked(
        picture,
        "Where prefix KV were found",
        [_value("hits", _percent(picture.now.hit_rate()), "% hits now" if told else f"outcomes are {WITHHELD}")],
        {name: name for name in FOUND},
        lambda slot: slot.tally.outcomes,
        FOUND,
    )


def _refused(picture: Picture) -> str:
    share = picture.now.errors / picture.now.all if picture.now.all else None
    return _stacked(
        picture,
        "Rankings without scores",
        [_value("errors", _percent(share), "% now", bad_above=100 * (1 - SLO_SHARE))],
        REFUSED,
        lambda slot: slot.tally.refused(),
    )


def _decided(picture: Picture) -> str:
    counts = picture.whole.decisions
    share = (counts["admitted"] + counts["delegated"]) / counts.total() if counts.total() else None
    now = [_value("admitted", _percent(share), "% pre-inferred")]
    return _stacked(picture, "Announced, by decision", now, DECIDED, lambda slot: slot.decisions)


def _busy(picture: Picture) -> str:
    mean, most = _series(picture, lambda slot: slot.mean("busy")), _series(picture, lambda slot: slot.busy)
    return _panel(
        "Device busy",
        [_value("busy", _percent(picture.busy), "% now, mean of workers", bad_above=100 * BUSY)],
        lines([("full", most), ("relay", mean)], 1.0),
        "100 %",
        _key("relay", "mean") + _key("full", "busiest worker"),
    )


def _queue(picture: Picture) -> str:
    values = _series(picture, lambda slot: slot.queue_ms)
    top = _top(values)
    return _panel(
        "Longest wait for the device",
        [_value("queue", picture.queue_ms, "ms now", bad_above=picture.slo_ms)],
        lines([("relay", values)], top),
        f"{_number(top)} ms",
    )


def _memory(picture: Picture) -> str:
    tiers = {"hbm": "HBM", "dram": "DRAM"}
    series = [
        (name, _series(picture, lambda slot, name=name: slot.mean(f"{name}_used", name)))  # type: ignore[misc]
        for name in tiers
    ]
    now = []
    for name, shown in tiers.items():
        used = sum(getattr(row.status, f"{name}_used_bytes") for row in picture.workers)
        whole = sum(getattr(row.status, f"{name}_bytes") for row in picture.workers)
        now.append(_value(name, _percent(used / whole if whole else None), f"% {shown}"))
    legend = "".join(_key(name, shown) for name, shown in tiers.items())
    return _panel("Memory of prefix KV in use", now, lines(series, 1.0), "100 %", legend)


_PANELS: Final = (
    _rate, _latency(0.5), _latency(0.99), _within, _found, _refused, _decided, _busy, _queue, _memory,
)  # fmt: skip


# ---- workers and lanes ----


def _workers(picture: Picture) -> str:
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
        _number(row.rate),
        _marked(row.p99_ms, f"{_number(row.p99_ms)} ms", picture.slo_ms),
        _share(row.hit_rate),
        _marked(status.busy_share, bar(status.busy_share) + _share(status.busy_share), BUSY),
        _marked(status.queue_ms, f"{_number(status.queue_ms)} ms", picture.slo_ms),
        str(status.lag),
        *(bar(share) + _share(share) for share in shares),
    ]
    cells_ = "".join(
        f'<td{" class=name" if label == "worker" else ""} data-label="{label}"><span>{text}</span></td>'
        for label, text in zip(head, texts, strict=True)
    )
    return f"<tr>{cells_}</tr>"


def _lanes(picture: Picture) -> str:
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
        text += f": lane {hottest.number} with {_number(most)}, {_number(most / mean)} times the mean"
    grid = cells(classes, [_title(lane) for lane in picture.lanes], _COLUMNS)
    legend = f'<p class="axis">{text}. Red: no owner.</p>'
    return f'<section class="panel wide" id="lanes"><h2>Lanes</h2>{grid}{legend}</section>'


def _title(lane: Lane) -> str:
    if lane.owner is None:
        return f"lane {lane.number}: no owner"
    rate = "" if lane.per_s is None else f", {_number(lane.per_s)} signals/s"
    pinned = "" if lane.pinned is None else f", {lane.pinned:.0%} of its pinned budget in use"
    return f"lane {lane.number}: {escaped(lane.owner)}{rate}{pinned}"


# ---- parts ----


def _series(picture: Picture, of: Callable[[Slot], float | None]) -> list[float | None]:
    """A value for each slot that is over."""
    return [None if slot is None else of(slot) for slot in picture.slots[:-1]]


def _stacked(
    picture: Picture,
    title: str,
    now: Sequence[str],
    classes: Mapping[str, str],
    counts: Callable[[Slot], Mapping[str, int]],
    names: Mapping[str, str] | None = None,
) -> str:
    """Areas of counts a second. What has no class of its own is counted together, as `other`."""
    whole = counts(picture.whole)
    groups: dict[str, tuple[str, ...]] = {name: (name,) for name in classes if whole.get(name)}
    if others := tuple(sorted(set(whole) - set(classes))):
        groups["other"] = others
    series: list[tuple[str, Series]] = []
    for name, of in groups.items():
        values = _series(picture, lambda slot, of=of: sum(counts(slot).get(each, 0) for each in of) / SLOT_S)  # type: ignore[misc]
        series.append((classes.get(name, "grey"), values))
    top = _top(
        [sum(value or 0.0 for value in column) for column in zip(*(values for _, values in series), strict=True)]
    )
    legend = "".join(
        _key(
            classes.get(name, "grey"),
            f"{(names or {}).get(name, name)}: {_data(f'count-{name}', sum(whole.get(each, 0) for each in of))}",
        )
        for name, of in groups.items()
    )
    return _panel(title, now, stack(series, top), f"{_number(top)}/s", legend or "<li><span>none in 15 min</span></li>")


def _panel(title: str, now: Sequence[str], chart: str, top: str, legend: str = "") -> str:
    keys = f'<ul class="legend">{legend}</ul>' if legend else ""
    return (
        f'<section class="panel"><h2>{title}</h2><p class="now">{"".join(now)}</p>{chart}'
        f'<p class="axis"><span>15 min ago</span><span>top: {top}</span><span>now</span></p>{keys}</section>'
    )


def _value(
    name: str,
    value: float | None,
    unit: str,
    *,
    bad_above: float = float("inf"),
    bad_below: float = float("-inf"),
) -> str:
    bad = value is not None and not bad_below <= value <= bad_above
    return f"<span{' class=bad' if bad else ''}>{_data(name, value)} <small>{unit}</small></span>"


def _data(name: str, value: float | None) -> str:
    """A number for people, and the exact one for programs."""
    return f'<data id="{name}" value="{"" if value is None else repr(value)}">{_number(value)}</data>'


def _key(name: str, text: str) -> str:
    return f'<li class="{name}"><i></i><span>{text}</span></li>'


def _marked(value: float | None, text: str, most: float) -> str:
    """The text of a value, in the colour of what is odd above `most`."""
    if value is None:
        return _NONE
    return f'<b class="bad">{text}</b>' if value > most else text


def _top(values: Series) -> float:
    return nice(max((value for value in values if value is not None), default=0.0))


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _share(share: float | None) -> str:
    return _NONE if share is None else f"{share:.0%}"


def _number(value: float | None) -> str:
    """Three digits that count; whole from 100 on."""
    if value is None:
        return _NONE
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
