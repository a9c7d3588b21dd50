"""Decides how many workers each scenario wants, and which worker moves next: a pure function, without I/O.

    decide(memory, observation, scenarios, damping) ─► (memory, plan)

The same function runs in `relaygr planner`, in the simulator, in tests, and over a recorded day.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from relaygr_stream.ops.planner.demand import busy_devices, demand_of
from relaygr_stream.ops.planner.seen import GroupSeen, Observation
from relaygr_stream.ops.planner.shared import Gains, Group, averaged_gains, shared_group, with_members
from relaygr_stream.ops.planner.utilisation import ALLOWED_LATE, MOST_USE
from relaygr_stream.settings.scenarios import RESERVE, Scenario, groups_of, served_together
from relaygr_stream.wire.planner_status import FleetPlan, Move, ScenarioPlan

#: Fewer late answers of a worker in a window are chance.
FEW_LATE: Final = 3
#: A group is below its floor where it lacks more than this part of a worker, and gives one where its demand leaves this
#: share of the rest free. Between the two lies what an average over minutes still wanders.
LACK: Final = 0.05
SPARE: Final = 0.05
#: A floor that was raised stays until demand is so much of a worker below where it was raised, so that it does not
#: flicker where demand lies at it.
STAYS: Final = 0.04
#: An average over minutes is behind what rises or falls. What it is behind counts beyond this share of the average:
#: within it, averages of noise wander.
BEHIND: Final = 0.05
#: Wanted workers fall where their use is below this share of the wanted use.
DOWN: Final = 0.7
DOWN_SPARE: Final = 0.1
#: What workers show corrects the simulated demand, by this factor at most, which fades within days: all are late though
#: the demand fits, or none is though it does not.
MOST_FACTOR: Final = 3.0
FADE_S: Final = 86_400.0
#: How much better off an equal must be that gives a worker which it needs.
MORE: Final = 1.25
#: Answers of a group in a window below which it does not show that it keeps its SLO.
ENOUGH: Final = 200
#: Late workers whose devices are used less than this share of the wanted use are not late for lack of workers.
IDLE: Final = 0.5


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision keeps for the next one, by scenario. began_s: of the first. changed_s: when a group's number of
    workers changed last; the start counts as a change."""

    began_s: float | None = None
    at_s: float = 0.0
    demand: dict[str, float] = {}
    slower: dict[str, float] = {}  # the average of that average: how far apart they are says how fast demand changes
    floor: dict[str, int] = {}
    factor: dict[str, float] = {}
    below_s: dict[str, float] = {}  # below its floor since
    late_s: dict[str, float] = {}  # all its workers late since
    kept_s: dict[str, float] = {}  # its SLO kept since
    workers: dict[str, int] = {}
    changed_s: float = 0.0
    gains: dict[tuple[str, str], Gains] = {}  # of two groups, were they one


@dataclass(frozen=True)
class Damping:
    """Damping, in seconds. floor_s: demand is averaged over it. patience_s: a group is below its floor, or late, for so
    long before it takes a worker. settle_s: after a change the caches fill; the next move waits. arrive_s: after that a
    move is given up; the worker drains, loads another model and warms up meanwhile."""

    floor_s: float = 180.0
    patience_s: float = 30.0
    settle_s: float = 60.0
    arrive_s: float = 180.0


DAY: Final = Damping()


@dataclass(frozen=True)
class _Need:
    """One scenario now. demand: averaged, and corrected by `factor`. floor: the fewest workers that carry it."""

    scenario: Scenario
    seen: GroupSeen
    demand: float
    factor: float
    floor: int

    @property
    def workers(self) -> int:
        return len(self.seen.workers)

    @property
    def is_below(self) -> bool:
        return self.workers < self.floor

    @property
    def may_give(self) -> bool:
        return self.workers > self.scenario.min_workers

    @property
    def is_whole_without_one(self) -> bool:
        return self.may_give and self.demand <= (1 - SPARE) * (self.workers - 1)

    def wanted(self) -> int:
        """The floor; above it, what there is, less those whose use is low."""
        wanted = max(self.floor, self.workers)
        while wanted > self.floor and self.demand < min(DOWN * wanted, (1 - DOWN_SPARE) * (wanted - 1)):
            wanted -= 1
        return wanted

    @property
    def reason_kind(self) -> str:
        """What decides how many are wanted, of REASON_KINDS."""
        if not self.workers:
            return "unserved"
        if self._is_least:
            return "min_workers"
        return self._correction or "demand"

    def reason(self) -> str:
        """The same, in words and numbers."""
        seen = self.seen
        per_request = f"{seen.prefix_ms:.1f} ms a prefix and {seen.score_ms:.1f} ms a score"
        found = f"{seen.per_second:.1f} rankings/s, {per_request}, need {self.demand:.2f} workers"
        if not self.workers:
            found = "no worker serves it"
        if self._correction:
            because = "all its workers were late with fewer" if self._correction == "late" else "as few kept the SLO"
            found += f", corrected by {self.factor:.2f}, because {because}"
        if self._is_least:
            found += f"; min_workers is {self.scenario.min_workers}"
        return found

    @property
    def _correction(self) -> str:
        """Which way what its workers showed corrects the demand; "": hardly."""
        return ("late" if self.factor > 1 else "kept") if abs(self.factor - 1) > LACK else ""

    @property
    def _is_least(self) -> bool:
        return self.floor == self.scenario.min_workers > self.demand


