"""The eviction order: faded uses × recompute cost / bytes, as in GreedyDual-Size-Frequency.

That policy ages its entries by inflation; here a use counts half after each half-life. The best half-life depends on
the users: returns within one session favour recency, stable popularity favours frequency. Small simulations of the
same uses with several half-lives choose it.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar
from zlib import crc32

from sortedcontainers import SortedList

#: Evicted keys whose uses are remembered, per held key and at least: a returning user keeps the former uses.
REMEMBERED: Final = 4
MIN_REMEMBERED: Final = 256
#: Outdated items of the heap that are tolerated before it is rebuilt.
SPARE: Final = 64

K = TypeVar("K", bound=Hashable)

#: Half-lives under trial, in uses of any entry per held entry: from about LRU's recency to about plain frequency.
HALF_LIVES = (0.25, 1.0, 4.0, 16.0, 64.0)
#: A simulation holds at most 511 keys: above, it drops half of them. Share of recompute time saved over all traces of
#: relaygr_lab/benchmarks/cache.py: 0.582 with 64 (chance misleads), 0.581 with 512 (learning is slow), 0.584 with 256.
SIMULATED = 256
#: A half-life is judged by the cost it saved over about this many uses per entry. One that saves 1 % more replaces it.
JUDGED_USES = 10
BETTER = 1.01


class Trial:
    """A simulation of one half-life: a cache of keys alone that evicts as `FadingFrequency`, and counts what it saves.

    Five of these follow every use of a tier, so they are cheap: a heap knows the least key, where a sorted list would
    know the whole order. saved_ms: recompute time that hits saved, fading. Uses are log2(count) + the clock of the use.
    """

    def __init__(self, half_life: float) -> None:
        self.half_life = half_life
        self.saved_ms = 0.0
        self._nbytes = 0
        self._held: dict[int, tuple[float, int, int]] = {}  # key → uses, serial number, bytes
        self._heap: list[tuple[float, int, int]] = []  # rank, serial number, key; some items are outdated
        self._remembered: OrderedDict[int, float] = OrderedDict()  # evicted key → uses
        self._clock = 0.0
        self._serial = 0

    def __iter__(self) -> Iterator[int]:
        """The held keys in the order of eviction."""
        return (key for _, serial, key in sorted(self._heap) if self._is_held(key, serial))

    def use(self, key: int, nbytes: int, cost_ms: float, budget: float, kept: float) -> None:
        """Count one use of the key, then evict keys until all fit into `budget` bytes. kept: fading of saved_ms."""
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

    def follow_one_in(self, number: int) -> None:
        """Drop all keys but multiples of this: with a long half-life they would stay long."""
        for key in [key for key in self if key % number]:
            self._leave(key)

    def _is_held(self, key: int, serial: int) -> bool:
        found = self._held.get(key)
        return found is not None and found[1] == serial

    def _leave(self, key: int) -> None:
        uses, _, nbytes = self._held.pop(key)
        self._nbytes -= nbytes
        remember(self._remembered, key, uses, len(self._held))


def one_more(uses: float, clock: float) -> float:
    """Add one use at `clock` to `uses`: log2(2^uses + 2^clock). uses = -inf: none so far."""
    if uses == -math.inf:
        return clock
    more, less = (uses, clock) if uses > clock else (clock, uses)
    return more + math.log2(1 + math.exp2(less - more))


def remember(remembered: OrderedDict[int, float], identity: int, uses: float, held: int) -> None:
    """Remember the uses of an evicted key, and drop the oldest such keys above the limit. held: number of held keys."""
    remembered[identity] = uses
    if len(remembered) > MIN_REMEMBERED:
        for _ in range(len(remembered) - max(MIN_REMEMBERED, REMEMBERED * held)):
            remembered.popitem(last=False)  # a plain dict would be searched for its first key: 3 ms with 10⁵ entries


class _Held(NamedTuple):
    uses: float
    rank: float
    serial: int
    nbytes: int
    cost_ms: float


class FadingFrequency(Generic[K]):
    """Keys ordered by uses × cost / bytes, where a use counts half after `half_life` further uses per held key.

    All keys fade at the same rate, so a use changes the place of its own key only. The order is kept sorted, each
    operation is O(log n), and `half_life` may change at any time. Uses are log2(count) + the clock of the use.
    """

    def __init__(self, half_life: float) -> None:
        self.half_life = half_life
        self.nbytes = 0
        self._held: dict[K, _Held] = {}
        self._order: SortedList[tuple[float, int, K]] = SortedList()  # (rank, serial, key)
        #: Hash of an evicted key → its uses; a collision is harmless.
        self._remembered: OrderedDict[int, float] = OrderedDict()
        self._clock = 0.0  # elapsed half-lives
        self._serial = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: K) -> bool:
        return key in self._held

    def add(self, key: K, nbytes: int, cost_ms: float) -> None:
        """Hold the key, and count a use. A held key gets the new size and cost.

        Raises ValueError unless nbytes ≥ 1 and 0 < cost_ms < ∞.
        """
        known = self._taken(key, nbytes, cost_ms, -math.inf)
        self._enter(key, self._use(known), nbytes, cost_ms)

    def hold(self, key: K, nbytes: int, cost_ms: float) -> None:
        """Hold the key without counting a use: with its remembered uses, or with one use if it has none.

        A held key gets the new size and cost. Raises as `add`.
        """
        self._enter(key, self._taken(key, nbytes, cost_ms, self._clock), nbytes, cost_ms)

    def touch(self, key: K, nbytes: int, cost_ms: float) -> None:
        """Count a use. If the key is not held, the use is remembered until it returns."""
        if key in self._held:
            self.add(key, nbytes, cost_ms)
        else:
            self._remember(key, self._use(self._remembered.pop(hash(key), -math.inf)))

    def remove(self, key: K) -> None:
        """Stop holding the key, and remember its uses. Raises KeyError if it is not held."""
        self._remember(key, self._leave(key).uses)

    def learn(self, key: K, uses: float) -> None:
        """Remember so many uses of a key that is not held, as another order has counted them, if they are more."""
        if key not in self._held and uses > self.uses(key):
            self._remember(key, math.log2(uses) + self._clock)

    def value(self, key: K) -> float:
        """The expected cost of evicting the key: faded uses × cost_ms. Raises KeyError if it is not held."""
        held = self._held[key]
        return math.exp2(held.uses - self._clock) * held.cost_ms

    def uses(self, key: K) -> float:
        """The key's faded uses, held or remembered; 0 for an unknown key."""
        held = self._held.get(key)
        return math.exp2((self._remembered.get(hash(key), -math.inf) if held is None else held.uses) - self._clock)

    def cheapest(self) -> Iterator[K]:
        """The keys by value per byte, least first. A change invalidates the iterator."""
        for _, _, key in self._order:
            yield key

    def _taken(self, key: K, nbytes: int, cost_ms: float, unknown: float) -> float:
        """The uses of a key, held or remembered, which is to be entered anew. Raises as `add`."""
        if nbytes < 1 or not 0 < cost_ms < math.inf:
            raise ValueError(f"{key!r} needs nbytes ≥ 1 and a finite cost_ms > 0, got {nbytes} and {cost_ms}")
        return self._leave(key).uses if key in self._held else self._remembered.pop(hash(key), unknown)

    def _use(self, uses: float) -> float:
        """Advance the clock by one use, and add one use."""
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


