"""The books of the two tiers: what each entry's memory counts as, and whose memory could be taken back for others.

A use of an entry is a time it was held. Moving between the tiers is none, but changes what its eviction costs. Both
tiers follow the entries: after any change of an entry, `note` it, and sums and eviction order are right again.
Neither changes an entry nor decides that one has to go; prefix_cache.py does.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator

import torch

from relaygr_stream.cache.arena import Extent
from relaygr_stream.cache.entry import Entry, StoredCopy
from relaygr_stream.cache.eviction import Evictor
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.cache.storage import Storage
from relaygr_stream.errors import CacheCorruption
from relaygr_stream.models.api import KVLayout, KVRegion

#: Regions hold a multiple of this many tokens. Half of it is lost per entry (1.6 % at 2048 tokens); the slack lets a
#: returning user's few new behaviours be appended in place.
GRANULE_TOKENS = 64


def capacity_for(tokens: int) -> int:
    """Region capacity for so many tokens: the next multiple of the granule."""
    return max(1, -(-tokens // GRANULE_TOKENS)) * GRANULE_TOKENS


class Standing(enum.StrEnum):
    """What an entry's HBM counts as."""

    HELD = "held"  # requests hold it, or it is being computed or loaded
    BUSY = "busy"  # nobody holds it, but it is being copied to DRAM
    DIRTY = "dirty"  # idle, and the only copy of what it holds
    CLEAN = "clean"  # idle, and nothing is lost with it


class HbmTier:
    """Regions in the device's memory. cost_ms(entry): what its next user pays if it is evicted."""

    def __init__(
        self, layout: KVLayout, memory: TierMemory, cost_ms: Callable[[Entry], float], *, last_tier: bool
    ) -> None:
        self._layout = layout
        self._memory = memory
        self._cost_ms = cost_ms
        self._last_tier = last_tier  # nothing behind it: what leaves is lost in any case
        self._noted: dict[Entry, tuple[Standing, Extent]] = {}
        self._bytes = dict.fromkeys(Standing, 0)
        self._idle: dict[str, Entry] = {}
        self._evictor: Evictor[str] = Evictor(memory.arena)  # by user, who outlives an entry

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self._memory.arena.size

    @property
    def used(self) -> int:
        """Bytes handed out."""
        return self._memory.arena.used

    @property
    def held_bytes(self) -> int:
        """Bytes of entries that are held."""
        return self._bytes[Standing.HELD]

    @property
    def reclaimable_bytes(self) -> int:
        """Bytes that are free, or idle with nothing lost when they are taken: what needs no copy first."""
        return self._memory.arena.free_bytes + self._bytes[Standing.CLEAN]

    def size_of(self, capacity: int) -> int:
        """What a region with room for so many tokens takes."""
        return self._memory.arena.round_up(self._layout.nbytes(capacity))

    def allocate(self, capacity: int) -> tuple[Extent, KVRegion] | None:
        """A region with room for so many tokens, if a hole is large enough."""
        extent = self._memory.arena.allocate(self._layout.nbytes(capacity))
        if extent is None:
            return None
        return extent, KVRegion(self._layout, self._memory.view(extent, self._layout.dtype), capacity)

    def free(self, extent: Extent) -> None:
        """Take back what `allocate` gave; whose it was has been noted as gone."""
        self._memory.arena.free(extent)

    def victims(self, capacity: int) -> list[Entry]:
        """Idle entries whose eviction makes room for such a region, [] when nothing does.

        Entries that lose nothing if they suffice, else any; the cheapest run of neighbours in either case.
        """
        size = self.size_of(capacity)
        users = None
        if self.reclaimable_bytes >= size:
            users = self._evictor.choose(size, lambda user: self._noted[self._idle[user]][0] is Standing.CLEAN)
        if users is None:
            users = self._evictor.choose(size)
        return [self._idle[user] for user in users or ()]

    def worth_room(self, entry: Entry, capacity: int) -> bool:
        """Whether an entry that is not here, and whose user is expected, is worth more than what would have to go.

        The expected use counts as one, as it will once the entry was brought here.
        """
        at_stake = sum(self._evictor.value(victim.user_id) for victim in self.victims(capacity))
        cost_ms = self._cost_ms(entry)
        return at_stake < self._evictor.expected(entry.user_id, cost_ms) + cost_ms

    def uses(self, user_id: str) -> float:
        """Uses of the user's entry, here or remembered, as faded by now."""
        return self._evictor.uses(user_id)

    def cheapest(self) -> Iterator[Entry]:
        """The idle entries, what is cheapest to evict first."""
        return (self._idle[user] for user in self._evictor.cheapest())

    def note(self, entry: Entry) -> bool:
        """Bring the books up to what the entry is now; returns whether a use of it has ended."""
        before, now = self._noted.get(entry), self._standing(entry)
        was_idle, is_idle = _is_idle(before), _is_idle(now)
        if before == now and not is_idle:
            return False
        used = before is not None and before[0] is Standing.HELD and now is not None and now[0] is not Standing.HELD
        if before is not None:
            self._bytes[before[0]] -= before[1].size
            del self._noted[entry]
        if was_idle and not is_idle:
            self._evictor.remove(entry.user_id)
            del self._idle[entry.user_id]
        if now is not None:
            self._bytes[now[0]] += now[1].size
            self._noted[entry] = now
            if is_idle:
                (self._evictor.add if used else self._evictor.hold)(entry.user_id, now[1], self._cost_ms(entry))
                self._idle[entry.user_id] = entry
            elif used:
                self._evictor.touch(entry.user_id, now[1].size, self._cost_ms(entry))
        return used

    def check_integrity(self, entries: Iterable[Entry], others: int) -> None:
        """Raise CacheCorruption unless the books say what these entries say; others: bytes that no entry holds."""
        self._memory.arena.check_integrity()
        standings = {entry: self._standing(entry) for entry in entries}
        found = {entry: standing for entry, standing in standings.items() if standing is not None}
        if found != self._noted:
            raise CacheCorruption("HBM: an entry changed and was not noted, or is gone and still in the books")
        for kind, booked in self._bytes.items():
            total = sum(extent.size for each, extent in found.values() if each is kind)
            if total != booked:
                raise CacheCorruption(f"HBM: {total} bytes are {kind.value}, {booked} were booked")
        if sum(self._bytes.values()) + others != self.used:
            raise CacheCorruption(f"HBM: entries and scratch hold {self._bytes} + {others}, {self.used} were lent")
        for entry, (_, extent) in found.items():
            if extent not in self._memory.arena:
                raise CacheCorruption(f"HBM: {entry} holds {extent}, which was not lent")
        idle = {entry.user_id: entry for entry, standing in found.items() if _is_idle(standing)}
        if idle != self._idle or set(self._evictor.cheapest()) != idle.keys():
            raise CacheCorruption("HBM: the eviction order does not hold exactly the idle entries")

    def _standing(self, entry: Entry) -> tuple[Standing, Extent] | None:
        if entry.extent is None:
            return None
        if entry.held:
            kind = Standing.HELD
        elif not entry.evictable:
            kind = Standing.BUSY
        else:
            kind = Standing.CLEAN if self._last_tier or entry.clean else Standing.DIRTY
        return kind, entry.extent


