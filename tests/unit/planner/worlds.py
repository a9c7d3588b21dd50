"""Scenarios under load, and the groups that a planner sees of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import msgspec

from relaygr_stream.ops.planner.demand import demand_of
from relaygr_stream.ops.planner.plan import Memory, decide
from relaygr_stream.ops.planner.seen import GroupSeen, Observation, WorkerSeen
from relaygr_stream.settings.scenarios import RESERVE, Scenario
from relaygr_stream.wire.planner_status import FleetPlan, Move

FEED = Scenario(name="feed", slo_ms=50.0, lead_ms=150.0)
SEARCH = Scenario(name="search", slo_ms=20.0, lead_ms=150.0)
#: Seconds between two observations.
PERIOD_S = 10.0


def group(
    workers: int, per_second: float, *, late: bool = False, busy: float = 0.5, p: float = 10.0, r: float = 2.0
) -> GroupSeen:
    """A group whose requests take p ms for the prefix and r ms for the score; late: all its workers are."""
    answers = round(per_second * PERIOD_S / max(1, workers))
    each = WorkerSeen(name="w", answers=answers, late=max(5, answers // 5) if late else 0, busy=busy)
    seen = tuple(msgspec.structs.replace(each, name=f"w{index}") for index in range(workers))
    return GroupSeen(workers=seen, per_second=per_second, prefix_ms=p, score_ms=r, p99_ms=10.0)


@cache
def rate_for(demand: float, scenario: Scenario = FEED, **given: float) -> float:
    """The rankings a second that need so many workers."""
    return demand / demand_of(group(1, 1.0, **given), scenario)  # type: ignore[arg-type] # p and r


class World:
    """A host with some devices that carries out every proposal at once. loads(time): demand in workers by scenario.

    truth: by how much more than the planner thinks a scenario needs; below that, all its workers are late.
    """

    def __init__(
        self,
        scenarios: Sequence[Scenario],
        workers: Mapping[str, int],
        loads: Callable[[float], Mapping[str, float]],
        reserve: int = 0,
        truth: float = 1.0,
    ) -> None:
        self.scenarios, self.workers, self.reserve = scenarios, dict(workers), reserve
        self.moves: list[tuple[float, Move]] = []
        self.memory, self.now, self._loads, self._truth = Memory(), 0.0, loads, truth

    def look(self) -> Observation:
        """What there is to see now."""
        groups = {}
        for scenario in self.scenarios:
            load, workers = self._loads(self.now)[scenario.name], self.workers[scenario.name]
            late = load * self._truth > workers
            busy = min(1.0, 0.6 * load * self._truth / max(1, workers))
            groups[scenario.name] = group(workers, rate_for(load, scenario), late=late, busy=busy)
        return Observation(at_s=self.now, groups=groups, reserve=self.reserve)

    def step(self) -> FleetPlan:
        """Observe, decide, move, and let a period pass."""
        self.memory, plan = decide(self.memory, self.look(), self.scenarios)
        if plan.move is not None:
            self.moves.append((self.now, plan.move))
            self.workers[plan.move.target] += 1
            if plan.move.source == RESERVE:
                self.reserve -= 1
            else:
                self.workers[plan.move.source] -= 1
        self.now += PERIOD_S
        return plan

    def run(self, seconds: float) -> None:
        """For so long."""
        until = self.now + seconds
        while self.now < until:
            self.step()
