"""Overload: what is in time of more than the largest rate carried, where callers wait for a second."""

from __future__ import annotations

from typing import Final

from relaygr_lab.bench.probe import Judgement
from relaygr_lab.bench.results import Probe

#: How long a caller waits: a due time of its own would refuse earlier.
WAIT_S: Final = 1.0
#: Judged seconds of each rate.
SECONDS: Final = 10.0


def judgement(slo_ms: float, warm_up_s: float) -> Judgement:
    """A probe that goes on to its end, whatever is late."""
    wait_slos = WAIT_S * 1e3 / slo_ms
    return Judgement(slo_ms, 1, SECONDS, warm_up_s, stages=1, whole=True, timeout_slos=wait_slos)


def seconds(loads: tuple[float, ...], warm_up_s: float) -> float:
    """What the loads of one cell take, with the largest rate carried before them."""
    return (1 + len(loads)) * (SECONDS + warm_up_s + WAIT_S) if loads else 0.0


def not_offered(revisit: float) -> str:
    """What is said where there is no rate to multiply."""
    return f"not offered at {revisit:.0%} returning: the relay carried no rate there within the SLO"


def line(load: float, probe: Probe, carried: Probe, slo_ms: float) -> str:
    """What is in time at `load` times the largest rate carried, of what is at that."""
    known = probe.refused_p99
    refused = "" if known is None else f", 99 % of the refused know it within {known / slo_ms:.2f} SLO"
    cut = f" and {probe.cut:.1%} cut to their newest behaviours" if probe.cut else ""
    ratio = load * (probe.within + probe.cut) / carried.within if carried.within else 0.0
    return (
        f"{load:g} × {carried.rate:,.1f}/s, {probe.revisit:.0%} returning: {probe.within:.1%} in time{cut}, "
        f"{ratio:.2f} of the largest rate's{refused}"
    )
