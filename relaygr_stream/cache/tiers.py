"""The accounts of the two tiers: the state of each entry's memory, and the choice of entries to evict.

A use of an entry is a period in which it was held. A move between the tiers is not a use, but changes the cost of an
eviction. After every change of an entry, call `note`: it updates the sums and the eviction order. The tiers choose
victims, but do not change entries; entry_table.py evicts them.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch

from relaygr_stream.cache.arena import Extent
from relaygr_stream.cache.entry import Entry, StoredCopy
from relaygr_stream.cache.eviction import Evictor
from relaygr_stream.cache.fading import CostAwarePolicy
from relaygr_stream.cache.kept import KeptCopies
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.errors import CacheCorruption
from relaygr_stream.models.kv import KVLayout, KVRegion

#: A region's capacity is a multiple of this many tokens. It wastes half a granule per entry (1.6 % at 2,048 tokens); a
#: returning user's few new behaviours then fit in place.
GRANULE_TOKENS = 64

#: Makes a tier's eviction order, by user id; the laboratory compares another one.
#: Predicted device time of recomputing an entry, in milliseconds.
CostMs = Callable[[Entry], float]
MakePolicy = Callable[[], CostAwarePolicy[str]]


def capacity_for(tokens: int) -> int:
    """Region capacity for `tokens` tokens: the next multiple of the granule."""
    return max(1, -(-tokens // GRANULE_TOKENS)) * GRANULE_TOKENS


class Residency(enum.StrEnum):
    """The state of an entry's HBM."""

    HELD = "held"  # pinned, computing or loading
    BUSY = "busy"  # not held, but a copy to DRAM reads it
    DIRTY = "dirty"  # idle; evicting it loses its contents
    CLEAN = "clean"  # idle; evicting it loses nothing


class _Tier:
    """What both tiers are: memory, and an order of eviction by user id, which outlives an entry."""

    def __init__(self, memory: TierMemory, cost_ms: CostMs, policy: MakePolicy) -> None:
        self._memory = memory
        self._cost_ms = cost_ms
        self._evictor: Evictor[str] = Evictor(memory.arena, policy())

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self._memory.arena.size

    @property
    def used(self) -> int:
        """Bytes handed out."""
        return self._memory.arena.used

    def uses(self, user_id: str) -> float:
        """The faded uses of the user's entry, in this tier or remembered."""
        return self._evictor.uses(user_id)

    def learn(self, user_id: str, uses: float) -> None:
        """Remember the faded uses that another worker has counted of a user without an entry here."""
        self._evictor.learn(user_id, uses)


