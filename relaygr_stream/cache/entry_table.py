"""The table of entries by user, and the memory that they hold in both tiers.

A newer entry of the same user retires the older one. A retired entry cannot be found, and its memory is freed when no
pin, copy or lease holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from relaygr_stream.cache.arena import Extent
from relaygr_stream.cache.entry import Entry, Source, StoredCopy
from relaygr_stream.cache.fading import CostAwarePolicy
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.cache.tiers import DramTier, HbmTier, MakePolicy
from relaygr_stream.errors import CacheCorruption
from relaygr_stream.models.api import Tokens
from relaygr_stream.models.kv import KVLayout, KVRegion


@dataclass
class CacheCounters:
    """Running totals of the cache's events. The field names are metric names."""

    opened: int = 0
    extended_in_place: int = 0
    extended_by_move: int = 0
    cut_short: int = 0  # prefills that no request needed any more; the computed part stays
    evicted_clean: int = 0
    evicted_lost: int = 0  # evicted from HBM without a DRAM copy
    spilled: int = 0
    spilled_bytes: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    distrusted: int = 0  # evicted from both tiers because an audit deviated or scores were not finite
    forgotten: int = 0  # evicted from DRAM to make room there
    erased: int = 0  # evicted from both tiers because their user was erased
    copy_failures: int = 0
    restored: int = 0  # found again in the tier's file after a restart
    damaged: int = 0  # of those, evicted because their bytes have another digest
    no_room: int = 0  # HBM allocations that failed even after eviction

    def as_dict(self) -> dict[str, int]:
        """Name → total."""
        return dict(vars(self))


#: The least cost of an entry: predicted costs are fitted and may be 0, but the eviction order needs a positive cost.
MIN_COST_MS = 1e-3


#: Predicted device time of recomputing so many tokens, in milliseconds.
PredictMs = Callable[[int], float]


