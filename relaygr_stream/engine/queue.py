"""The order of the device's work: rankings that can be done when due, then pre-inference, then rankings that are late.

A due time is no priority: it decides among those that were given about as much device time (clients.py).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count
from operator import itemgetter
from typing import Final, Generic, TypeVar

from relaygr_stream.cache.entry import Entry
from relaygr_stream.engine.clients import UNBOOKED, Account, Clients
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

    def pop(self) -> None:
        """Remove what `first` found."""
        heapq.heappop(self._heap)


class Turns(Generic[T]):
    """What the device may do next: accounts in turn, and the earliest due first.

    over(item): it has no place here any more.
    """

    def __init__(self, clients: Clients, over: Over[T]) -> None:
        self._clients = clients
        self._over = over
        self._of_account: dict[Account, TimerHeap[T]] = {}

    def __iter__(self) -> Iterator[T]:
        """The items that are not over, in no order."""
        return chain.from_iterable(self._of_account.values())

    def add(self, account: Account, due: float, item: T) -> None:
        """Add an item that is charged to this account."""
        found = self._of_account.get(account)
        if found is None:
            found = self._of_account[account] = TimerHeap(self._over)
            account.join()
        found.add(due, item)

    def first(self) -> T | None:
        """What is next, left in place."""
        if not self._of_account:
            return None
        heads = {}
        for account, heap in list(self._of_account.items()):
            first = heap.first()
            if first is None:
                del self._of_account[account]
            else:
                heads[account] = first
        if not heads:
            return None
        if len(heads) == 1:
            account, (_, item) = heads.popitem()
            account.leads()
            return item
        return min((heads[account] for account in self._in_turn(heads)), key=itemgetter(0))[1]

    def remove(self, account: Account) -> None:
        """Remove what `first` has found, of this account."""
        self._of_account[account].pop()

    def _in_turn(self, ready: Iterable[Account]) -> Iterable[Account]:
        """Of the accounts with work ready those whose turn it is: scenarios first, and then the clients within each."""
        parts: dict[Account | None, list[Account]] = {}
        for account in ready:
            parts.setdefault(account.parent, []).append(account)
        parents, slack_ms = [each for each in parts if each is not None], self._clients.slack_ms
        if len(parents) > 1 and (whole := parents[0].parent) is not None:
            parents = whole.in_turn(parents, self._clients.slack(parents[0]))
        elif parents:
            parents[0].leads()
        return [account for parent in parents for account in parent.in_turn(parts[parent], slack_ms)] or parts[None]


class WorkQueue:
    """Rankings that can be done when due, with what they wait for; then pre-inference; then rankings that are late."""

    def __init__(self, clients: Clients | None = None) -> None:
        self._clients = clients = Clients() if clients is None else clients
        self.in_time: Final[Turns[Ranking | PrefillJob]] = Turns(clients, _not_in_time)
        self.late: Final[Turns[Ranking | PrefillJob]] = Turns(clients, _over)
        self._background: Turns[PrefillJob] = Turns(clients, lambda job: job.over)

    def add(self, ranking: Ranking, job: PrefillJob | None = None) -> None:
        """Add a ranking that can be scored, or the job that it waits for, which becomes as urgent."""
        turns, item = self.late if ranking.late else self.in_time, ranking if job is None else job
        turns.add(ranking.booking.account, ranking.due, item)

    def add_background(self, job: PrefillJob) -> None:
        """Add a job that no ranking waits for (yet); or again, if it is due earlier."""
        if job.account is UNBOOKED:
            job.account = self._clients.ahead("" if job.signal is None else job.signal.scenario)
        self._background.add(job.account, job.due, job)

    def background(self) -> PrefillJob | None:
        """The most urgent pre-inference, left in place. A job whose rankings came, and are late, has a place there."""
        while (job := self._background.first()) is not None:
            if not job.waiters:
                return job
            self._background.remove(job.account)
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
