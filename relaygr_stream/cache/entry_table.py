"""Which entries there are, and the memory they hold: found by user, given room, freed. Below the life cycle.

An entry that its user's newer one replaced is retired: out of sight, and freed once nobody holds it. Knows nothing of
copies between the tiers, except that what is being copied is not freed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from relaygr_stream.cache.arena import Extent
from relaygr_stream.cache.entry import Entry, StoredCopy
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.cache.reloads import Reloads
from relaygr_stream.cache.storage import Storage
from relaygr_stream.cache.tiers import DramTier, HbmTier
from relaygr_stream.errors import CacheCorruption
from relaygr_stream.models.api import KVLayout, KVRegion, Tokens

# What happened in the cache, as running totals.


@dataclass
class CacheCounters:
    """Running totals."""

    opened: int = 0
    extended_in_place: int = 0
    extended_by_move: int = 0
    cut_short: int = 0  # computations that nobody wanted any more, kept as far as they were
    evicted_clean: int = 0
    evicted_lost: int = 0  # given up without a DRAM copy
    spilled: int = 0
    spilled_bytes: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    distrusted: int = 0  # dropped from both tiers: an audit deviated, or scores from it were not finite
    forgotten: int = 0  # dropped from DRAM to make room there
    copy_failures: int = 0
    no_room: int = 0  # allocations that failed even after eviction

    def as_dict(self) -> dict[str, int]:
        """Name → total."""
        return dict(vars(self))


#: Predicted costs are fitted and may come out as nothing; an entry is never worth nothing.
MIN_COST_MS = 1e-3


class Holdings:
    """The entries of both tiers. predict_ms(n): what recomputing n tokens takes.

    That is what forgetting a copy puts at stake, and evicting an entry without one; with one, it is a reload, and the
    risk that the copy is forgotten before it is needed.
    """

    def __init__(
        self,
        layout: KVLayout,
        hbm: TierMemory,
        dram: TierMemory | None,
        storage: Storage,
        predict_ms: Callable[[int], float],
        counters: CacheCounters,
    ) -> None:
        self._predict_ms = predict_ms
        self._counters = counters
        self._entries: dict[str, Entry] = {}
        self._retired: set[Entry] = set()
        self.reloads = Reloads()
        self.hbm = HbmTier(layout, hbm, self._eviction_ms, last_tier=dram is None)
        self.dram = None if dram is None else DramTier(dram, storage, self._forgetting_ms)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, user_id: str) -> Entry | None:
        """The user's entry."""
        return self._entries.get(user_id)

    def users(self) -> list[str]:
        """Whose entries there are."""
        return list(self._entries)

    def add(self, place: tuple[Extent, KVRegion], user_id: str, tokens: Tokens) -> Entry:
        """A new entry of the user in this memory, to be computed; the one before is retired."""
        entry = Entry(user_id, tokens)
        entry.extent, entry.region = place
        entry.computing = True
        self._replace(entry)
        return entry

    def add_stored(self, copy: StoredCopy, user_id: str, tokens: Tokens) -> Entry:
        """A new entry of the user of which DRAM holds all; the one before is retired."""
        entry = Entry(user_id, tokens)
        entry.stored = copy
        self._replace(entry)
        return entry

    def note(self, entry: Entry) -> None:
        """The entry has changed: bring the books of both tiers up to it."""
        used = self.hbm.note(entry)
        if self.dram is not None:
            self.dram.note(entry, used=used)

    def retire(self, entry: Entry) -> None:
        """Take the entry out of sight; its memory goes back once nobody holds it."""
        if self._entries.get(entry.user_id) is entry:
            del self._entries[entry.user_id]
        entry.retired = True
        self._retired.add(entry)
        self.note(entry)
        self.free_if_retired(entry)

    def free_if_retired(self, entry: Entry) -> None:
        """Somebody let go of the entry: it may be its time."""
        if not entry.retired or entry.held or entry.spill or entry.lent:
            return
        if entry.extent is not None:
            self._release_hbm(entry)
        if entry.stored is not None:
            self.release_dram(entry)
        self._retired.discard(entry)

    def room(self, capacity: int) -> tuple[Extent, KVRegion] | None:
        """HBM for so many tokens, after eviction if need be."""
        place = self.hbm.allocate(capacity)
        if place is None:
            for entry in self.hbm.victims(capacity):
                self._evict(entry)
            place = self.hbm.allocate(capacity)
        if place is None:
            self._counters.no_room += 1
        return place

    def dram_room(self, capacity: int) -> Extent | None:
        """DRAM for a copy of a region with room for so many tokens, after forgetting other copies if need be."""
        assert self.dram is not None
        extent = self.dram.allocate(capacity)
        if extent is None:
            for entry in self.dram.victims(capacity):
                self._forget(entry)
            extent = self.dram.allocate(capacity)
        self.dram.full = extent is None
        return extent

    def release_dram(self, entry: Entry) -> None:
        """Free the entry's DRAM copy."""
        assert self.dram is not None and entry.stored is not None
        copy, entry.stored = entry.stored, None
        self.note(entry)
        self.dram.free(copy.extent)

    def hand_over_copy(self, old: Entry, new: Entry) -> None:
        """The DRAM copy of a sequence is one of the beginning of a longer sequence too."""
        if old.stored is not None and old.spill is None and not old.lent:
            new.stored, old.stored = old.stored, None
            self.note(old)
            self.note(new)

    def pins(self) -> dict[Entry, int]:
        """The entries that are pinned, and how often."""
        return {entry: entry.pins for entry in chain(self._entries.values(), self._retired) if entry.pins}

    def check_integrity(self, scratch_bytes: int, arriving_bytes: int) -> None:
        """Raise CacheCorruption where books and memory disagree. arriving_bytes: DRAM that entries will get."""
        everyone = list(chain(self._entries.values(), self._retired))
        self.hbm.check_integrity(everyone, scratch_bytes)
        if self.dram is not None:
            self.dram.check_integrity(everyone, arriving_bytes)
        for entry in everyone:
            who = str(entry)
            if (entry.extent is None) != (entry.region is None):
                raise CacheCorruption(f"{who} has a region without memory or the reverse")
            if entry.retired != (entry in self._retired) or (
                entry.retired and not (entry.held or entry.spill or entry.lent)
            ):
                raise CacheCorruption(f"{who} was retired and is not freed, though nobody holds it")
            if not entry.retired and (entry.failed or (entry.region is None and entry.stored is None)):
                raise CacheCorruption(f"{who} can be found and has no contents")

    def _replace(self, entry: Entry) -> None:
        old = self._entries.get(entry.user_id)
        if old is not None:
            self.retire(old)
        self._entries[entry.user_id] = entry
        self.note(entry)

    def _evict(self, entry: Entry) -> None:
        """idle → in DRAM (if a copy is there) or absent."""
        if entry.clean:
            self._counters.evicted_clean += 1
        else:
            self._counters.evicted_lost += 1
        self._release_hbm(entry)
        if entry.stored is None:
            del self._entries[entry.user_id]
        elif entry.stored.length < len(entry.tokens):
            entry.tokens = entry.tokens.slice(0, entry.stored.length)  # the copy is of the sequence before it grew

    def _forget(self, entry: Entry) -> None:
        """Drop the DRAM copy; with it the entry, unless it is in HBM."""
        self._counters.forgotten += 1
        self.release_dram(entry)
        if entry.region is None:
            self.reloads.forgotten()
            del self._entries[entry.user_id]

    def _release_hbm(self, entry: Entry) -> None:
        assert entry.extent is not None
        extent, entry.extent, entry.region = entry.extent, None, None
        self.note(entry)
        self.hbm.free(extent)

    def _eviction_ms(self, entry: Entry) -> float:
        """What its next user pays if the entry leaves HBM, or is not brought back to it: what the copy does not hold, a
        reload, and at the risk that the copy is forgotten before, the rest.
        """
        recompute = self._predict_ms(len(entry.tokens))
        if entry.stored is None or entry.spill is not None:
            return max(MIN_COST_MS, recompute)
        copied = recompute if entry.clean else self._predict_ms(entry.stored.length)
        region = entry.region
        reload = self.reloads.predict_ms(
            self.hbm.size_of(entry.stored.capacity) if region is None else region.storage.nbytes
        )
        return max(MIN_COST_MS, recompute - copied) + reload + self.reloads.risk * max(0.0, copied)

    def _forgetting_ms(self, entry: Entry) -> float:
        """What its next user pays once the entry has left HBM and its copy is gone too."""
        return max(MIN_COST_MS, self._predict_ms(len(entry.tokens) if entry.stored is None else entry.stored.length))
