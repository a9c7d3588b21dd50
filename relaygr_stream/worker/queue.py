"""The order of the device's work: rankings and what they wait for by deadline, then pre-inference by due time."""

from __future__ import annotations

import heapq
from itertools import count

from relaygr_stream.worker.tasks import Flight, RankTask


class WorkQueue:
    """Earliest deadline first within ranking, ranking before pre-inference."""

    def __init__(self) -> None:
        self._urgent: list[tuple[float, int, RankTask | Flight]] = []
        self._background: list[tuple[float, int, Flight]] = []
        self._order = count()  # ties go to who came first

    def ready(self, task: RankTask) -> None:
        """This ranking can be scored."""
        heapq.heappush(self._urgent, (task.deadline, next(self._order), task))

    def flight(self, flight: Flight) -> None:
        """This flight has no ranking waiting (yet)."""
        heapq.heappush(self._background, (flight.due, next(self._order), flight))

    def urge(self, flight: Flight, deadline: float) -> None:
        """A ranking with this deadline waits for the flight."""
        heapq.heappush(self._urgent, (deadline, next(self._order), flight))

    def urgent(self) -> RankTask | Flight | None:
        """The most urgent ranking work, left in place."""
        while self._urgent:
            item = self._urgent[0][2]
            dropped = item.answered if isinstance(item, RankTask) else item.over or not item.waiters
            if not dropped:
                return item
            heapq.heappop(self._urgent)
        return None

    def take_ready(self, most: int) -> list[RankTask]:
        """Rankings from the front that can be scored now, up to the first flight: one batch."""
        batch: list[RankTask] = []
        while len(batch) < most and isinstance(task := self.urgent(), RankTask):
            heapq.heappop(self._urgent)
            batch.append(task)
        return batch

    def background(self) -> Flight | None:
        """The most urgent pre-inference, left in place."""
        while self._background:
            flight = self._background[0][2]
            if not flight.over:
                return flight
            heapq.heappop(self._background)
        return None

    @property
    def background_depth(self) -> int:
        """Pre-inferences not finished."""
        return sum(not flight.over for _, _, flight in self._background)
