"""One half-life on trial: a cache of keys alone that gives up what `FadingFrequency` would, and counts what it saves.

Five of these run beside every tier and follow each use, so they keep no more than that takes: where a sorted list
knows the whole order, a heap knows the least. Knows sizes, costs and use; knows no entries.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Final

#: Uses of keys that left are remembered for this many per entry held, and for at least so many: a user who comes back
#: is no newcomer.
REMEMBERED: Final = 4
MIN_REMEMBERED: Final = 256
#: Items of the heap that were used again, or left, before they are looked for.
SPARE: Final = 64


class Trial:
    """saved_ms: recompute time that its hits saved, fading. Uses are log2(count) + the clock when they were counted."""

    def __init__(self, half_life: float) -> None:
        self.half_life = half_life
        self.saved_ms = 0.0
        self._nbytes = 0
        self._held: dict[int, tuple[float, int, int]] = {}  # key → uses, serial number, bytes
        self._heap: list[tuple[float, int, int]] = []  # rank, serial number, key; some of them of earlier uses
        self._remembered: dict[int, float] = {}  # key that left → uses
        self._clock = 0.0
        self._serial = 0

    def __iter__(self) -> Iterator[int]:
        """The keys held, those first that are given up first."""
        return (key for _, serial, key in sorted(self._heap) if self._is_held(key, serial))

    def use(self, key: int, nbytes: int, cost_ms: float, budget: float, kept: float) -> None:
        """One use of the key; then keys are given up until they are within the budget. kept: of saved_ms until now."""
        held, heap = self._held, self._heap
        known = held.pop(key, None)
        self.saved_ms *= kept
        if known is None:
            uses = self._remembered.pop(key, -math.inf)
        else:
            self.saved_ms += cost_ms
            uses = known[0]
            self._nbytes -= known[2]
        self._clock = clock = self._clock + 1 / (self.half_life * (len(held) or 1))
        uses = one_more(uses, clock)
        self._serial = serial = self._serial + 1
        held[key] = (uses, serial, nbytes)
        heapq.heappush(heap, (uses + math.log2(cost_ms / nbytes), serial, key))
        self._nbytes += nbytes
        while self._nbytes > budget and len(held) > 1:
            _, serial, least = heapq.heappop(heap)
            if self._is_held(least, serial):
                self._leave(least)
        if len(heap) > 2 * len(held) + SPARE:
            self._heap = [each for each in heap if self._is_held(each[2], each[1])]
            heapq.heapify(self._heap)

    def leave_out(self, unwanted: Callable[[int], bool]) -> None:
        """Drop keys that will not be used any more here: with a long half-life they would stay for long."""
        for key in [key for key in self if unwanted(key)]:
            self._leave(key)

    def _is_held(self, key: int, serial: int) -> bool:
        found = self._held.get(key)
        return found is not None and found[1] == serial

    def _leave(self, key: int) -> None:
        uses, _, nbytes = self._held.pop(key)
        self._nbytes -= nbytes
        remember(self._remembered, key, uses, len(self._held))


def one_more(uses: float, clock: float) -> float:
    """log2(2^uses + 2^clock): uses, and one more now; -inf: none so far."""
    if uses == -math.inf:
        return clock
    more, less = (uses, clock) if uses > clock else (clock, uses)
    return more + math.log2(1 + math.exp2(less - more))


def remember(remembered: dict[int, float], identity: int, uses: float, held: int) -> None:
    """Note the uses of a key that left, and forget those that left first where there are too many. held: keys held."""
    remembered[identity] = uses
    if len(remembered) > MIN_REMEMBERED:
        for _ in range(len(remembered) - max(MIN_REMEMBERED, REMEMBERED * held)):
            del remembered[next(iter(remembered))]
