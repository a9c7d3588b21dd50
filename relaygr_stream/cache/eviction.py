"""Which idle entries to give up for room: those in the way whose values (fading.py) sum up to the least.

Knows sizes, costs, use and addresses; knows no contents and no tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import chain, islice
from typing import Generic, TypeVar

from relaygr_stream.cache.arena import Arena, Extent
from relaygr_stream.cache.fading import CostAwarePolicy

K = TypeVar("K", bound=Hashable)

#: Where victims are looked for: around so many cheap entries and in so many tight places; with fewer entries in all,
#: everywhere. Cheap entries where there is no room are passed over, up to this many.
SEEDS = 32
LOOKED_AT = 8 * SEEDS


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

    def expected(self, key: K, cost_ms: float) -> float:
        """What `value` would be if an entry that is not here were, at this cost."""
        return self._policy.expected(key, cost_ms)

    def uses(self, key: K) -> float:
        """Uses of the entry, here or remembered, as faded by now."""
        return self._policy.uses(key)

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
