"""How many workers a group needs by its own traffic.

Demand in workers:  λ·p/ρ + λ·r/ρ

λ: rankings a second, refused ones included. p: device time for a request's prefix, whether computed, extended or found.
r: that of its score. ρ: the largest utilisation at which a device keeps the SLOs of all that it serves
(utilisation.py). p and r are the means of the requests that came; ρ follows from these and from the variances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from relaygr_stream.ops.planner.seen import GroupSeen, PartSeen
from relaygr_stream.ops.planner.utilisation import Kind, Work, utilisation
from relaygr_stream.settings.scenarios import Scenario

#: What asks for more is a count that no worker can have stated rightly. An average forgets it within an hour.
MOST_WORKERS: Final = 100_000


def demand_of(group: GroupSeen, *served: Scenario) -> float:
    """The workers that the group's traffic needs, up to MOST_WORKERS. served: scenarios, whose SLOs it keeps."""
    return min(MOST_WORKERS, busy_devices(group) / utilisation(*kinds_of(group, served)))


def busy_devices(group: GroupSeen) -> float:
    """Devices that its traffic keeps busy."""
    return group.per_second * (group.prefix_ms + group.score_ms) / 1e3


def kinds_of(group: GroupSeen, served: Sequence[Scenario]) -> tuple[Kind, ...]:
    """The requests of each scenario that has traffic. Where workers do not tell the scenarios apart, all are as one,
    with the tightest SLO and the shortest head start."""
    told = [(each, group.parts.get(each.name, PartSeen())) for each in served]
    told = [(each, part) for each, part in told if part.per_second > 0]
    if not told:
        prefix, score = Work(group.prefix_ms, group.prefix_variation), Work(group.score_ms, group.score_variation)
        lead_ms, slo_ms = min(each.lead_ms for each in served), min(each.slo_ms for each in served)
        return (Kind(group.per_second or 1.0, prefix, score, lead_ms, slo_ms),)
    rates = [part.per_second for _, part in told]
    prefixes = _by_kind(group.prefix_ms, group.prefix_variation, rates, [part.prefix_share for _, part in told])
    scores = _by_kind(group.score_ms, group.score_variation, rates, [part.score_share for _, part in told])
    return tuple(
        Kind(part.per_second, prefix, score, each.lead_ms, each.slo_ms)
        for (each, part), prefix, score in zip(told, prefixes, scores, strict=True)
    )


def _by_kind(mean_ms: float, variation: float, rates: Sequence[float], shares: Sequence[float]) -> list[Work]:
    """The work of each kind, from that of all. shares: of the device time. Only the variation of all is known: each
    kind has what remains of it when their means are taken out."""
    means = [mean_ms * sum(rates) * share / rate for rate, share in zip(rates, shares, strict=True)]
    squares = sum(rate * mean * mean for rate, mean in zip(rates, means, strict=True)) / sum(rates)
    within = max(0.0, (1 + variation) * mean_ms * mean_ms / squares - 1) if squares else 0.0
    return [Work(mean, within) for mean in means]
