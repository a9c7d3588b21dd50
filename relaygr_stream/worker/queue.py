"""The order of the device's work: rankings and what they wait for, then pre-inference by due time.

A deadline is no priority: it decides among clients that were given about as much device time (clients.py).
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final, Generic, TypeVar

from relaygr_stream.cache.entry import Entry
from relaygr_stream.worker.clients import Account, Clients
from relaygr_stream.worker.tasks import Flight, PreInferTask, RankTask

# Items by time: a heap from which items that are over disappear by themselves.


T = TypeVar("T")

#: Items kept before those that are over are looked for: a few pages, so that looking costs nothing next to adding.
SPARE: Final = 64


class Agenda(Generic[T]):
    """Earliest first, ties to who came first. `over(item)`: the item is of no interest any more, and never will be.

    An item that is over may hold much memory, and its time may be far away: all are dropped as soon as they could be
    more than half of what is kept. Every operation is O(log n), amortised.
    """

    def __init__(self, over: Callable[[T], bool]) -> None:
        self._over = over
        self._heap: list[tuple[float, int, T]] = []
        self._order = count()
        self._limit = SPARE

    def __len__(self) -> int:
        """Items kept, some of which may be over."""
        return len(self._heap)

    def __iter__(self) -> Iterator[T]:
        """Items that are not over, in no order."""
        return (item for _, _, item in self._heap if not self._over(item))

    def add(self, time: float, item: T) -> None:
        """Put an item in; it may be there at several times."""
        heapq.heappush(self._heap, (time, next(self._order), item))
        if len(self._heap) > self._limit:
            self._heap = [each for each in self._heap if not self._over(each[2])]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + SPARE

    def first(self) -> tuple[float, T] | None:
        """The earliest item and its time, left in place."""
        heap = self._heap
        while heap:
            time, _, item = heap[0]
            if not self._over(item):
                return time, item
            heapq.heappop(heap)
        return None

    def pop(self) -> T:
        """Take out what `first` found."""
        return heapq.heappop(self._heap)[2]


class WorkQueue:
    """Earliest deadline first within ranking, in turn among clients, ranking before pre-inference."""

    def __init__(self, clients: Clients | None = None) -> None:
        self._clients = Clients() if clients is None else clients
        self._urgent: dict[Account, Agenda[RankTask | Flight]] = {}
        self._background: Agenda[Flight] = Agenda(lambda flight: flight.over)

    def ready(self, task: RankTask) -> None:
        """This ranking can be scored."""
        self._of(task.account).add(task.deadline, task)

    def flight(self, flight: Flight) -> None:
        """This flight has no ranking waiting (yet)."""
        self._background.add(flight.due, flight)

    def urge(self, flight: Flight, task: RankTask) -> None:
        """The ranking waits for the flight."""
        self._of(task.account).add(task.deadline, flight)

    def urgent(self) -> RankTask | Flight | None:
        """The most urgent ranking work, left in place."""
        first = self._first()
        return None if first is None else first[1]

    def take_ready(
        self, most: int, cost: Callable[[RankTask], float] = lambda _: 0.0, within: float = 0.0, least: int = 1
    ) -> list[RankTask]:
        """Rankings from the front that can be scored now, up to the first flight: one batch.

        It has `most` rankings at most, and as many as cost no more than `within` together, or `least`.
        """
        batch: list[RankTask] = []
        while len(batch) < most and (first := self._first()) is not None and isinstance(task := first[1], RankTask):
            within -= cost(task)
            if within < 0 and len(batch) >= least:
                break
            first[0].pop()
            batch.append(task)
        return batch

    def background(self) -> Flight | None:
        """The most urgent pre-inference, left in place."""
        first = self._background.first()
        return None if first is None else first[1]

    def pre_inferences(self) -> Iterator[Flight]:
        """Those not finished that somebody still waits for, in no order."""
        return (flight for flight in self._background if flight.pre_infer and flight.wanted)

    def _of(self, account: Account) -> Agenda[RankTask | Flight]:
        """The client's work, who from now on has some ready."""
        found = self._urgent.get(account)
        if found is None:
            found = self._urgent[account] = Agenda(_dropped)
            self._clients.ready(account)
        return found

    def _first(self) -> tuple[Agenda[RankTask | Flight], RankTask | Flight] | None:
        """The most urgent ranking work and the agenda that it is first in."""
        heads = []
        for account, agenda in list(self._urgent.items()):
            first = agenda.first()
            if first is None:
                del self._urgent[account]
            else:
                heads.append((first[0], account, agenda, first[1]))
        if not heads:
            return None
        clients = self._clients
        clients.floor_ms = least = max(clients.floor_ms, min(head[1].served_ms for head in heads))
        if len(heads) == 1:
            return heads[0][2:]
        in_turn = [head for head in heads if head[1].served_ms <= least + clients.slack_ms]
        return min(in_turn, key=lambda head: head[0])[2:]

    @property
    def background_depth(self) -> int:
        """Pre-inferences not finished."""
        return sum(1 for _ in self._background)


def _dropped(item: RankTask | Flight) -> bool:
    return item.answered if isinstance(item, RankTask) else item.over or not item.waiters


# Tasks that wait at an entry for something to be over: a copy, or another's computation.


class Parked:
    """By entry, in the order they came."""

    def __init__(self) -> None:
        self._tasks: defaultdict[Entry, list[RankTask | PreInferTask]] = defaultdict(list)

    def add(self, entry: Entry, task: RankTask | PreInferTask) -> None:
        """Wait here until the entry is woken."""
        self._tasks[entry].append(task)

    def take(self, entry: Entry) -> list[RankTask | PreInferTask]:
        """Everyone who waits at the entry, who wait no more."""
        return self._tasks.pop(entry, [])


# A bounded memory of request ids.


class RecentIds:
    """The last `limit` ids added."""

    def __init__(self, limit: int) -> None:
        self._order: deque[str] = deque()
        self._ids: set[str] = set()
        self._limit = limit

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request_id: str) -> None:
        """Remember an id; the oldest one goes when there are too many."""
        if request_id in self._ids:
            return
        self._ids.add(request_id)
        self._order.append(request_id)
        if len(self._order) > self._limit:
            self._ids.discard(self._order.popleft())
