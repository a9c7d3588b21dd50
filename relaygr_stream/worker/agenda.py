"""Items by time: a heap from which items that are over disappear by themselves."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final, Generic, TypeVar

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
