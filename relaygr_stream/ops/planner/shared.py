"""Scenarios that share one group: what the plan tells of each, and which had better do so, which nothing acts on.

A group of its own keeps a scenario's rankings from waiting behind longer ones of another. Where no ranking is so long
that the other SLO suffers from it, one group of all their workers carries more than groups that lack some: it shares
what is idle at each moment, and splits by no whole number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from relaygr_stream.ops.planner.demand import demand_in_parts
from relaygr_stream.ops.planner.seen import GroupSeen, PartSeen
from relaygr_stream.ops.planner.utilisation import SLICE
from relaygr_stream.settings.scenarios import Scenario, served_together
from relaygr_stream.wire.planner_status import ScenarioPlan, SharedGroup

#: Scenarios that a reason names: it has a bound on the wire.
MOST_NAMED: Final = 3


class Group(NamedTuple):
    """A scenario now. floor: the workers that its demand needs."""

    scenario: Scenario
    seen: GroupSeen
    floor: int

    @property
    def has_traffic(self) -> bool:
        """Whether there are rankings, whose time is known."""
        return bool(self.seen.workers) and self.seen.score_ms > 0


def with_members(
    plans: Mapping[str, ScenarioPlan], groups: Sequence[Group], scenarios: Sequence[Scenario]
) -> dict[str, ScenarioPlan]:
    """The plans of the groups, and one for each scenario that another's workers serve: its part of their demand."""
    found, by_name = dict(plans), {each.scenario.name: each for each in groups}
    for scenario in scenarios:
        host, seen = plans[scenario.group], by_name[scenario.group].seen
        others = [] if scenario.served_by else [each.name for each in served_together(scenarios, scenario.name)[1:]]
        if not (scenario.served_by or (others and seen.parts)):
            continue
        part = seen.parts.get(scenario.name, PartSeen())
        headroom_ms = None if part.p99_ms is None else scenario.slo_ms - part.p99_ms
        if not scenario.served_by:
            more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
            told = f"{host.reason}; with {', '.join(others[:MOST_NAMED])}{more}"
            found[scenario.name] = replace(host, headroom_ms=headroom_ms, reason=told)
            continue
        prefix, score = demand_in_parts(seen, by_name[scenario.group].scenario)
        share = (prefix * part.prefix_share + score * part.score_share) / (prefix + score) if prefix + score else 0.0
        found[scenario.name] = ScenarioPlan(
            workers=0,
            wanted=0,
            demand=host.demand * share,
            headroom_ms=headroom_ms,
            reason=f"{part.per_second:.1f} rankings/s, by the workers of {scenario.group}",
            served_by=scenario.group,
        )
    return found


def shared_group(groups: Sequence[Group], reserve: int) -> SharedGroup | None:
    """The scenarios that had better share their workers now, by a group that lacks some; None: none.

    They have one model, and need together more workers than they have, and the reserve.
    """
    for lacking in groups:
        if not lacking.has_traffic or lacking.floor <= len(lacking.seen.workers):
            continue
        found = [lacking]
        for each in groups:
            if each is not lacking and each.has_traffic and all(_may_share(each, other) for other in found):
                found.append(each)
        needed, there = sum(each.floor for each in found), sum(len(each.seen.workers) for each in found) + reserve
        if len(found) > 1 and needed > there:
            longest = max(found, key=lambda each: each.seen.score_ms)
            tightest = min(found, key=lambda each: each.scenario.slo_ms)
            return SharedGroup(
                scenarios=tuple(sorted(each.scenario.name for each in found)),
                reason=f"they have one model and need {needed} workers of {there}; the longest ranking, "
                f"{longest.seen.score_ms:.1f} ms of {longest.scenario.name}, lets others wait within the "
                f"{tightest.scenario.slo_ms:g} ms of {tightest.scenario.name}",
            )
    return None


def _may_share(one: Group, other: Group) -> bool:
    """Whether the rankings of each are within its SLO behind a ranking of the other, and a slice of pre-inference."""
    score_ms = one.seen.score_ms + other.seen.score_ms
    tightest_ms = min(one.scenario.slo_ms, other.scenario.slo_ms)
    return one.scenario.model == other.scenario.model and score_ms <= (1 - SLICE) * tightest_ms
