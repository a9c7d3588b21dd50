"""Scenarios that share one group: what the plan tells of each, and which had better do so, which nothing acts on.

A group of its own keeps a scenario's rankings from waiting behind longer ones of another. One group of all their
workers uses what is idle at each moment: it waits for no move, and needs no whole number of workers for each. Which of
these wins depends on the day. So what is seen of the groups over a day is compared with a simulation of one group.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from relaygr_stream.ops.planner.demand import busy_devices, kinds_of
from relaygr_stream.ops.planner.seen import GroupSeen, PartSeen
from relaygr_stream.ops.planner.utilisation import late
from relaygr_stream.settings.scenarios import Scenario, served_together
from relaygr_stream.wire.planner_status import ScenarioPlan, SharedGroup

#: Scenarios that a reason names: it has a bound on the wire.
MOST_NAMED: Final = 3
#: Groups of one model that are compared, those with most device time: 4 have 6 pairs, each of which is simulated.
MOST_COMPARED: Final = 4
#: How much larger the share of rankings in time must be in one group, mean of the two: half of what is found on days
#: with tides, where it is ahead (0.018 to 0.019, three days of `make bench-scenarios`). At steady rates that is -0.02.
AHEAD: Final = 0.01

#: Two groups, by name.
Pair = tuple[str, str]


class Gain(NamedTuple):
    """Of a group's rankings, a second and averaged over a day: those more that would be in time, were it and another
    one, and all. By their ratio each ranking counts: more are late when most come."""

    more: float
    rankings: float


#: Of each of two groups, in the order of their names.
Gains = tuple[Gain, Gain]


class Group(NamedTuple):
    """A group now: its scenarios, and the share of its rankings that were late for lack of devices; None: there were
    none."""

    served: Sequence[Scenario]
    seen: GroupSeen
    late: float | None


def with_members(
    plans: Mapping[str, ScenarioPlan], groups: Mapping[str, GroupSeen], scenarios: Sequence[Scenario]
) -> dict[str, ScenarioPlan]:
    """The plans of the groups, and one for each scenario that another's workers serve: its part of their demand."""
    found = dict(plans)
    for scenario in scenarios:
        host, seen = plans[scenario.group], groups[scenario.group]
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
        spent_ms, own_ms = (
            seen.prefix_ms * prefix + seen.score_ms * score
            for prefix, score in ((1, 1), (part.prefix_share, part.score_share))
        )
        found[scenario.name] = ScenarioPlan(
            workers=0,
            wanted=0,
            demand=host.demand * own_ms / spent_ms if spent_ms else 0.0,
            headroom_ms=headroom_ms,
            reason=f"{part.per_second:.1f} rankings/s, by the workers of {scenario.group}",
            served_by=scenario.group,
        )
    return found


def averaged_gains(groups: Mapping[str, Group], before: Mapping[Pair, Gains], kept: float) -> dict[Pair, Gains]:
    """What two groups of one model would gain if they were one.

    before: averages, of which so much is kept. Of one model at most MOST_COMPARED groups are compared: six simulations,
    of some 0.1 s of a processor each, less those that are known (utilisation.py). What is not compared now fades.
    """
    by_model = defaultdict[str, list[str]](list)
    for name, group in groups.items():
        if group.late is not None and busy_devices(group.seen) > 0:
            by_model[group.served[0].model].append(name)
    found = {
        pair: (one._replace(more=one.more * kept), other._replace(more=other.more * kept))
        for pair, (one, other) in before.items()
        if groups.keys() >= set(pair)
    }
    for names in by_model.values():
        names.sort(key=lambda name: busy_devices(groups[name].seen), reverse=True)
        for pair in itertools.combinations(sorted(names[:MOST_COMPARED]), 2):
            one, other = _gains([groups[name] for name in pair])
            had = before.get(pair, (one, other))
            found[pair] = _averaged(had[0], one, kept), _averaged(had[1], other, kept)
    return found


def ahead(gains: Gains) -> float:
    """How much larger the share of rankings in time would be, mean of the two."""
    return statistics.mean(each.more / each.rankings for each in gains)


def _gains(groups: Sequence[Group]) -> list[Gain]:
    kinds = [kinds_of(each.seen, each.served) for each in groups]
    use = sum(busy_devices(each.seen) for each in groups) / sum(len(each.seen.workers) for each in groups)
    shares = iter(late(*itertools.chain(*kinds), use=use))
    found = []
    for group, own in zip(groups, kinds, strict=True):
        together = statistics.mean(itertools.islice(shares, len(own)))
        rate = group.seen.per_second
        found.append(Gain(((group.late or 0.0) - together) * rate, rate))
    return found


def _averaged(before: Gain, now: Gain, kept: float) -> Gain:
    return Gain(*(new + (old - new) * kept for old, new in zip(before, now, strict=True)))


def shared_group(by: Mapping[Pair, Gains]) -> SharedGroup | None:
    """The two groups that had better be one; None: none. by: as `averaged_gains` finds it."""
    pair = max(by, key=lambda pair: ahead(by[pair]), default=None)
    if pair is None or (more := ahead(by[pair])) < AHEAD:
        return None
    return SharedGroup(
        scenarios=pair,
        reason=f"they have one model, and {more:.1%} more of their rankings would be in time, by simulation",
    )