def decide(
    memory: Memory, seen: Observation, scenarios: Sequence[Scenario], damping: Damping = DAY
) -> tuple[Memory, FleetPlan]:
    """The plan for what was seen, and the memory for the next one.

    Of two calls with equal arguments the results are equal. An observation that is not later than the last one changes
    no average. Scenarios that share a group count as one, until the plan tells of each.
    """
    every, scenarios = scenarios, groups_of(scenarios)
    groups = {scenario.name: seen.groups.get(scenario.name, GroupSeen()) for scenario in scenarios}
    workers = {name: len(group.workers) for name, group in groups.items()}
    at_s = max(memory.at_s, seen.at_s)
    began_s = at_s if memory.began_s is None else memory.began_s
    changed_s = memory.changed_s if workers == memory.workers else at_s
    settled = at_s - changed_s >= damping.settle_s
    served = {each.name: served_together(every, each.name) for each in scenarios}
    now = {name: demand_of(group, *served[name]) for name, group in groups.items()}
    averages = {name: _averaged(memory, name, now[name] if workers[name] else None, at_s, damping) for name in groups}
    demand = {name: _expected(*each, damping) for name, each in averages.items()}
    late_s = _since(memory.late_s, (name for name, group in groups.items() if settled and _all_late(group)), at_s)
    kept_s = _since(memory.kept_s, (name for name, group in groups.items() if _keeps_slo(group)), at_s)
    left = math.exp(-(at_s - memory.at_s) / FADE_S)
    factor, needs = {}, {}
    for scenario in scenarios:
        name = scenario.name
        by = 1 + (memory.factor.get(name, 1.0) - 1) * left
        if at_s - kept_s.get(name, at_s) >= damping.patience_s and demand[name] * by > workers[name]:
            by = max(1 / MOST_FACTOR, workers[name] / demand[name])
        if at_s - late_s.get(name, at_s) >= damping.patience_s and _lacks_workers(groups[name], now[name]):
            by = max(by, _enough(demand[name], workers[name] + 1))
        factor[name] = by
        floor = _floor(demand[name] * by, memory.floor.get(name, 0), scenario.min_workers)
        needs[name] = _Need(scenario, groups[name], demand[name] * by, by, floor)
    below_s = _since(memory.below_s, (name for name, need in needs.items() if need.is_below), at_s)
    for name in below_s.keys() & late_s.keys():  # it has been late before the correction
        below_s[name] = min(below_s[name], late_s[name])
    lacking = [needs[name] for name, since in below_s.items() if at_s - since >= damping.patience_s]
    move = None if seen.moving or not settled else _move(lacking, needs.values(), seen.reserve)
    plans = {
        name: ScenarioPlan(
            workers=need.workers,
            wanted=need.wanted(),
            demand=need.demand,
            headroom_ms=None if need.seen.p99_ms is None else need.scenario.slo_ms - need.seen.p99_ms,
            reason=need.reason(),
            reason_kind=need.reason_kind,
        )
        for name, need in needs.items()
    }
    compared = {name: Group(served[name], group, _late(group, now[name])) for name, group in groups.items()}
    remembered = Memory(
        began_s=began_s,
        at_s=at_s,
        demand={name: average for name, (average, _) in averages.items()},
        slower={name: slower for name, (_, slower) in averages.items()},
        floor={name: need.floor for name, need in needs.items()},
        factor=factor,
        below_s=below_s,
        late_s=late_s,
        kept_s=kept_s,
        workers=workers,
        changed_s=changed_s,
        gains=averaged_gains(compared, memory.gains, _kept(memory, at_s, FADE_S)),
    )
    shared = shared_group(remembered.gains) if at_s - began_s >= damping.floor_s else None
    return remembered, FleetPlan(at_s=at_s, scenarios=with_members(plans, groups, every), move=move, shared=shared)


def _averaged(memory: Memory, name: str, now: float | None, at_s: float, damping: Damping) -> tuple[float, float]:
    """The demand over the last minutes, and the average of that. now: None where a group has no workers: it answers
    nothing, which tells nothing of its demand."""
    before = memory.demand.get(name)
    slower = memory.slower.get(name, before)
    if now is None:
        return before or 0.0, slower or 0.0
    if before is None or slower is None:
        return now, now
    kept = _kept(memory, at_s, damping.floor_s)
    average = now + (before - now) * kept
    return average, average + (slower - average) * kept


