"""What entries are worth, in order: uses that fade with time × the cost of recomputing, per byte.

As in GreedyDual-Size-Frequency, but with uses that halve with every half-life in place of that policy's inflation. How
fast uses should fade depends on the users: those who come back within one session want recency, stable popularity
wants frequency. Small simulations of the same stream with several half-lives decide which one holds. Knows sizes, costs
and use; knows no addresses, contents or tiers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

from sortedcontainers import SortedList

# One half-life on trial: a cache of keys alone that gives up what `FadingFrequency` would, and counts what it saves.
# Five of these run beside every tier and follow each use, so they keep no more than that takes: where a sorted list
# knows the whole order, a heap knows the least. Knows sizes, costs and use; knows no entries.


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


K = TypeVar("K", bound=Hashable)

#: Half-lives tried, in uses of any entry per entry held: from about LRU's recency to about plain frequency.
HALF_LIVES = (0.25, 1.0, 4.0, 16.0, 64.0)
#: Simulations hold at most 511 entries, by leaving out half of the keys each time there are more than that. Measured by
#: the recompute time saved over all traces of benchmarks/cache.py: with 64, chance misleads (0.582); with 512, learning
#: takes too long (0.581); 256 gives 0.584.
SIMULATED = 256
#: A half-life is judged by what it saved over about this many uses per entry, and replaced by one 1 % better.
JUDGED_USES = 10
BETTER = 1.01


class _Held(NamedTuple):
    uses: float
    rank: float
    serial: int
    nbytes: int
    cost_ms: float


class FadingFrequency(Generic[K]):
    """Keys ordered by uses × cost / bytes, where a use counts half after `half_life` further uses per key held.

    All keys fade alike, so their order changes only where one is used: it is kept sorted, each operation is O(log n),
    and `half_life` may be changed at any time. Uses are kept as log2(count) + the clock when they were counted.
    """

    def __init__(self, half_life: float) -> None:
        self.half_life = half_life
        self.nbytes = 0
        self._held: dict[K, _Held] = {}
        self._order: SortedList[tuple[float, int, K]] = SortedList()  # (rank, serial, key)
        self._remembered: dict[int, float] = {}  # hash of a key that left → its uses; a collision does no harm
        self._clock = 0.0  # half-lives gone by
        self._serial = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: K) -> bool:
        return key in self._held

    def add(self, key: K, nbytes: int, cost_ms: float) -> None:
        """Hold the key, which counts as a use. One that is held already gets the new size and cost."""
        if nbytes < 1 or not 0 < cost_ms < math.inf:
            raise _nonsense(key, nbytes, cost_ms)
        known = self._leave(key).uses if key in self._held else self._remembered.pop(hash(key), -math.inf)
        self._enter(key, self._use(known), nbytes, cost_ms)

    def hold(self, key: K, nbytes: int, cost_ms: float) -> None:
        """Hold the key without a use: with those remembered, or, of a key nobody knows, as if it had been used now.

        One that is held already gets the new size and cost.
        """
        if nbytes < 1 or not 0 < cost_ms < math.inf:
            raise _nonsense(key, nbytes, cost_ms)
        known = self._leave(key).uses if key in self._held else self._remembered.pop(hash(key), self._clock)
        self._enter(key, known, nbytes, cost_ms)

    def touch(self, key: K, nbytes: int, cost_ms: float) -> None:
        """A use, also of a key that is not held: it counts when it comes back."""
        if key in self._held:
            self.add(key, nbytes, cost_ms)
        else:
            self._remember(key, self._use(self._remembered.pop(hash(key), -math.inf)))

    def remove(self, key: K) -> None:
        """Hold the key no more, but remember its uses. KeyError if it is not held."""
        self._remember(key, self._leave(key).uses)

    def discard(self, key: K) -> None:
        """`remove`, if it is held."""
        if key in self._held:
            self.remove(key)

    def value(self, key: K) -> float:
        """What giving the key up is expected to cost: uses, as faded by now, × cost_ms. KeyError if it is not held."""
        held = self._held[key]
        return math.exp2(held.uses - self._clock) * held.cost_ms

    def expected(self, key: K, cost_ms: float) -> float:
        """What `value` would be if the key were held at this cost: nothing for a key that nobody remembers."""
        if key in self._held:
            return self.value(key)
        return math.exp2(self._remembered.get(hash(key), -math.inf) - self._clock) * cost_ms

    def uses(self, key: K) -> float:
        """Its uses as faded by now, held or remembered; nothing for a key that nobody remembers."""
        held = self._held.get(key)
        return math.exp2((self._remembered.get(hash(key), -math.inf) if held is None else held.uses) - self._clock)

    def cheapest(self) -> Iterator[K]:
        """The keys by value per byte, least first. The iterator is of no use after a change."""
        for _, _, key in self._order:
            yield key

    def _use(self, uses: float) -> float:
        """Let the clock move on by one use, and add one."""
        self._clock += 1 / (self.half_life * (len(self._held) or 1))
        return one_more(uses, self._clock)

    def _enter(self, key: K, uses: float, nbytes: int, cost_ms: float) -> None:
        self._serial += 1
        rank = uses + math.log2(cost_ms / nbytes)
        self._held[key] = _Held(uses, rank, self._serial, nbytes, cost_ms)
        self._order.add((rank, self._serial, key))
        self.nbytes += nbytes

    def _leave(self, key: K) -> _Held:
        held = self._held.pop(key)
        self._order.remove((held.rank, held.serial, key))
        self.nbytes -= held.nbytes
        return held

    def _remember(self, key: K, uses: float) -> None:
        remember(self._remembered, hash(key), uses, len(self._held))


def _nonsense(key: Hashable, nbytes: int, cost_ms: float) -> ValueError:
    return ValueError(f"{key!r} needs nbytes ≥ 1 and a finite cost_ms > 0, got {nbytes} and {cost_ms}")


class CostAwarePolicy(FadingFrequency[K]):
    """The eviction order of the entries that may be evicted now, with the half-life that suits their users.

    The owner adds an entry when it becomes idle, removes it when it is pinned or evicted, and touches it when used.
    Keys should outlive entries (user ids): what is known of them is kept by hash, also while they are away.
    """

    def __init__(self) -> None:
        self._trials = [Trial(half_life) for half_life in HALF_LIVES]
        self._leading = self._trials[1]  # one use per entry: a middle to start from
        self._one_in = 1  # of so many keys one is simulated; powers of two, so that each choice is part of the last
        super().__init__(self._leading.half_life)

    def add(self, key: K, nbytes: int, cost_ms: float) -> None:
        """The entry may be evicted from now on, which counts as a use. A key already there gets the new numbers."""
        super().add(key, nbytes, cost_ms)
        self._simulate(hash(key), nbytes, cost_ms)

    def touch(self, key: K, nbytes: int, cost_ms: float) -> None:
        """A use, also of an entry that is not here: it counts when it comes."""
        here = key in self
        super().touch(key, nbytes, cost_ms)
        if not here:
            self._simulate(hash(key), nbytes, cost_ms)

    def _simulate(self, identity: int, nbytes: int, cost_ms: float) -> None:
        while len(self) >= 2 * SIMULATED * self._one_in:
            self._one_in *= 2
            for trial in self._trials:
                trial.leave_out(lambda key: key % self._one_in != 0)
        if identity % self._one_in:
            return
        budget = self.nbytes / self._one_in
        # Alike for all: a number that depended on how many entries a simulation holds would judge that instead.
        kept = 1 - 1 / (JUDGED_USES * max(SIMULATED, len(self) / self._one_in))
        for trial in self._trials:
            trial.use(identity, nbytes, cost_ms, budget, kept)
        best = max(self._trials, key=lambda trial: trial.saved_ms)
        if best.saved_ms > BETTER * self._leading.saved_ms:
            self._leading = best
            self.half_life = best.half_life
