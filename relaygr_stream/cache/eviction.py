"""Which idle entries to give up for room. Knows sizes, costs, use and addresses; knows no contents and no tiers.

An entry is worth (uses, fading with time) × (cost of recomputing it), so the order of eviction is by that per byte, as
in GreedyDual-Size-Frequency, but with uses that halve with every half-life in place of that policy's inflation. How
fast uses should fade depends on the users: those who come back within one session want recency, stable popularity
wants frequency. Small simulations of the same stream with several half-lives decide which one holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import chain, islice
from typing import Generic, NamedTuple, TypeVar

from sortedcontainers import SortedList

from relaygr_stream.cache.arena import Arena, Extent

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
#: Uses of keys that left are remembered for this many per entry held, and for at least so many: a user who comes back
#: is no newcomer.
REMEMBERED = 4
MIN_REMEMBERED = 256
#: Where victims are looked for: around so many cheap entries and in so many tight places; with fewer entries in all,
#: everywhere. Cheap entries where there is no room are passed over, up to this many.
SEEDS = 32
LOOKED_AT = 8 * SEEDS


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
        _check(key, nbytes, cost_ms)
        known = self._leave(key).uses if key in self._held else self._remembered.pop(hash(key), -math.inf)
        self._enter(key, self._use(known), nbytes, cost_ms)

    def hold(self, key: K, nbytes: int, cost_ms: float) -> None:
        """Hold the key without a use: with those remembered, or, of a key nobody knows, as if it had been used now.

        One that is held already gets the new size and cost.
        """
        _check(key, nbytes, cost_ms)
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

    def cheapest(self) -> Iterator[K]:
        """The keys by value per byte, least first. The iterator is of no use after a change."""
        for _, _, key in self._order:
            yield key

    def _use(self, uses: float) -> float:
        """Let the clock move on by one use, and add one."""
        self._clock += 1 / (self.half_life * max(1, len(self._held)))
        more, less = max(uses, self._clock), min(uses, self._clock)
        return more + math.log2(1 + math.exp2(less - more))

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
        self._remembered[hash(key)] = uses
        while len(self._remembered) > max(MIN_REMEMBERED, REMEMBERED * len(self._held)):
            del self._remembered[next(iter(self._remembered))]  # the one that left first


def _check(key: Hashable, nbytes: int, cost_ms: float) -> None:
    if nbytes < 1 or not 0 < cost_ms < math.inf:
        raise ValueError(f"{key!r} needs nbytes ≥ 1 and a finite cost_ms > 0, got {nbytes} and {cost_ms}")


class _Simulation:
    """A cache of keys alone, run with one half-life. saved_ms: recompute time its hits saved, fading."""

    def __init__(self, half_life: float) -> None:
        self.order: FadingFrequency[int] = FadingFrequency(half_life)
        self.saved_ms = 0.0

    def use(self, key: int, nbytes: int, cost_ms: float, budget: float, kept: float) -> None:
        self.saved_ms *= kept
        if key in self.order:
            self.saved_ms += cost_ms
        self.order.add(key, nbytes, cost_ms)
        while self.order.nbytes > budget and len(self.order) > 1:
            self.order.remove(next(self.order.cheapest()))

    def leave_out(self, unwanted: Callable[[int], bool]) -> None:
        """Drop keys that will not be used any more here: with a long half-life they would stay for long."""
        for key in [key for key in self.order.cheapest() if unwanted(key)]:
            self.order.remove(key)


class CostAwarePolicy(FadingFrequency[K]):
    """The eviction order of the entries that may be evicted now, with the half-life that suits their users.

    The owner adds an entry when it becomes idle, removes it when it is pinned or evicted, and touches it when used.
    Keys should outlive entries (user ids): what is known of them is kept by hash, also while they are away.
    """

    def __init__(self) -> None:
        self._simulations = [_Simulation(half_life) for half_life in HALF_LIVES]
        self._leading = self._simulations[1]  # one use per entry: a middle to start from
        self._one_in = 1  # of so many keys one is simulated; powers of two, so that each choice is part of the last
        super().__init__(self._leading.order.half_life)

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
            for simulation in self._simulations:
                simulation.leave_out(lambda key: key % self._one_in != 0)
        if identity % self._one_in:
            return
        budget = self.nbytes / self._one_in
        # Alike for all: a number that depended on how many entries a simulation holds would judge that instead.
        kept = 1 - 1 / (JUDGED_USES * max(SIMULATED, len(self) / self._one_in))
        for simulation in self._simulations:
            simulation.use(identity, nbytes, cost_ms, budget, kept)
        best = max(self._simulations, key=lambda simulation: simulation.saved_ms)
        if best.saved_ms > BETTER * self._leading.saved_ms:
            self._leading = best
            self.half_life = best.order.half_life


class Evictor(Generic[K]):
    """The entries of one arena that may be evicted now, and the choice among them.

    The owner adds an entry when it becomes idle and removes it when it is pinned, moved or evicted, in any case before
    its extent is freed. The arena knows at all times how much room eviction could make, so that a choice costs about
    as much with 10⁶ entries as with 10³, also when there is none.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._policy: CostAwarePolicy[K] = CostAwarePolicy()
        self._extents: dict[K, Extent] = {}
        self._keys: dict[Extent, K] = {}

    def __len__(self) -> int:
        return len(self._extents)

    def __contains__(self, key: K) -> bool:
        return key in self._extents

    def add(self, key: K, extent: Extent, cost_ms: float) -> None:
        """The entry in `extent` may be evicted from now on, which counts as a use; once there, it gets the new numbers.

        cost_ms: what its next user would pay for the eviction. ValueError if the arena does not hold the extent.
        """
        self._open(key, extent)
        self._policy.add(key, extent.size, cost_ms)

    def hold(self, key: K, extent: Extent, cost_ms: float) -> None:
        """As `add`, but no use: the entry was not evictable for a while for other reasons, or costs another price."""
        self._open(key, extent)
        self._policy.hold(key, extent.size, cost_ms)

    def touch(self, key: K, nbytes: int, cost_ms: float) -> None:
        """A use, also of an entry that is not here now: it counts when it comes back."""
        self._policy.touch(key, nbytes, cost_ms)

    def remove(self, key: K) -> None:
        """The entry must not be evicted any more, or is about to be freed. KeyError if it is not here."""
        self._close(key)
        self._policy.remove(key)

    def discard(self, key: K) -> None:
        """`remove`, if it is here."""
        if key in self._extents:
            self.remove(key)

    def value(self, key: K) -> float:
        """What evicting the entry is expected to cost, in ms × uses (see FadingFrequency)."""
        return self._policy.value(key)

    def cheapest(self) -> Iterator[K]:
        """The entries by value per byte, least first. The iterator is of no use after a change."""
        return self._policy.cheapest()

    def choose(self, nbytes: int, allowed: Callable[[K], bool] | None = None) -> list[K] | None:
        """Entries whose freeing makes a hole of `nbytes`, at nearly the least sum of values. Changes nothing.

        [] when there is such a hole. None when no eviction can make one, or, with `allowed`, when no way to make one
        from allowed entries was found near the cheapest: then choose again without.
        """
        if self._arena.largest_hole >= nbytes:
            return []
        if self._arena.largest_open < nbytes:
            return None
        costs = _Costs(self, allowed)
        seeds = None if len(self) <= SEEDS else self._seeds(nbytes, allowed)
        window = self._arena.cheapest_window(nbytes, costs, seeds)
        return None if window is None else [self._keys[extent] for extent in window]

    def _seeds(self, nbytes: int, allowed: Callable[[K], bool] | None) -> Iterator[Extent]:
        """The cheapest entries where there is room enough around them, and the tightest places that have it."""
        cheapest = (self._extents[key] for key in islice(self.cheapest(), LOOKED_AT) if not allowed or allowed(key))
        roomy = (extent for extent in cheapest if self._arena.open_run(extent) >= nbytes)
        return chain(islice(roomy, SEEDS), self._arena.starts_of_open_runs(nbytes, SEEDS))

    def _open(self, key: K, extent: Extent) -> None:
        self._arena.set_evictable(extent, True)
        if self._extents.get(key, extent) != extent:
            self._close(key)
        self._extents[key] = extent
        self._keys[extent] = key

    def _close(self, key: K) -> None:
        extent = self._extents.pop(key)
        del self._keys[extent]
        self._arena.set_evictable(extent, False)


class _Costs(Mapping[Extent, float], Generic[K]):
    """Extent → value of the entry there, for those that may be evicted; computed when asked for."""

    def __init__(self, evictor: Evictor[K], allowed: Callable[[K], bool] | None) -> None:
        self._evictor = evictor
        self._allowed = allowed

    def __getitem__(self, extent: Extent) -> float:
        key = self._evictor._keys[extent]
        if self._allowed is not None and not self._allowed(key):
            raise KeyError(extent)
        return self._evictor.value(key)

    def __iter__(self) -> Iterator[Extent]:
        return (extent for extent in self._evictor._keys if extent in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
