"""The results of a simulation as a table, and as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from relaygr_lab.simulate.scenario import Scenario
from relaygr_lab.simulate.story import (
    ALLOWED_LATE,
    GOOD_WINDOWS,
    OUTCOMES,
    STATUSES,
    Estimate,
    Story,
    Window,
    counts,
    cut_share,
    hit_share,
    late_share,
    latencies,
    p99,
    percentile,
    recovery_s,
    refused_ms,
    windows,
)
from relaygr_stream.settings.schema import MAX_LANES
from relaygr_stream.trigger.decision import REASONS
from relaygr_stream.worker.forwarding import WHY

Row = tuple[str, str]


def summary(scenario: Scenario, story: Story) -> dict[str, Any]:
    """All results as plain values; unknown ones are None."""
    slo_ms = scenario.settings.relay.slo_ms
    values = latencies(story)
    found: dict[str, Any] = {
        "workers": scenario.workers,
        "simulated_workers": len(story.busy),
        "requests": len(story.at),
        "rate": scenario.traffic.rate,
        "traffic": scenario.traffic.describe().splitlines(),
        "slo_ms": slo_ms,
        "p50_ms": _plain(percentile(values, 0.5)),
        "p99_ms": _estimate(p99(story)),
        "p99_ms_short": _estimate(p99(story, long=False)),
        "p99_ms_long": _estimate(p99(story, long=True)),
        "late": _estimate(late_share(story, slo_ms)),
        "goodput": _plain(scenario.traffic.rate * (1.0 - late_share(story, slo_ms).value)),
        "goodput_cut": _plain(scenario.traffic.rate * cut_share(story, slo_ms)),
        "refused_ms": _plain(refused_ms(story)),
        "hits": _estimate(hit_share(story)),
        "hits_returning": _estimate(hit_share(story, returning=True)),
        "hits_new": _estimate(hit_share(story, returning=False)),
        "outcomes": counts(story.outcome, OUTCOMES),
        "statuses": counts(story.status, STATUSES),
        "decisions": counts(story.reason, REASONS),
        "forwards": dict(story.forwards),
        "busy": {"mean": float(story.busy.mean()), "most": float(story.busy.max())},
        "pinned_bytes_most": float(story.pinned_bytes.max()),
        "held_bytes_most": float(story.held_bytes.max()),
        "hbm_bytes": float(story.hbm_bytes.mean()),
        "dram_bytes": float(story.dram_bytes.mean()),
        "cache": dict(story.cache),
        "signals": dict(story.signals),
        "simulated_s": story.simulated_s,
        "worker_seconds_per_cpu_second": story.simulated_s * len(story.busy) / story.cpu_s,
        "costs": scenario.costs.source,
    }
    if scenario.failure is not None:
        seconds = windows(story, slo_ms)
        found["failure"] = {
            "share": scenario.failure.share,
            "at": scenario.failure.at,
            "dead": story.dead,
            "moved_lanes": story.moved_lanes,
            "taken_over_s": story.taken_over_s,
            "recovery_s": recovery_s(seconds, scenario.failure.at),
            "unanswered": int((story.status == -1).sum()),
            "windows": [
                {"at": each.at, "requests": each.requests, "p99_ms": _plain(each.p99_ms), "late": _plain(each.late),
                 "hits": _plain(each.hits)}
                for each in seconds
            ],
        }  # fmt: skip
    return found


def render(scenario: Scenario, story: Story, wall_s: float | None = None) -> Table:
    """The table. wall_s: seconds that the simulation took, for its speed."""
    slo_ms = scenario.settings.relay.slo_ms
    late = late_share(story, slo_ms)
    worker = scenario.settings.worker
    verdict = "holds" if late.value <= ALLOWED_LATE else "does not hold"
    busy, pinned = story.busy, float(story.pinned_bytes.max())
    lanes = scenario.workers * scenario.lanes_per_worker
    rows: list[Row] = [
        ("fleet", f"{scenario.workers:,} workers, {lanes:,} lanes, mode {scenario.mode}"),
        *([("note", _relays(lanes))] if lanes > MAX_LANES else []),
        *_traffic(scenario),
        ("costs", scenario.costs.source),
        ("simulated", f"{len(busy):,} workers for {scenario.seconds:g} s after {scenario.warm_s:g} s of warm-up"),
        ("measured", f"{len(story.at):,} requests"),
        ("", ""),
        ("P50", f"{render_ms(percentile(latencies(story), 0.5))}"),
        ("P99", f"{render_ms(p99(story).value)}{_ms_error(p99(story))}"),
        *_kinds(scenario, story),
        (f"later than {slo_ms:g} ms", f"{render_share(late.value, 2)}{_percent_error(late)}: the SLO {verdict}"),
        *_goodput(scenario, story),
        ("hits", f"{_percent(hit_share(story))}; returning users {_percent(hit_share(story, returning=True))}"),
        ("scored from", _shares(counts(story.outcome[story.outcome >= 0], OUTCOMES))),
        ("answers", _shares(counts(story.status, STATUSES))),
        ("decisions", _shares(counts(story.reason, REASONS)) if scenario.mode == "relay" else "no events"),
        *([("refused", ", ".join(_forwards(story)))] if story.forwards else []),
        ("device busy", f"{busy.mean():.1%} on average, {busy.max():.1%} the busiest worker"),
        ("HBM a worker", f"{render_bytes(float(story.hbm_bytes.mean()))} used of {render_bytes(worker.hbm_bytes)}"),
        ("pinned at most", f"{render_bytes(pinned)} of {render_bytes(worker.pinned_share * worker.hbm_bytes)}"),
        ("held at most", f"{render_bytes(float(story.held_bytes.max()))}, with what waiting rankings hold"),
        ("DRAM a worker", f"{render_bytes(float(story.dram_bytes.mean()))} used of {render_bytes(worker.dram_bytes)}"),
    ]
    if scenario.failure is not None:
        rows += [("", ""), *_failure(scenario, story)]
    speed = story.simulated_s * len(story.busy)
    if wall_s is not None:
        words = f"{speed:,.0f} worker seconds in {wall_s:.1f} s ({story.cpu_s:.1f} s of processor time)"
        rows += [("", ""), ("speed", words)]
    return table(rows)


def _failure(scenario: Scenario, story: Story) -> list[Row]:
    assert scenario.failure is not None
    seconds = windows(story, scenario.settings.relay.slo_ms)
    recovered = recovery_s(seconds, scenario.failure.at)
    late = latencies(story) > scenario.settings.relay.slo_ms
    after = story.at >= scenario.failure.at
    taken_over = "none" if story.taken_over_s is None else f"{story.taken_over_s:.2f} s"
    lines = [
        ("failure", f"{story.dead} of {len(story.busy)} workers at {scenario.failure.at:g} s"),
        ("lanes moved", f"{story.moved_lanes}, after {taken_over}"),
        ("requests hit by it", f"{int((late & after).sum()):,} late or without scores, of {int(after.sum()):,} since"),
        ("recovered", "not within the simulated time" if recovered is None else f"after {recovered:.0f} s (*)"),
        ("(*)", f"the first of {GOOD_WINDOWS} seconds with requests in a row with at most {ALLOWED_LATE:.0%} late"),
        ("second by second", "second, requests, P99, late, hits"),
    ]
    first = max(0, int(scenario.failure.at) - 2)
    return [*lines, *(("", _window(window)) for window in seconds[first : first + 14])]


def _window(window: Window) -> str:
    return (
        f"{window.at:4.0f}  {window.requests:6,}  {render_ms(window.p99_ms):>9}  {render_share(window.late):>6}  "
        f"{render_share(window.hits):>6}"
    )


def _forwards(story: Story) -> list[str]:
    words = {
        "sent": "forwarded",
        "delegate": "passed on to a delegate",
        "delegate_gone": "not passed on to a delegate: it is gone, or would be too late",
        **{str(name): f"not: {why}" for name, why in WHY.items()},
    }
    return [f"{count:,} {words[name]}" for name, count in story.forwards.most_common()]


def _kinds(scenario: Scenario, story: Story) -> list[Row]:
    """The P99s of short and long users, where there are both."""
    if not scenario.traffic.two_kinds:
        return []
    kinds = [("short", p99(story, long=False)), ("long", p99(story, long=True))]
    return [(f"  {name} users", f"{render_ms(each.value)}{_ms_error(each)}") for name, each in kinds]


def _traffic(scenario: Scenario) -> list[Row]:
    first, *others = scenario.traffic.describe().splitlines()
    return [("traffic", first), *(("", line) for line in others)]


def table(rows: Sequence[Row]) -> Table:
    """A table of right-aligned names and left-aligned texts."""
    found = Table.grid(padding=(0, 2, 0, 0))
    found.add_column(justify="right", no_wrap=True)
    found.add_column(overflow="fold")
    for name, text in rows:
        found.add_row(name, text)
    return found


def _relays(lanes: int) -> str:
    """The note on a fleet with more lanes than a relay may have."""
    relays = -(-lanes // MAX_LANES)
    return (
        f"a relay has at most {MAX_LANES:,} lanes: this fleet is {relays} relays side by side, each with its own "
        f"kafka.prefix and its share of the users"
    )


def _shares(found: dict[str, int]) -> str:
    whole = sum(found.values())
    return ", ".join(f"{name} {number / whole:.1%}" for name, number in found.items()) if whole else "nothing"


def _percent(estimate: Estimate) -> str:
    return f"{render_share(estimate.value)}{_percent_error(estimate)}"


def _percent_error(estimate: Estimate) -> str:
    return "" if math.isnan(estimate.error) else f" ± {estimate.error:.2%}"


def _ms_error(estimate: Estimate) -> str:
    return f" ± {estimate.error:.1f} ms" if math.isfinite(estimate.error) else ""


def render_ms(value: float) -> str:
    """Milliseconds; "no answer" for the time of requests without one, which is infinite; "none" of no requests."""
    if math.isnan(value):
        return "none"
    return "no answer" if math.isinf(value) else f"{value:.1f} ms"


def _goodput(scenario: Scenario, story: Story) -> list[Row]:
    """Scores within the SLO in a second, and how early the others know that they get none."""
    rate, slo_ms = scenario.traffic.rate, scenario.settings.relay.slo_ms
    good, cut = rate * (1.0 - late_share(story, slo_ms).value), rate * cut_share(story, slo_ms)
    refused = refused_ms(story)
    more = f", and {cut:,.1f} with the newest behaviours alone" if cut else ""
    return [
        *([] if math.isnan(good) else [("goodput", f"{good:,.1f} requests/s within the SLO{more}")]),
        *([] if math.isnan(refused) else [("without scores", f"99 of 100 know it within {render_ms(refused)}")]),
    ]


def render_share(value: float, digits: int = 1) -> str:
    """A percentage; "none" of no requests."""
    return "none" if math.isnan(value) else f"{value:.{digits}%}"


def render_bytes(value: float) -> str:
    """The value in the largest binary unit that it reaches."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value / 1024:.0f} KiB"


def _plain(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    return {"value": _plain(estimate.value), "error": _plain(estimate.error)}
