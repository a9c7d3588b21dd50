"""The page's live part as HTML: what is odd, and the panels of the last fifteen minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from relaygr_stream.ops.dashboard.charts import Series, lines, nice, stack
from relaygr_stream.ops.dashboard.history import SLOT_S, Slot
from relaygr_stream.ops.dashboard.parts import (
    axis_top,
    chart_panel,
    data,
    escaped,
    format_number,
    legend_key,
    percent,
    value_now,
)
from relaygr_stream.ops.dashboard.picture import Picture
from relaygr_stream.ops.dashboard.tables import lanes_map, workers_table
from relaygr_stream.ops.status.overload import BUSY, SLO_SHARE
from relaygr_stream.ops.status.tally import KINDS
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
    "no_owner": "k4",
}
REFUSED: Final = {"overloaded": "k3", "deadline_exceeded": "k6", "rejected": "k5", "failed": "k4"}
_LEAST_SLO: Final = 0.9  # the bottom of its chart: what matters is near 1


def live(picture: Picture) -> str:
    """Everything that changes."""
    return (
        _head(picture)
        + f'<div class="panels">{"".join(panel(picture) for panel in _PANELS)}</div>'
        + workers_table(picture)
        + lanes_map(picture)
    )


def _head(picture: Picture) -> str:
    odd = [f'<li class="{"urgent" if each.urgent else "soon"}">{escaped(each.line)}</li>' for each in picture.odd] or [
        '<li class="fine">Nothing is odd.</li>'
    ]
    clock = time.strftime("%H:%M:%S UTC", time.gmtime(picture.wall_s))
    fleet = f"{picture.triggers} trigger(s), {picture.all_workers} worker(s), {picture.all_lanes} lanes"
    about = f'{fleet} at {escaped(picture.fleet)} · <time id="at">{clock}</time>'
    return f'<p class="fleet">{about}</p><ul class="odd" id="odd">{"".join(odd)}</ul>'


# ---- the panels ----


def _rate(picture: Picture) -> str:
    values = _series(picture, lambda slot: slot.tally.all / SLOT_S)
    top = axis_top(values)
    return chart_panel(
        "Rankings a second",
        [value_now("rate", picture.rate, "now"), value_now("rankings", picture.whole.tally.all, "in 15 min")],
        lines([("relay", values)], top),
        format_number(top),
    )


def _latency(share: float, picture: Picture) -> str:
    name = f"p{share * 100:.0f}"
    series = [
        (kind, _series(picture, lambda slot, kind=kind: slot.tally.quantile_ms(share, kind)))  # type: ignore[misc]
        for kind in KINDS
    ]
    top = nice(max([picture.slo_ms * 1.1, *(value for _, values in series for value in values if value)]))
    now = [
        value_now(f"{name}-{kind}", picture.now.quantile_ms(share, kind), f"ms {kind}", bad_above=picture.slo_ms)
        for kind in KINDS
    ]
    legend = "".join(
        legend_key(
            kind, f"{kind}, 15 min: {data(f'{name}-{kind}-15', picture.whole.tally.quantile_ms(share, kind))} ms"
        )
        for kind in KINDS
    )
    slo = f'<li class="bad"><i></i><span>SLO {picture.slo_ms:g} ms</span></li>'
    chart = lines(series, top, [("slo", picture.slo_ms)])
    return chart_panel(f"{name.upper()} on the worker", now, chart, f"{format_number(top)} ms", legend + slo)


def _within(picture: Picture) -> str:
    shares = _series(picture, lambda slot: slot.tally.slo_share())
    values = [None if share is None else share - _LEAST_SLO for share in shares]
    whole = picture.whole.tally
    return chart_panel(
        f"Scores within the SLO, {picture.slo}",
        [
            value_now("slo", percent(picture.now.slo_share()), "% now", bad_below=100 * SLO_SHARE),
            value_now("slo-15", percent(whole.slo_share()), "% in 15 min", bad_below=100 * SLO_SHARE),
        ],
        lines([("relay", values)], 1.0 - _LEAST_SLO, [("slo", SLO_SHARE - _LEAST_SLO)]),
        f"100 %, bottom: {_LEAST_SLO:.0%}",
    )


def _found(picture: Picture) -> str:
    told = picture.whole.tally.hit_rate() is not None or not picture.whole.tally.answers["ok"]
    return _stacked(
        picture,
        "Where prefix KV were found",
        [value_now("hits", percent(picture.now.hit_rate()), "% hits now" if told else f"outcomes are {WITHHELD}")],
        {name: name for name in FOUND},
        lambda slot: slot.tally.outcomes,
        FOUND,
    )


def _refused(picture: Picture) -> str:
    share = picture.now.errors / picture.now.all if picture.now.all else None
    return _stacked(
        picture,
        "Rankings without scores",
        [value_now("errors", percent(share), "% now", bad_above=100 * (1 - SLO_SHARE))],
        REFUSED,
        lambda slot: slot.tally.refused(),
    )


def _decided(picture: Picture) -> str:
    counts = picture.whole.decisions
    share = (counts["admitted"] + counts["delegated"]) / counts.total() if counts.total() else None
    now = [value_now("admitted", percent(share), "% pre-inferred")]
    return _stacked(picture, "Announced, by decision", now, DECIDED, lambda slot: slot.decisions)


def _busy(picture: Picture) -> str:
    mean, most = _series(picture, lambda slot: slot.mean("busy")), _series(picture, lambda slot: slot.busy)
    return chart_panel(
        "Device busy",
        [value_now("busy", percent(picture.busy), "% now, mean of workers", bad_above=100 * BUSY)],
        lines([("full", most), ("relay", mean)], 1.0),
        "100 %",
        legend_key("relay", "mean") + legend_key("full", "busiest worker"),
    )


def _queue(picture: Picture) -> str:
    values = _series(picture, lambda slot: slot.queue_ms)
    top = axis_top(values)
    return chart_panel(
        "Longest wait for the device",
        [value_now("queue", picture.queue_ms, "ms now", bad_above=picture.slo_ms)],
        lines([("relay", values)], top),
        f"{format_number(top)} ms",
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
        now.append(value_now(name, percent(used / whole if whole else None), f"% {shown}"))
    legend = "".join(legend_key(name, shown) for name, shown in tiers.items())
    return chart_panel("Memory of prefix KV in use", now, lines(series, 1.0), "100 %", legend)


_PANELS: Final = (
    _rate, partial(_latency, 0.5), partial(_latency, 0.99), _within, _found, _refused, _decided, _busy, _queue, _memory,
)  # fmt: skip


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
    top = axis_top(
        [sum(value or 0.0 for value in column) for column in zip(*(values for _, values in series), strict=True)]
    )
    legend = "".join(
        legend_key(
            classes.get(name, "grey"),
            f"{(names or {}).get(name, name)}: {data(f'count-{name}', sum(whole.get(each, 0) for each in of))}",
        )
        for name, of in groups.items()
    )
    return chart_panel(
        title, now, stack(series, top), f"{format_number(top)}/s", legend or "<li><span>none in 15 min</span></li>"
    )
