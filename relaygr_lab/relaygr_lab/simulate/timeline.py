"""Simulated time: a clock, and a heap of actions by time."""

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
        """The current time."""
        return self.now

    def spend(self, seconds: float) -> None:
        """Let an operation take this time."""
        self.now += seconds


class Timeline:
    """Runs actions in the order of their times, and of `at` for equal times. `clock`: the current action's time."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._actions: list[tuple[float, int, Action]] = []
        self._order = count()

    def at(self, time: float, action: Action) -> None:
        """Schedule `action(time)` at this time, or now if it has passed."""
        now = self.clock.now
        heapq.heappush(self._actions, (time if time > now else now, next(self._order), action))

    def run(self, until: float) -> None:
        """Run all actions up to `until`, and set the clock to it."""
        actions, clock = self._actions, self.clock
        while actions and actions[0][0] <= until:
            time, _, action = heapq.heappop(actions)
            clock.now = time
            action(time)
        clock.now = max(clock.now, until)
