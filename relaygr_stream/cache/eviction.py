"""Chooses the idle entries to evict: neighbours in an arena whose values (fading.py) have the least sum."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import chain, islice
from typing import Generic, TypeVar

from relaygr_stream.cache.arena import Arena, Extent
from relaygr_stream.cache.fading import CostAwarePolicy

K = TypeVar("K", bound=Hashable)

#: The search for victims covers the surroundings of this many cheap entries and this many small open runs. With fewer
#: entries in all, it covers everything.
SEEDS = 32
#: The cheapest entries examined to find SEEDS ones with enough space around them.
MAX_EXAMINED = 8 * SEEDS


#: Whether an item may go.
Allowed = Callable[[K], bool]


class Evictor(Generic[K]):
    """The entries of one arena that may be evicted now, and the choice among them.

    The owner adds an entry when it becomes idle, and removes it when it is pinned, moved or evicted, before it frees
    the extent. The arena always knows how much space eviction could free, so a choice takes about as long with 10⁶
    entries as with 10³, also if no eviction helps.

    policy: the eviction order; by default a new CostAwarePolicy.
    """

    def __init__(self, arena: Arena, policy: CostAwarePolicy[K] | None = None) -> None:
        self._arena = arena
        self._policy: CostAwarePolicy[K] = CostAwarePolicy() if policy is None else policy
        self._extents: dict[K, Extent] = {}
        self._keys: dict[Extent, K] = {}

    def __len__(self) -> int:
        return len(self._extents)

    def __contains__(self, key: K) -> bool:
        return key in self._extents

    def add(self, key: K, extent: Extent, cost_ms: float) -> None:
        """Make the entry in `extent` evictable, and count a use. A present key gets the new extent and cost.

        cost_ms: the cost of an eviction at the entry's next use. Raises ValueError if the arena does not hold the
        extent.
        """
        self._open(key, extent)
        self._policy.add(key, extent.size, cost_ms)

    def hold(self, key: K, extent: Extent, cost_ms: float) -> None:
        """As `add` without a use: the entry was not evictable for another reason, or its cost has changed."""
        self._open(key, extent)
        self._policy.hold(key, extent.size, cost_ms)

    def touch(self, key: K, nbytes: int, cost_ms: float) -> None:
        """Count a use. If the key is absent, the use is remembered until it returns."""
        self._policy.touch(key, nbytes, cost_ms)

    def learn(self, key: K, uses: float) -> None:
        """Remember the uses of an absent entry (see FadingFrequency)."""
        self._policy.learn(key, uses)

    def remove(self, key: K) -> None:
        """Make the entry no longer evictable. Call it before its extent is freed. Raises KeyError if it is absent."""
        self._close(key)
        self._policy.remove(key)

    def value(self, key: K) -> float:
        """The expected cost of evicting the entry, in ms × uses (see FadingFrequency)."""
        return self._policy.value(key)

    def uses(self, key: K) -> float:
        """The entry's faded uses, present or remembered."""
        return self._policy.uses(key)

    def cheapest(self) -> Iterator[K]:
        """The entries by value per byte, least first. A change invalidates the iterator."""
        return self._policy.cheapest()

    def choose(self, nbytes: int, allowed: Allowed[K] | None = None) -> list[K] | None:
        """Entries whose freeing makes a hole of `nbytes`, with nearly the least sum of values. Changes nothing.

        Returns [] if there is such a hole. Returns None if no eviction can make one, or, with `allowed`, if the search
        near the cheapest allowed entries finds none: then call it again without `allowed`.
        """
        if self._arena.largest_hole >= nbytes:
            return []
        if self._arena.largest_open < nbytes:
            return None
        costs = _Costs(self, allowed)
        seeds = None if len(self) <= SEEDS else self._seeds(nbytes, allowed)
        window = self._arena.cheapest_window(nbytes, costs, seeds)
        return None if window is None else [self._keys[extent] for extent in window]

    def _seeds(self, nbytes: int, allowed: Allowed[K] | None) -> Iterator[Extent]:
        """The cheapest entries with enough evictable space around them, and the smallest open runs of enough size."""
        cheapest = (self._extents[key] for key in islice(self.cheapest(), MAX_EXAMINED) if not allowed or allowed(key))
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
    """Extent → value of its entry, for allowed evictable entries. Values are computed on access."""

    def __init__(self, evictor: Evictor[K], allowed: Allowed[K] | None) -> None:
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
