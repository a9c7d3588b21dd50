"""How many workers a scenario needs by its own traffic: a formula, and the bound in it.

Demand of a scenario in workers:  λ·p/ρp + λ·r/ρr

λ: rankings a second, refused ones included. p: device time for a request's prefix, whether computed, extended or found.
r: that of its score. Both are measured device time, so they are of the lengths that came, not of a mean length. ρp and
ρr: the largest utilisation at which prefixes are ready within the head start, and rankings answered within the SLO.
"""

from __future__ import annotations

import math
from typing import Final

from relaygr_stream.ops.planner.seen import GroupSeen
from relaygr_stream.settings.scenarios import Scenario

#: Share of late answers that the SLO allows: it is one at P99.
ALLOWED_LATE: Final = 0.01
#: A device that is busier has no time to spare, whatever the bound says (ops/status/overload.py: BUSY).
MOST_USE: Final = 0.8
#: A bound below it would ask for more than ten workers where one suffices: then the SLO cannot be kept by workers.
LEAST_USE: Final = 0.1
#: Longest part of the SLO that a ranking waits for a slice of pre-inference (worker.max_ranking_delay_ms).
SLICE: Final = 0.2
#: Squared coefficient of variation of service times that the bound assumes, which are gamma distributed: candidates are
#: about as many each time, lengths are not.
VARIATION: Final = 0.25


def utilisation(service_ms: float, within_ms: float) -> float:
    """The largest utilisation at which 99 of 100 of M/G/1's customers are through within_ms after they came.

    A wait longer than t has about the probability ρ·exp(−y·t / s), where ρ = y / (m(y) − 1) and m is the moment
    generating function of a service time of mean 1 (Cramér and Lundberg's bound): both fall with y.
    """
    room = max(0.0, within_ms - service_ms) / max(service_ms, 1e-9)
    low, high = 0.0, 1 / VARIATION
    for _ in range(30):
        y = (low + high) / 2
        use = y / (math.pow(1 - VARIATION * y, -1 / VARIATION) - 1)
        low, high = (low, y) if use * math.exp(-y * room) <= ALLOWED_LATE else (y, high)
    return min(MOST_USE, max(LEAST_USE, use))


def demand_of(group: GroupSeen, scenario: Scenario) -> float:
    """The workers that the group's traffic needs. scenario: the SLO and the head start to keep."""
    return sum(demand_in_parts(group, scenario))


def demand_in_parts(group: GroupSeen, scenario: Scenario) -> tuple[float, float]:
    """As demand_of: for prefixes, and for scores."""
    use = utilisation(group.score_ms, (1 - SLICE) * scenario.slo_ms)
    ranking = group.score_ms / use
    prefix = group.prefix_ms / utilisation(group.prefix_ms, scenario.lead_ms)
    return group.per_second * prefix / 1e3, group.per_second * ranking / 1e3
