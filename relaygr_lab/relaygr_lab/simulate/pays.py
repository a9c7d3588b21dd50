"""`relaygr simulate --pays`: one sentence and one table, the smallest fleets of full inference and of the relay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from relaygr_lab.charts import Axis, Point, Series, line_file
from relaygr_lab.drawing import BLUE, GREEN, RED
from relaygr_lab.simulate.plan import Probe, request_ms
from relaygr_lab.simulate.planned import Planned, headroom_text
from relaygr_lab.simulate.report import render_bytes, render_ms, render_share
from relaygr_lab.simulate.scenario import GROUP, Scenario
from relaygr_lab.simulate.story import hit_share, late_share, latencies, p99, percentile

#: Without a rate, the traffic is what devices of so many workers take in the relay: a group, which is simulated whole.
WORKERS: Final = GROUP
#: Fewer workers by less than this factor are within what the search and the sample leave open.
OPEN: Final = 1.1
COLOURS: Final = {"full": RED, "cache": GREEN, "relay": BLUE}


def with_own_rate(scenario: Scenario) -> Scenario:
    """The scenario with the rate that keeps the devices of WORKERS busy in the relay."""
    rate = WORKERS * 1e3 / request_ms(scenario)
    return dataclasses.replace(scenario, traffic=dataclasses.replace(scenario.traffic, rate=float(f"{rate:.2g}")))


def answer(planned: Planned) -> str:
    """Whether it pays, in a sentence."""
    relay, full = planned.verified, planned.full
    scenario, needed = relay.scenario, planned.memory
    slo = f"{scenario.settings.relay.slo_ms:g} ms at P99"
    traffic = f"{planned.rate:g} requests/s{headroom_text(planned)}"
    memory = f"{render_bytes(needed.hbm)} of HBM and {render_bytes(needed.reuse)} of DRAM each"
    ours = f"{_workers(scenario.workers)} with {memory}"
    if not relay.holds:
        return f"It is open: {ours} do not keep {slo} for {traffic}; give more (--hbm), or a higher --hit-target."
    if full is None:
        return f"It pays: {ours} keep {slo} for {traffic}, and in full inference no fleet that was tried does."
    theirs = full.scenario.workers
    if theirs < OPEN * scenario.workers:
        p99s = f"a P99 of {render_ms(p99(relay.story).value)} instead of {render_ms(p99(full.story).value)}"
        return f"It does not pay: {traffic} within {slo} take {ours}, and {_workers(theirs)} in full inference; {p99s}."
    return (
        f"It pays: {ours} instead of {theirs:,} carry {traffic} within {slo}: {theirs - scenario.workers:,} saved, "
        f"{theirs / scenario.workers:.1f} times the traffic of each."
    )


def render_pays(planned: Planned) -> RenderableType:
    """The answer, the table, and what both rest on."""
    relay, full = planned.verified, planned.full
    table = Table(box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for name in ("full inference", "relay"):
        table.add_column(name, justify="right")
    for row in rows(planned):
        table.add_row(*row)
    traffic = relay.scenario.traffic.describe().splitlines()
    each = [one for one in (full, relay) if one is not None]
    sampled = max(len(one.story.busy) for one in each)
    basis = [
        f"costs: {relay.scenario.costs.source}",
        *traffic,
        f"smallest fleets with 99 % within {relay.scenario.settings.relay.slo_ms:g} ms, simulated ({sampled} workers "
        f"at most stand for each); the memory is of {planned.hit_target:.0%} hits among returning users",
    ]
    return Group(answer(planned), table, *basis)


def rows(planned: Planned) -> list[tuple[str, str, str]]:
    """(what, full inference, relay)."""
    relay, full, needed = planned.verified, planned.full, planned.memory
    largest = needed.longest
    return [
        (
            "workers",
            "none keeps the SLO" if full is None else f"{full.scenario.workers:,}",
            f"{relay.scenario.workers:,}",
        ),
        _row("requests/s a worker", full, relay, lambda one: f"{planned.rate / one.scenario.workers:,.1f}"),
        _row("P50", full, relay, lambda one: render_ms(percentile(latencies(one.story), 0.5))),
        _row("P99", full, relay, lambda one: render_ms(p99(one.story).value)),
        _row("late", full, relay, lambda one: render_share(late_share(one.story, _slo_ms(one)).value, 2)),
        _row("hits", full, relay, lambda one: render_share(hit_share(one.story).value)),
        _row("device busy", full, relay, lambda one: f"{one.story.busy.mean():.0%}"),
        ("HBM a worker, for prefix KV", render_bytes(largest), render_bytes(needed.hbm)),
        ("DRAM a worker, for prefix KV", "none", render_bytes(needed.reuse)),
        (
            "HBM and DRAM of the fleet",
            "–" if full is None else render_bytes(full.scenario.workers * largest),
            render_bytes(relay.scenario.workers * (needed.hbm + needed.reuse)),
        ),
    ]


def chart(probes: Sequence[Probe], slo_ms: float) -> str:
    """P99 by the number of workers of every fleet that was tried with the configured memory, as an SVG file.

    probes: in the order in which they were tried. Raises ImportError without matplotlib.
    """
    first = {(one.scenario.mode, one.scenario.workers): one for one in reversed(probes)}  # later: with less memory
    series = []
    for mode, colour in COLOURS.items():
        found = [(one, p99(one.story).value) for (of, _), one in first.items() if of == mode]
        points = [Point(one.scenario.workers, ms, hollow=not one.holds) for one, ms in found if math.isfinite(ms)]
        if points:
            series.append(Series(f"{mode} (hollow: the SLO is not kept)", colour, points))
    return line_file(series, Axis("workers", log=True), Axis("P99, ms", log=True), (slo_ms, "SLO"))


def _row(what: str, full: Probe | None, relay: Probe, text: Callable[[Probe], str]) -> tuple[str, str, str]:
    return what, "–" if full is None else text(full), text(relay)


def _slo_ms(probe: Probe) -> float:
    return probe.scenario.settings.relay.slo_ms


def _workers(count: int) -> str:
    return f"{count:,} worker{'s' if count > 1 else ''}"
