"""How many workers a scenario needs by its own traffic.

Demand of a scenario in workers:  λ·p/ρ + λ·r/ρ

λ: rankings a second, refused ones included. p: device time for a request's prefix, whether computed, extended or found.
r: that of its score. ρ: the largest utilisation at which a device keeps the SLO (utilisation.py). p and r are the
means of the requests that came; ρ follows from these and from the variances.
"""

from __future__ import annotations

from typing import Final

from relaygr_stream.ops.planner.seen import GroupSeen
from relaygr_stream.ops.planner.utilisation import Work, utilisation
from relaygr_stream.settings.scenarios import Scenario

#: What asks for more is a count that no worker can have stated rightly. An average forgets it within an hour.
MOST_WORKERS: Final = 100_000


def demand_of(group: GroupSeen, scenario: Scenario) -> float:
    """The workers that the group's traffic needs, up to MOST_WORKERS. scenario: the SLO and the head start to keep."""
    return min(MOST_WORKERS, sum(demand_in_parts(group, scenario)))


def demand_in_parts(group: GroupSeen, scenario: Scenario) -> tuple[float, float]:
    """As demand_of: for prefixes, and for scores."""
    prefix, score = Work(group.prefix_ms, group.prefix_variation), Work(group.score_ms, group.score_variation)
    per_ms = group.per_second / 1e3 / utilisation(prefix, score, scenario.lead_ms, scenario.slo_ms)
    return per_ms * prefix.mean_ms, per_ms * score.mean_ms