class HbmTier(_Tier):
    """Regions in device memory. cost_ms(entry): the cost of its next use if it is evicted.

    last_tier: there is no DRAM tier, so every idle entry counts as clean.
    """

    def __init__(
        self,
        layout: KVLayout,
        memory: TierMemory,
        cost_ms: CostMs,
        policy: MakePolicy = CostAwarePolicy,
        *,
        last_tier: bool,
    ) -> None:
        super().__init__(memory, cost_ms, policy)
        self._layout = layout
        self._last_tier = last_tier
        self._noted: dict[Entry, tuple[Residency, Extent]] = {}
        self._bytes = dict.fromkeys(Residency, 0)
        self._idle: dict[str, Entry] = {}
        self.dirtied = 0  # how often an entry became DIRTY
        self.fresh: deque[Entry] | None = None  # those that did lately; None: not wanted

    @property
    def held_bytes(self) -> int:
        """Bytes of held entries."""
        return self._bytes[Residency.HELD]

    @property
    def reclaimable_bytes(self) -> int:
        """Bytes that are free or clean: available without a copy and without loss."""
        arena = self._memory.arena
        return arena.size - arena.used + self._bytes[Residency.CLEAN]

    def size_of(self, capacity: int) -> int:
        """Bytes of a region for `capacity` tokens, rounded up to the alignment."""
        return self._memory.arena.round_up(self._layout.nbytes(capacity))

    def allocate(self, capacity: int) -> tuple[Extent, KVRegion] | None:
        """Allocate a region for `capacity` tokens; None if no hole is large enough."""
        extent = self._memory.arena.allocate(self._layout.nbytes(capacity))
        if extent is None:
            return None
        return extent, KVRegion(self._layout, self._memory.view(extent, self._layout.dtype), capacity)

    def free(self, extent: Extent) -> None:
        """Free an allocated extent. Its entry must have been noted without it."""
        self._memory.arena.free(extent)

    def victims(self, capacity: int) -> list[Entry]:
        """Idle entries whose eviction makes room for a region of `capacity` tokens; [] if no eviction does.

        They are the cheapest run of neighbours: of clean entries if these suffice, else of any.
        """
        size = self.size_of(capacity)
        users = None
        if self.reclaimable_bytes >= size:
            users = self._evictor.choose(size, lambda user: self._noted[self._idle[user]][0] is Residency.CLEAN)
        if users is None:
            users = self._evictor.choose(size)
        return [self._idle[user] for user in users or ()]

    def cheapest(self) -> Iterator[Entry]:
        """The idle entries, the cheapest to evict first."""
        return (self._idle[user] for user in self._evictor.cheapest())

    def note(self, entry: Entry) -> bool:
        """Update the accounts to the entry's present state. Returns whether a use of it has ended."""
        before, now = self._noted.get(entry), self._residency_of(entry)
        was_idle, is_idle = _is_idle(before), _is_idle(now)
        if before == now and not is_idle:
            return False
        used = before is not None and before[0] is Residency.HELD and now is not None and now[0] is not Residency.HELD
        if before is not None:
            self._bytes[before[0]] -= before[1].size
            del self._noted[entry]
        if was_idle and not is_idle:
            self._evictor.remove(entry.user_id)
            del self._idle[entry.user_id]
        if now is not None:
            self._bytes[now[0]] += now[1].size
            self._noted[entry] = now
            if now[0] is Residency.DIRTY:
                self.dirtied += 1
                if self.fresh is not None:
                    self.fresh.append(entry)
            if is_idle:
                (self._evictor.add if used else self._evictor.hold)(entry.user_id, now[1], self._cost_ms(entry))
                self._idle[entry.user_id] = entry
            elif used:
                self._evictor.touch(entry.user_id, now[1].size, self._cost_ms(entry))
        return used

    def check_integrity(self, entries: Iterable[Entry], others: int) -> None:
        """Raise CacheCorruption unless the accounts match these entries. others: allocated bytes outside entries."""
        self._memory.arena.check_integrity()
        residencies = {entry: self._residency_of(entry) for entry in entries}
        found = {entry: residency for entry, residency in residencies.items() if residency is not None}
        if found != self._noted:
            raise CacheCorruption("HBM: an entry changed and was not noted, or is gone but still in the accounts")
        for kind, booked in self._bytes.items():
            total = sum(extent.size for each, extent in found.values() if each is kind)
            if total != booked:
                raise CacheCorruption(f"HBM: {total} bytes are {kind.value}, but the accounts say {booked}")
        if sum(self._bytes.values()) + others != self.used:
            raise CacheCorruption(f"HBM: entries and scratch hold {self._bytes} + {others}, {self.used} are allocated")
        for entry, (_, extent) in found.items():
            if extent not in self._memory.arena:
                raise CacheCorruption(f"HBM: {entry} holds {extent}, which is not allocated")
        idle = {entry.user_id: entry for entry, residency in found.items() if _is_idle(residency)}
        if idle != self._idle or set(self._evictor.cheapest()) != idle.keys():
            raise CacheCorruption("HBM: the eviction order does not hold exactly the idle entries")

    def _residency_of(self, entry: Entry) -> tuple[Residency, Extent] | None:
        if entry.extent is None:
            return None
        if entry.held:
            kind = Residency.HELD
        elif not entry.evictable:
            kind = Residency.BUSY
        else:
            kind = Residency.CLEAN if self._last_tier or entry.clean else Residency.DIRTY
        return kind, entry.extent


