"""A plan as text: how many workers and how much memory this traffic needs, beside full inference, with which P99, also
when a rack fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType

from relaygr_lab.simulate.plan import Memory, Probe, Simulate, search, size
from relaygr_lab.simulate.report import render, render_bytes, render_ms, render_share, summary, table
from relaygr_lab.simulate.scenario import SURVIVORS_AND_DEAD, Failure, Scenario
from relaygr_lab.simulate.story import Story, hit_share, late_share, p99
from relaygr_stream.errors import CapacityError

#: Longest warm-up of full inference: until its queues are what they stay.
FULL_WARM_S: Final = 5.0
#: The default failure: this share of the workers, at this second.
RACK: Final = 0.02
RACK_AT_S: Final = 5.0
#: Simulated time after the failure: the session timeout (6 s by default), and more than as long again.
AFTER_RACK_S: Final = 20.0
ONE_WORKER: Final = (
    "When a rack fails: not simulated. The fleet has one worker: while it is away no request is answered; run two."
)


@dataclass(frozen=True)
class Planned:
    """A plan: the smallest fleet, its memory, and their simulations."""

    best: Probe
    memory: Memory
    verified: Probe
    failing: tuple[Scenario, Story] | None  # None: the fleet has one worker, so no other gets its lanes; or not asked
    hit_target: float
    headroom: float  # share of the planned rate that the traffic leaves free
    full: Probe | None  # the smallest fleet in full inference; None: none found, or it is what was planned

    @property
    def rate(self) -> float:
        """The traffic's requests per second; the fleets are simulated at the planned rate."""
        return self.best.scenario.traffic.rate * (1 - self.headroom)

    @property
    def full_workers(self) -> int | None:
        """The workers of the smallest fleet in full inference, as `full`."""
        return None if self.full is None else self.full.scenario.workers

    def figures(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "workers": self.best.scenario.workers,
            "full_workers": self.full_workers,
            "rate": self.rate,
            "headroom": self.headroom,
            "holds": self.verified.holds,
            "memory": dataclasses.asdict(self.memory),
            "as_configured": summary(self.best.scenario, self.best.story),
            "with_planned_memory": summary(self.verified.scenario, self.verified.story),
            "failure": None if self.failing is None else summary(*self.failing),
            "full": None if self.full is None else summary(self.full.scenario, self.full.story),
        }


def plan(
    scenario: Scenario,
    hit_target: float,
    simulate: Simulate,
    report: Callable[[Probe], None],
    *,
    headroom: float = 0.0,
    fails: bool = True,
) -> Planned:
    """Search the fleet, size its memory, verify it, simulate a failure. Raises CapacityError if no fleet holds.

    headroom: the share of the rate at which the fleet must hold that the scenario's traffic leaves free. fails: whether
    to simulate a failure.
    """
    traffic = dataclasses.replace(scenario.traffic, rate=scenario.traffic.rate / (1 - headroom))
    planned = dataclasses.replace(scenario, traffic=traffic)
    best = search(planned, simulate, report)
    needed, verified = size(best, hit_target, simulate, report)
    full = search_full(planned, simulate, report)
    failing = _fail(verified.scenario, planned, simulate) if fails else None
    return Planned(best, needed, verified, failing, hit_target, headroom, full)


def search_full(scenario: Scenario, simulate: Simulate, report: Callable[[Probe], None]) -> Probe | None:
    """The smallest fleet that holds in full inference; None: no fleet tried does, or that is the scenario's mode."""
    if scenario.mode == "full":
        return None
    # Nothing is kept between requests, so there are no caches to fill.
    full = dataclasses.replace(scenario, mode="full", warm_s=min(scenario.warm_s, FULL_WARM_S))
    try:
        return search(full, simulate, report)
    except CapacityError:
        return None


def _fail(fleet: Scenario, asked: Scenario, simulate: Simulate) -> tuple[Scenario, Story] | None:
    """Simulate the planned fleet with the requested failure."""
    if fleet.workers < SURVIVORS_AND_DEAD:
        return None
    failure = asked.failure or Failure(share=RACK, at=RACK_AT_S)
    failing = dataclasses.replace(
        fleet,
        failure=failure,
        seconds=max(asked.seconds, failure.at + AFTER_RACK_S),
    )
    return failing, simulate(failing)


def render_probe(probe: Probe) -> str:
    """The probe in one line."""
    scenario, story = probe.scenario, probe.story
    late = late_share(story, scenario.settings.relay.slo_ms)
    return (
        f"{scenario.workers:>9,} workers, {scenario.mode}, {render_bytes(scenario.settings.worker.hbm_bytes):>9} HBM: "
        f"P99 {render_ms(p99(story).value):>9}, {render_share(late.value, 2):>6} late, "
        f"device {story.busy.mean():4.0%} busy: {'holds' if probe.holds else 'fails'}"
    )


def _answer(planned: Planned) -> str:
    """The plan in a sentence."""
    scenario, needed = planned.best.scenario, planned.memory
    traffic = f"{scenario.settings.relay.slo_ms:g} ms at P99 for {planned.rate:g} requests/s{headroom_text(planned)}"
    fleet = f"{scenario.workers:,} worker{'s' if scenario.workers > 1 else ''}"
    memory = f"{render_bytes(needed.hbm)} of HBM and {render_bytes(needed.reuse)} of DRAM each"
    if not planned.verified.holds:
        return f"{fleet} with {memory} do not keep {traffic}: that takes more memory, or a higher --hit-target."
    return f"{fleet} with {memory} keep{'' if scenario.workers > 1 else 's'} {traffic}.{_beside(planned)}"


def headroom_text(planned: Planned) -> str:
    """What the fleet carries beyond the traffic, behind its rate."""
    if not planned.headroom:
        return ""
    return f" with {planned.headroom:.0%} headroom ({planned.best.scenario.traffic.rate:,.0f}/s at most)"


def _beside(planned: Planned) -> str:
    workers, full = planned.best.scenario.workers, planned.full_workers
    if planned.best.scenario.mode == "full":
        return ""
    if full is None:
        return " In full inference no fleet that was tried does."
    return f" Full inference takes {full:,}, {full / workers:.1f} times as many."


def render_plan(planned: Planned) -> RenderableType:
    """The plan: the answer, then why, then the simulations."""
    scenario, needed = planned.best.scenario, planned.memory
    hits = hit_share(planned.verified.story, returning=True)
    of = render_bytes
    by_reuse = f"{of(needed.reuse)} for {planned.hit_target:.0%} hits among returning users, by reuse distance"
    until = "until the SLO held"
    if not planned.verified.holds:
        until = "to worker.hbm_bytes; the SLO held at no size with this DRAM (a higher --hit-target takes more)"
    rows = [
        ("workers", f"{scenario.workers:,} ({scenario.traffic.rate / scenario.workers:.1f} requests/s each)"),
        ("a prefix", f"{of(needed.entry)}"),
        ("pinned a worker", f"{of(needed.pinned)} at most, {of(needed.little)} on average by Little's law"),
        ("HBM a worker", f"{of(needed.hbm)}: doubled from the least that the cache takes {until}"),
        ("DRAM a worker", f"{by_reuse}; simulated: {render_share(hits.value)}"),
        ("fleet", f"{of(scenario.workers * needed.hbm)} HBM, {of(scenario.workers * needed.reuse)} DRAM"),
    ]
    failing = ["When a rack fails:", render(*planned.failing)] if planned.failing else [ONE_WORKER]
    verified = render(planned.verified.scenario, planned.verified.story)
    return Group(f"{_answer(planned)}\n", table(rows), "\nWith this memory:", verified, "", *failing)