class CostAwarePolicy(FadingFrequency[K]):
    """The eviction order of the entries that may be evicted now, with the half-life that suits their users.

    The owner adds an entry when it becomes idle, removes it when it is pinned or evicted, and touches it when used.
    Keys should outlive entries (use user ids), since the uses of an absent key are remembered by its hash.
    """

    def __init__(self) -> None:
        self._trials = [Trial(half_life) for half_life in HALF_LIVES]
        self._leading = self._trials[1]  # start with a middle value, one use per entry
        self._one_in = 1  # simulate one key in this many; a power of two, so each selection is a subset of the last
        super().__init__(self._leading.half_life)

    def add(self, key: K, nbytes: int, cost_ms: float) -> None:
        """As `FadingFrequency.add`, in the simulations too."""
        super().add(key, nbytes, cost_ms)
        self._simulate(key, nbytes, cost_ms)

    def touch(self, key: K, nbytes: int, cost_ms: float) -> None:
        """As `FadingFrequency.touch`, in the simulations too."""
        here = key in self
        super().touch(key, nbytes, cost_ms)
        if not here:
            self._simulate(key, nbytes, cost_ms)

    def _simulate(self, key: K, nbytes: int, cost_ms: float) -> None:
        identity = crc32(repr(key).encode())  # hash() of a text differs by process: so would who is simulated
        while len(self) >= 2 * SIMULATED * self._one_in:
            self._one_in *= 2
            for trial in self._trials:
                trial.follow_one_in(self._one_in)
        if identity % self._one_in:
            return
        budget = self.nbytes / self._one_in
        # The same for all simulations: a rate that depended on the keys each one holds would favour some of them.
        kept = 1 - 1 / (JUDGED_USES * max(SIMULATED, len(self) / self._one_in))
        for trial in self._trials:
            trial.use(identity, nbytes, cost_ms, budget, kept)
        best = max(self._trials, key=lambda trial: trial.saved_ms)
        if best.saved_ms > BETTER * self._leading.saved_ms:
            self._leading = best
            self.half_life = best.half_life