def _kept(memory: Memory, at_s: float, over_s: float) -> float:
    """What an average over so many seconds, at first over all that was seen, keeps of its value before."""
    began_s = at_s if memory.began_s is None else memory.began_s
    return math.exp(-(at_s - memory.at_s) / max(1e-9, min(over_s, at_s - began_s)))


def _expected(average: float, slower: float, damping: Damping) -> float:
    """The demand when a worker that lacks now has moved, and has filled its caches: of a steady change, the average of
    an average is as far behind the average as that is behind the present (Brown's double exponential smoothing)."""
    behind = average - slower
    change = math.copysign(max(0.0, abs(behind) - BEHIND * average), behind)
    return max(0.0, average + (1 + (damping.patience_s + damping.settle_s) / damping.floor_s) * change)


def _floor(demand: float, before: int, least: int) -> int:
    """The fewest workers that carry the demand; those of before while it is hardly below what they were needed for."""
    return max(least, math.ceil(demand - LACK), min(before, math.ceil(demand - LACK + STAYS)))


def _since(before: Mapping[str, float], names: Iterable[str], at_s: float) -> dict[str, float]:
    return {name: before.get(name, at_s) for name in names}


def _all_late(group: GroupSeen) -> bool:
    """Whether every worker is later than the SLO allows: one that is late alone has a hot lane, or a slow device."""
    return bool(group.workers) and all(
        each.late >= FEW_LATE and each.late > ALLOWED_LATE * each.answers for each in group.workers
    )


def _keeps_slo(group: GroupSeen) -> bool:
    answers, late = sum(each.answers for each in group.workers), sum(each.late for each in group.workers)
    return answers >= ENOUGH and late <= ALLOWED_LATE * answers


def _lacks_workers(group: GroupSeen, demand: float) -> bool:
    """Whether late workers are late because their devices are in use."""
    busy = sum(each.busy for each in group.workers) / len(group.workers)
    wanted_use = busy_devices(group) / demand if demand else MOST_USE
    return busy >= IDLE * wanted_use


def _late(group: GroupSeen, demand: float) -> float | None:
    """The share of its rankings that were late for lack of workers; None: there were none."""
    answers, late = sum(each.answers for each in group.workers), sum(each.late for each in group.workers)
    return (late / answers if _lacks_workers(group, demand) else 0.0) if answers else None


def _enough(demand: float, workers: int) -> float:
    """The factor with which the demand asks for so many workers."""
    return min(MOST_FACTOR, (workers - 1 + 2 * LACK) / demand) if demand else 1.0


def _move(lacking: Sequence[_Need], needs: Iterable[_Need], reserve: int) -> Move | None:
    """The most urgent move that can be made."""
    every = list(needs)
    for taker in sorted(lacking, key=_urgency):
        name = taker.scenario.name
        why = f"{name} needs {taker.floor} workers and has {taker.workers}"
        if reserve:
            return Move(source=RESERVE, target=name, reason=f"{why}; the reserve has {reserve}")
        givers = [each for each in every if each.may_give and each is not taker]
        whole = [each for each in givers if each.is_whole_without_one]
        lower = [each for each in givers if _may_be_cut(each, taker)]
        richer = [each for each in givers if _is_richer(each, taker)]
        for found, how in (
            (whole, "needs {0.demand:.2f} of {0.workers}"),
            (lower, "has more than its min_workers" if _lacks_least(taker) else "is of lower priority"),
            (richer, "has more for its need, {0.workers} for {0.demand:.2f}"),
        ):
            if found:
                giver = min(found, key=_worth)
                reason = f"{why}; {giver.scenario.name} {how.format(giver)}"
                return Move(source=giver.scenario.name, target=name, reason=reason)
    return None


def _urgency(need: _Need) -> tuple[bool, int, float, str]:
    """Those below min_workers first, then by priority, then who lacks the largest part."""
    scenario = need.scenario
    return not _lacks_least(need), -scenario.priority, need.workers / need.floor, scenario.name


def _lacks_least(need: _Need) -> bool:
    return need.workers < need.scenario.min_workers


def _may_be_cut(giver: _Need, taker: _Need) -> bool:
    """Whether it gives a worker that it needs itself."""
    return giver.scenario.priority < taker.scenario.priority or _lacks_least(taker)


def _is_richer(giver: _Need, taker: _Need) -> bool:
    """Whether it gives a worker that it needs itself to an equal that lacks more. Without the worker it still has MORE
    times as much of its need as the taker had, so none goes back."""
    is_equal = giver.scenario.priority == taker.scenario.priority
    return is_equal and (giver.workers - 1) * taker.demand >= MORE * taker.workers * giver.demand


def _worth(need: _Need) -> tuple[int, float, str]:
    """The lowest priority first, then who has the most to spare."""
    return need.scenario.priority, need.demand - need.workers, need.scenario.name