class DramTier(_Tier):
    """Copies of regions in host memory, byte for byte.

    cost_ms(entry): the cost of its next use if the copy is evicted. full: the last allocation failed, and nothing has
    changed since. file: the tier's; kept: what is written of copies into it; None: it has none.
    """

    def __init__(
        self,
        layout: KVLayout,
        memory: TierMemory,
        cost_ms: CostMs,
        policy: MakePolicy = CostAwarePolicy,
    ) -> None:
        super().__init__(memory, cost_ms, policy)
        self._layout = layout
        self.kept = None if memory.file is None else KeptCopies(memory.file, layout)
        self.file = memory.file
        self._nbytes = layout.nbytes if self.kept is None else self.kept.nbytes
        self.full = False
        self._evictable: dict[str, Entry] = {}

    def size_of(self, capacity: int) -> int:
        """Bytes of a copy of a region for `capacity` tokens, rounded up to the alignment."""
        return self._memory.arena.round_up(self._nbytes(capacity))

    def allocate(self, capacity: int) -> Extent | None:
        """Allocate memory for a copy of a region for `capacity` tokens; None if no hole is large enough."""
        extent = self._memory.arena.allocate(self._nbytes(capacity))
        if extent is not None and self.kept is not None:
            self.kept.file.begin(extent)
        return extent

    def has_hole(self, capacity: int) -> bool:
        """Whether `allocate` would find room."""
        return self._memory.arena.largest_hole >= self.size_of(capacity)

    def hold_all(self, copies: Iterable[StoredCopy]) -> None:
        """Hold the extents of copies that an earlier process made, in address order, while there are no others."""
        self._memory.arena.hold_all(copy.extent for copy in copies)

    def free(self, copy: StoredCopy, *, erased: bool = False) -> None:
        """Free a copy's extent. Its entry must have been noted without it. erased: its user was."""
        self.full = False
        if self.kept is not None:
            self.kept.freed(copy, erased=erased)
        self._memory.arena.free(copy.extent)

    def view(self, copy: StoredCopy) -> torch.Tensor:
        """The bytes of a copy."""
        return self._memory.view(copy.extent, torch.uint8)[: self._layout.nbytes(copy.capacity)]

    def victims(self, capacity: int) -> list[Entry]:
        """Entries whose copies, when evicted, make room for a copy of `capacity` tokens; [] if no eviction does."""
        return [self._evictable[user] for user in self._evictor.choose(self.size_of(capacity)) or ()]

    def worth_room(self, user_id: str, capacity: int, cost_ms: float) -> bool:
        """Whether a copy outside the tier, of a prefix that takes cost_ms to recompute, is worth more than the copies
        to evict for it. It counts as used now, as it will when it is in the tier."""
        at_stake = sum(self._evictor.value(victim.user_id) for victim in self.victims(capacity))
        return at_stake < max(1.0, self._evictor.uses(user_id)) * cost_ms

    def note(self, entry: Entry, *, used: bool) -> None:
        """Update the eviction order to the entry's present state. used: a use of it in HBM has ended."""
        if entry.stored is None and not used and entry.user_id not in self._evictable:
            return
        was_offered, is_offered = self._evictable.get(entry.user_id) is entry, entry.evictable_from_dram
        if was_offered and not is_offered:
            self._evictor.remove(entry.user_id)
            del self._evictable[entry.user_id]
        elif is_offered and not was_offered:
            assert entry.stored is not None
            self.full = False
            self._evictor.hold(entry.user_id, entry.stored.extent, self._cost_ms(entry))
            self._evictable[entry.user_id] = entry
        if used:
            assert entry.region is not None
            size = entry.stored.extent.size if is_offered and entry.stored else self.size_of(entry.region.capacity)
            self._evictor.touch(entry.user_id, size, self._cost_ms(entry))

    def check_integrity(self, entries: Iterable[Entry], others: int) -> None:
        """Raise CacheCorruption unless the accounts match these entries. others: allocated bytes of reservations."""
        self._memory.arena.check_integrity()
        copies = {entry: entry.stored.extent for entry in entries if entry.stored is not None}
        total = sum(extent.size for extent in copies.values())
        if total + others != self.used:
            raise CacheCorruption(
                f"DRAM: entries and reservations hold {total} + {others} bytes, {self.used} are allocated"
            )
        for entry, extent in copies.items():
            if extent not in self._memory.arena:
                raise CacheCorruption(f"DRAM: the copy of {entry} is in {extent}, which is not allocated")
        offered = {entry.user_id: entry for entry in copies if entry.evictable_from_dram}
        if offered != self._evictable or set(self._evictor.cheapest()) != offered.keys():
            raise CacheCorruption("DRAM: the eviction order does not hold exactly the evictable copies")


def _is_idle(noted: tuple[Residency, Extent] | None) -> bool:
    return noted is not None and noted[0] in (Residency.CLEAN, Residency.DIRTY)
