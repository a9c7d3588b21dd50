"""The order of the device's work: rankings that can be done when due, then pre-inference, then rankings that are late.

A due time is no priority: it decides among clients that were given about as much device time (clients.py).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final, Generic, TypeVar

from relaygr_stream.cache.entry import Entry
from relaygr_stream.engine.clients import Account, Clients
from relaygr_stream.engine.commands import PrefillTask
from relaygr_stream.engine.ranking import PrefillJob, Ranking

T = TypeVar("T")
#: Whether an item is to be dropped, now and for ever.
Over = Callable[[T], bool]

#: A heap that holds more items than twice the live ones and so many is rebuilt without those that are over.
SPARE: Final = 64


class TimerHeap(Generic[T]):
    """A heap of items by time, ties in order of arrival. `over(item)`: the item is to be dropped, now and for ever.

    An item that is over may hold much memory, and its time may be far away: all are dropped as soon as they could be
    more than half of what is kept. Every operation is O(log n), amortised.
    """

    def __init__(self, over: Over[T]) -> None:
        self._over = over
        self._heap: list[tuple[float, int, T]] = []
        self._order = count()
        self._limit = SPARE

    def __len__(self) -> int:
        """How many items are kept, some of which may be over."""
        return len(self._heap)

    def __iter__(self) -> Iterator[T]:
        """The items that are not over, in no order."""
        return (item for _, _, item in self._heap if not self._over(item))

    def add(self, time: float, item: T) -> None:
        """Add an item at a time; it may be there at several times."""
        heapq.heappush(self._heap, (time, next(self._order), item))
        if len(self._heap) > self._limit:
            self._heap = [each for each in self._heap if not self._over(each[2])]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + SPARE

    def first(self) -> tuple[float, T] | None:
        """The earliest time and its item, left in place; None: the heap is empty."""
        heap = self._heap
        while heap:
            time, _, item = heap[0]
            if not self._over(item):
                return time, item
            heapq.heappop(heap)
        return None

    def pop(self) -> T:
        """Remove and return what `first` found."""
        return heapq.heappop(self._heap)[2]


class Turns:
    """Rankings that can be scored, and jobs that rankings wait for: clients in turn, and the earliest due first.

    over(item): it has no place here any more.
    """

    def __init__(self, clients: Clients, over: Over[Ranking | PrefillJob]) -> None:
        self._clients = clients
        self._over = over
        self._of_client: dict[Account, TimerHeap[Ranking | PrefillJob]] = {}

    def add(self, ranking: Ranking, job: PrefillJob | None = None) -> None:
        """Add a ranking that can be scored, or the job that it waits for."""
        account = ranking.booking.account
        found = self._of_client.get(account)
        if found is None:
            found = self._of_client[account] = TimerHeap(self._over)
            # After a pause it cannot claim the device time that others were given meanwhile.
            account.served_ms = max(account.served_ms, self._clients.floor_ms)
        found.add(ranking.due, ranking if job is None else job)

    def first(self) -> Ranking | PrefillJob | None:
        """What is next, left in place."""
        heads = []
        for account, heap in list(self._of_client.items()):
            first = heap.first()
            if first is None:
                del self._of_client[account]
            else:
                heads.append((first[0], account, first[1]))
        if not heads:
            return None
        clients = self._clients
        if len(heads) == 1:
            clients.floor_ms = max(clients.floor_ms, heads[0][1].served_ms)
            return heads[0][2]
        clients.floor_ms = least = max(clients.floor_ms, min(head[1].served_ms for head in heads))
        in_turn = [head for head in heads if head[1].served_ms <= least + clients.slack_ms]
        return min(in_turn, key=lambda head: head[0])[2]

    def remove(self, first: Ranking) -> None:
        """Remove the ranking that `first` has found."""
        self._of_client[first.booking.account].pop()


class WorkQueue:
    """Rankings that can be done when due, with what they wait for; then pre-inference; then rankings that are late."""

    def __init__(self, clients: Clients | None = None) -> None:
        clients = Clients() if clients is None else clients
        self.in_time: Final = Turns(clients, _not_in_time)
        self.late: Final = Turns(clients, _over)
        self._background: TimerHeap[PrefillJob] = TimerHeap(lambda job: job.over)

    def add(self, ranking: Ranking, job: PrefillJob | None = None) -> None:
        """Add a ranking that can be scored, or the job that it waits for, which becomes as urgent."""
        (self.late if ranking.late else self.in_time).add(ranking, job)

    def add_background(self, job: PrefillJob) -> None:
        """Add a job that no ranking waits for (yet); or again, if it is due earlier."""
        self._background.add(job.due, job)

    def background(self) -> PrefillJob | None:
        """The most urgent pre-inference, left in place. A job whose rankings came, and are late, has a place there."""
        while (first := self._background.first()) is not None:
            job = first[1]
            if not job.waiters:
                return job
            self._background.pop()
            job.due = math.inf
        return None

    def pre_inferences(self) -> Iterator[PrefillJob]:
        """The jobs for admitted requests that are still wanted, in no order."""
        return (job for job in dict.fromkeys(self._background) if job.pre_infer and job.wanted)


def _over(item: Ranking | PrefillJob) -> bool:
    return item.answered if isinstance(item, Ranking) else item.over or not item.waiters


def _not_in_time(item: Ranking | PrefillJob) -> bool:
    """A job whose waiters are all late is late, too; one whose waiters have their answers is still to be ended."""
    if isinstance(item, Ranking):
        return item.answered or item.late
    return item.over or all(each.late for each in item.waiters)


class Waiters:
    """Tasks that wait until an entry's copy or computation is over, by entry, in the order they came."""

    def __init__(self) -> None:
        self._tasks: defaultdict[Entry, list[Ranking | PrefillTask]] = defaultdict(list)

    def add(self, entry: Entry, task: Ranking | PrefillTask) -> None:
        """Let the task wait for the entry."""
        self._tasks[entry].append(task)

    def pop(self, entry: Entry) -> list[Ranking | PrefillTask]:
        """The tasks that wait at the entry; they wait no more."""
        return self._tasks.pop(entry, [])


class RecentIds:
    """The last `limit` request ids added."""

    def __init__(self, limit: int) -> None:
        self._order: deque[str] = deque()
        self._ids: set[str] = set()
        self._limit = limit

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request_id: str) -> None:
        """Add an id; the oldest one is dropped when there are too many."""
        if request_id in self._ids:
            return
        self._ids.add(request_id)
        self._order.append(request_id)
        if len(self._order) > self._limit:
            self._ids.discard(self._order.popleft())