class DramTier:
    """Copies of regions in host memory, in the form of `storage`.

    cost_ms(entry): what its next user pays if the copy is forgotten. full: room was asked for in vain, and nothing has
    changed since.
    """

    def __init__(self, memory: TierMemory, storage: Storage, cost_ms: Callable[[Entry], float]) -> None:
        self.storage = storage
        self.full = False
        self._memory = memory
        self._cost_ms = cost_ms
        self._offered: dict[str, Entry] = {}
        self._evictor: Evictor[str] = Evictor(memory.arena)

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self._memory.arena.size

    @property
    def used(self) -> int:
        """Bytes handed out."""
        return self._memory.arena.used

    def size_of(self, capacity: int) -> int:
        """What a copy of a region with room for so many tokens takes."""
        return self._memory.arena.round_up(self.storage.nbytes(capacity))

    def allocate(self, capacity: int) -> Extent | None:
        """Memory for a copy of such a region, if a hole is large enough."""
        return self._memory.arena.allocate(self.storage.nbytes(capacity))

    def free(self, extent: Extent) -> None:
        """Take back what `allocate` gave; whose it was has been noted as gone."""
        self.full = False
        self._memory.arena.free(extent)

    def view(self, copy: StoredCopy) -> torch.Tensor:
        """The bytes of a copy."""
        return self._memory.view(copy.extent, torch.uint8)[: self.storage.nbytes(copy.capacity)]

    def victims(self, capacity: int) -> list[Entry]:
        """Entries whose copies make room for one of such a region when forgotten, [] when nothing does."""
        return [self._offered[user] for user in self._evictor.choose(self.size_of(capacity)) or ()]

    def worth_room(self, user_id: str, capacity: int, cost_ms: float) -> bool:
        """Whether a copy that is not here, of a prefix that takes cost_ms to recompute, is worth more than what would
        have to be forgotten for it. It counts as used just now, as it will once it is here."""
        at_stake = sum(self._evictor.value(victim.user_id) for victim in self.victims(capacity))
        return at_stake < max(1.0, self._evictor.uses(user_id)) * cost_ms

    def uses(self, user_id: str) -> float:
        """Uses of the user's entry, with a copy here or remembered, as faded by now."""
        return self._evictor.uses(user_id)

    def note(self, entry: Entry, *, used: bool) -> None:
        """Bring the order of forgetting up to what the entry is now; used: a use of it has ended, in HBM."""
        if entry.stored is None and not used and entry.user_id not in self._offered:
            return
        was_offered, is_offered = self._offered.get(entry.user_id) is entry, entry.forgettable
        if was_offered and not is_offered:
            self._evictor.remove(entry.user_id)
            del self._offered[entry.user_id]
        elif is_offered and not was_offered:
            assert entry.stored is not None
            self.full = False
            self._evictor.hold(entry.user_id, entry.stored.extent, self._cost_ms(entry))
            self._offered[entry.user_id] = entry
        if used:
            assert entry.region is not None
            size = entry.stored.extent.size if is_offered and entry.stored else self.size_of(entry.region.capacity)
            self._evictor.touch(entry.user_id, size, self._cost_ms(entry))

    def check_integrity(self, entries: Iterable[Entry], others: int) -> None:
        """Raise CacheCorruption unless the books say what these entries say; others: bytes that no entry holds yet."""
        self._memory.arena.check_integrity()
        copies = {entry: entry.stored.extent for entry in entries if entry.stored is not None}
        total = sum(extent.size for extent in copies.values())
        if total + others != self.used:
            raise CacheCorruption(f"DRAM: entries and arrivals hold {total} + {others} bytes, {self.used} were lent")
        for entry, extent in copies.items():
            if extent not in self._memory.arena:
                raise CacheCorruption(f"DRAM: the copy of {entry} is in {extent}, which was not lent")
        offered = {entry.user_id: entry for entry in copies if entry.forgettable}
        if offered != self._offered or set(self._evictor.cheapest()) != offered.keys():
            raise CacheCorruption("DRAM: the order of forgetting does not hold exactly the copies at rest")


def _is_idle(noted: tuple[Standing, Extent] | None) -> bool:
    return noted is not None and noted[0] in (Standing.CLEAN, Standing.DIRTY)