class EntryTable:
    """The entries of both tiers. predict_ms(n): predicted device time of recomputing n tokens.

    Evicting costs a recomputation, in either tier: a copy in DRAM may be evicted before it is needed.
    """

    def __init__(
        self,
        layout: KVLayout,
        hbm: TierMemory,
        dram: TierMemory | None,
        predict_ms: PredictMs,
        counters: CacheCounters,
        policy: MakePolicy = CostAwarePolicy,
    ) -> None:
        self._predict_ms = predict_ms
        self._counters = counters
        self.by_user: Final[dict[str, Entry]] = {}  # the entries, but retired ones; only the table changes it
        self._retired: set[Entry] = set()
        self.hbm = HbmTier(layout, hbm, self._hbm_eviction_ms, policy, last_tier=dram is None)
        self.dram = None if dram is None else DramTier(layout, dram, self._dram_eviction_ms, policy)

    def __len__(self) -> int:
        return len(self.by_user)

    def users(self) -> list[str]:
        """The ids of the users who have an entry, those with a retired one included."""
        return list({entry.user_id for entry in self.everyone()})

    def everyone(self) -> list[Entry]:
        """All entries, those included that are retired and still have a holder."""
        return [*self.by_user.values(), *self._retired]

    def add(self, place: tuple[Extent, KVRegion], user_id: str, tokens: Tokens, source: Source) -> Entry:
        """Add a new entry of the user in this memory, state computing, and retire the user's former entry."""
        entry = Entry(user_id, tokens, source)
        entry.extent, entry.region = place
        entry.computing = True
        self._replace(entry)
        return entry

    def add_stored(self, copy: StoredCopy, user_id: str, tokens: Tokens, source: Source = Source.SIGNAL) -> Entry:
        """Add a new entry of the user that is in DRAM, and retire the user's former entry.

        From another worker, which serves what signals asked for, it comes as theirs: no ranking alone replaces it.
        """
        entry = Entry(user_id, tokens, source)
        entry.stored = copy
        self._replace(entry)
        return entry

    def note(self, entry: Entry) -> None:
        """Update both tiers' accounts after a change of the entry."""
        used = self.hbm.note(entry)
        if self.dram is not None:
            self.dram.note(entry, used=used)

    def retire(self, entry: Entry) -> None:
        """Remove the entry from the table. Its memory is freed now, or when its last holder releases it."""
        if self.by_user.get(entry.user_id) is entry:
            del self.by_user[entry.user_id]
        entry.retired = True
        self._retired.add(entry)
        if self.dram is not None and self.dram.kept is not None and entry.stored is not None:
            self.dram.kept.file.disown(entry.stored.extent, lasting=entry.erased)
        self.note(entry)
        self.free_if_retired(entry)

    def free_if_retired(self, entry: Entry) -> None:
        """Free a retired entry's memory if it has no holder left. Call it after every release."""
        if not entry.retired or entry.held or entry.spill or entry.leases:
            return
        if entry.extent is not None:
            self._release_hbm(entry)
        if entry.stored is not None:
            self.release_dram(entry)
        self._retired.discard(entry)

    def allocate_hbm(self, capacity: int) -> tuple[Extent, KVRegion] | None:
        """Allocate HBM for `capacity` tokens; evicts idle entries if necessary. None if there is no room."""
        place = self.hbm.allocate(capacity)
        if place is None:
            for entry in self.hbm.victims(capacity):
                self.evict_from_hbm(entry)
            place = self.hbm.allocate(capacity)
        if place is None:
            self._counters.no_room += 1
        return place

    def allocate_dram(self, capacity: int) -> Extent | None:
        """Allocate DRAM for a copy of a `capacity`-token region; evicts other copies if necessary. None if no room."""
        assert self.dram is not None
        extent = self.dram.allocate(capacity)
        if extent is None:
            for entry in self.dram.victims(capacity):
                self.evict_from_dram(entry)
            extent = self.dram.allocate(capacity)
        self.dram.full = extent is None
        return extent

    def release_dram(self, entry: Entry) -> None:
        """Free the entry's DRAM copy."""
        assert self.dram is not None and entry.stored is not None
        copy, entry.stored = entry.stored, None
        self.note(entry)
        self.dram.free(copy, erased=entry.erased)

    def hand_over_copy(self, old: Entry, new: Entry) -> None:
        """Move the old entry's DRAM copy to the new entry, whose longer sequence begins with the old one."""
        if old.stored is not None and old.spill is None and not old.leases:
            new.stored, old.stored = old.stored, None
            self.note(old)
            self.note(new)
            if self.dram is not None and self.dram.kept is not None:
                self.dram.kept.file.own_again(new.stored.extent)

    def pins(self) -> dict[Entry, int]:
        """The pinned entries and their numbers of pins."""
        return {entry: entry.pins for entry in self.everyone() if entry.pins}

    def check_integrity(self, scratch_bytes: int, reserved_bytes: int) -> None:
        """Raise CacheCorruption if accounts and memory disagree. reserved_bytes: DRAM of reservations."""
        everyone = self.everyone()
        self.hbm.check_integrity(everyone, scratch_bytes)
        if self.dram is not None:
            self.dram.check_integrity(everyone, reserved_bytes)
        for entry in everyone:
            if (entry.extent is None) != (entry.region is None):
                raise CacheCorruption(f"{entry} has a region without memory, or memory without a region")
            if entry.retired != (entry in self._retired) or (
                entry.retired and not (entry.held or entry.spill or entry.leases)
            ):
                raise CacheCorruption(f"{entry} is retired and not freed, but has no holder")
            if not entry.retired and (entry.failed or (entry.region is None and entry.stored is None)):
                raise CacheCorruption(f"{entry} is in the table, but has no valid contents")

    def _replace(self, entry: Entry) -> None:
        old = self.by_user.get(entry.user_id)
        if old is not None:
            self.retire(old)
        self.by_user[entry.user_id] = entry
        self.note(entry)

    def evict_from_hbm(self, entry: Entry) -> None:
        """idle → in DRAM (if there is a copy) or absent."""
        if entry.clean:
            self._counters.evicted_clean += 1
        else:
            self._counters.evicted_lost += 1
        self._release_hbm(entry)
        if entry.stored is None:
            del self.by_user[entry.user_id]
        elif entry.stored.length < len(entry.tokens):
            entry.tokens = entry.tokens.slice(0, entry.stored.length)  # the copy is older than the entry's growth

    def evict_from_dram(self, entry: Entry) -> None:
        """Free the DRAM copy; removes the entry too, unless it is in HBM."""
        self._counters.forgotten += 1
        self.release_dram(entry)
        if entry.region is None:
            del self.by_user[entry.user_id]

    def _release_hbm(self, entry: Entry) -> None:
        assert entry.extent is not None
        extent, entry.extent, entry.region = entry.extent, None, None
        self.note(entry)
        self.hbm.free(extent)

    def _hbm_eviction_ms(self, entry: Entry) -> float:
        """Cost of the entry's next use if HBM does not hold it."""
        return max(MIN_COST_MS, self._predict_ms(len(entry.tokens)))

    def _dram_eviction_ms(self, entry: Entry) -> float:
        """Cost of the entry's next use if DRAM does not hold its copy, which may be older than the entry's growth."""
        return max(MIN_COST_MS, self._predict_ms(len(entry.tokens) if entry.stored is None else entry.stored.length))
