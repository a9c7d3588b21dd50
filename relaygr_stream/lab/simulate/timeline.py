"""Simulated time: a clock that is set, and a queue of what happens when. Knows nothing of what happens."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[float], None]


class Clock:
    """Seconds of simulated time; called like `time.monotonic`."""

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The present second."""
        return self.now


class Timeline:
    """Actions by time, ties to who was put in first. `clock` shows the time of the action under way."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._actions: list[tuple[float, int, Action]] = []
        self._order = count()

    def at(self, time: float, action: Action) -> None:
        """Have `action(time)` happen then, or now if that is over."""
        now = self.clock.now
        heapq.heappush(self._actions, (time if time > now else now, next(self._order), action))

    def run(self, until: float) -> None:
        """Let everything up to `until` happen; the clock then stands there."""
        actions, clock = self._actions, self.clock
        while actions and actions[0][0] <= until:
            time, _, action = heapq.heappop(actions)
            clock.now = time
            action(time)
        clock.now = max(clock.now, until)
