"""The order of the device's work: rankings and what they wait for by deadline, then pre-inference by due time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from relaygr_stream.worker.agenda import Agenda
from relaygr_stream.worker.tasks import Flight, RankTask


class WorkQueue:
    """Earliest deadline first within ranking, ranking before pre-inference."""

    def __init__(self) -> None:
        self._urgent: Agenda[RankTask | Flight] = Agenda(_dropped)
        self._background: Agenda[Flight] = Agenda(lambda flight: flight.over)

    def ready(self, task: RankTask) -> None:
        """This ranking can be scored."""
        self._urgent.add(task.deadline, task)

    def flight(self, flight: Flight) -> None:
        """This flight has no ranking waiting (yet)."""
        self._background.add(flight.due, flight)

    def urge(self, flight: Flight, deadline: float) -> None:
        """A ranking with this deadline waits for the flight."""
        self._urgent.add(deadline, flight)

    def urgent(self) -> RankTask | Flight | None:
        """The most urgent ranking work, left in place."""
        first = self._urgent.first()
        return None if first is None else first[1]

    def take_ready(
        self, most: int, cost: Callable[[RankTask], float] = lambda _: 0.0, within: float = 0.0, least: int = 1
    ) -> list[RankTask]:
        """Rankings from the front that can be scored now, up to the first flight: one batch.

        It has `most` rankings at most, and as many as cost no more than `within` together, or `least`.
        """
        batch: list[RankTask] = []
        while len(batch) < most and isinstance(task := self.urgent(), RankTask):
            within -= cost(task)
            if within < 0 and len(batch) >= least:
                break
            self._urgent.pop()
            batch.append(task)
        return batch

    def background(self) -> Flight | None:
        """The most urgent pre-inference, left in place."""
        first = self._background.first()
        return None if first is None else first[1]

    def pre_inferences(self) -> Iterator[Flight]:
        """Those not finished that somebody still waits for, in no order."""
        return (flight for flight in self._background if flight.pre_infer and flight.wanted)

    @property
    def background_depth(self) -> int:
        """Pre-inferences not finished."""
        return sum(1 for _ in self._background)


def _dropped(item: RankTask | Flight) -> bool:
    return item.answered if isinstance(item, RankTask) else item.over or not item.waiters
