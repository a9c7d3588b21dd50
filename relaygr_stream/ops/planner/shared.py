"""Which scenarios had better share one group: advice, on which nothing acts.

A group of its own keeps a scenario's rankings from waiting behind longer ones of another. Where no ranking is so long
that the other SLO suffers from it, one group of all their workers carries more than groups that lack some: it shares
what is idle at each moment, and splits by no whole number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from relaygr_stream.ops.planner.demand import SLICE
from relaygr_stream.ops.planner.seen import GroupSeen
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.wire.planner_status import SharedGroup


class Group(NamedTuple):
    """A scenario now. floor: the workers that its demand needs."""

    scenario: Scenario
    seen: GroupSeen
    floor: int

    @property
    def has_traffic(self) -> bool:
        """Whether there are rankings, whose time is known."""
        return bool(self.seen.workers) and self.seen.score_ms > 0


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
