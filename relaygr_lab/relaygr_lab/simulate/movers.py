"""Who decides on a day of scenarios which device moves: the planner's own core, or an oracle that knows the tides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from relaygr_lab.simulate.groups import Day, Mover, Surface
from relaygr_stream.ops.planner.plan import Damping, Memory, decide
from relaygr_stream.ops.planner.seen import Observation
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.wire.planner_status import Move, SharedGroup

#: Late at the load that a worker carries; it grows about so fast with the load (devices of `make bench-scenarios`). A
#: move, during which both groups lack a device, must save so much.
LATE: Final = 0.01
STEEP: Final = 3.5
WORTH: Final = 0.01


class Planned:
    """The planner's own core. shared: the groups that it proposed at the last look to make one; None: none."""

    def __init__(self, scenarios: Sequence[Scenario], damping: Damping) -> None:
        self._scenarios, self._damping, self._memory = scenarios, damping, Memory()
        self.shared: SharedGroup | None = None

    def __call__(self, seen: Observation, at_s: float) -> Move | None:
        """What moves now."""
        del at_s
        self._memory, plan = decide(self._memory, seen, self._scenarios, self._damping)
        self.shared = plan.shared
        return plan.move


def foreseen(day: Day, capacity: Mapping[str, float], ahead_s: float) -> Mover:
    """An oracle's: it knows the tides, and what a worker of each scenario carries with 1 % late; ahead_s: what a move
    takes.

    The split of each moment is the one with the least shares late together; it moves one device at a time towards it.
    """
    names = [surface.scenario.name for surface in day.surfaces]

    def late(split: Mapping[str, int], at_s: float) -> float:
        load = {
            name: _rate(surface, day.warm_s + at_s) / (split[name] * capacity[name])
            for name, surface in zip(names, day.surfaces, strict=True)
        }
        return sum(min(1.0, LATE * math.pow(each, STEEP)) for each in load.values())

    def move(seen: Observation, at_s: float) -> Move | None:
        now = {name: len(group.workers) for name, group in seen.groups.items()}
        if seen.moving:
            return None
        least, found = late(now, at_s + ahead_s) - WORTH, None
        for source in names:
            for target in names:
                if source != target and now[source] > 1:
                    then = {**now, source: now[source] - 1, target: now[target] + 1}
                    if (value := late(then, at_s + ahead_s)) < least:
                        least, found = value, Move(source=source, target=target, reason="foreseen")
        return found

    return move


def _rate(surface: Surface, at_s: float) -> float:
    """Its requests a second at that time since the day's traffic began."""
    tide = surface.traffic.tide
    if tide is None:
        return surface.traffic.rate
    return surface.traffic.rate * (1 + tide.swing * math.sin(2 * math.pi * (at_s / tide.period_s + surface.phase)))
