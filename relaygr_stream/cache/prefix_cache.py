"""The two tiers of prefix KV, and the life cycle of entries between them.

All calls come from one thread (the device thread), so a lookup and the pin that follows it are one step. Entries are
found by user; whether an entry serves a request is decided by comparing the token sequences themselves, which is exact
and, at 24 bytes a token, takes microseconds (docs/decisions.md). Knows nothing of requests, deadlines or models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import islice

import numpy as np

from relaygr_stream.cache.arena import Extent
from relaygr_stream.cache.copy import CopyEngine
from relaygr_stream.cache.entry import Coverage, Entry, StoredCopy
from relaygr_stream.cache.eviction import CostAwarePolicy
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.errors import CacheCorruption, CapacityError, DeviceError
from relaygr_stream.models.kv import KVLayout, KVRegion
from relaygr_stream.models.tokens import Tokens

#: Regions hold a multiple of this many tokens. Half of it is lost per entry (1.6 % at 2048 tokens); the slack lets a
#: returning user's few new behaviours be appended in place.
GRANULE_TOKENS = 64
#: Share of HBM that can be reclaimed without waiting for a copy: below it, idle entries are written back to DRAM.
#: A quarter holds the largest prefix of any allowed budget at least once (see min_bytes) and keeps copies rare.
RECLAIMABLE_SHARE = 0.25
#: Write-backs under way at once: one being copied, one waiting, so that the copy engine never runs dry between steps.
MAX_SPILLS = 2


#: Predicted costs are fitted and may come out as nothing; an entry is never worth nothing.
MIN_COST_MS = 1e-3


@dataclass
class CacheCounters:
    """Running totals."""

    opened: int = 0
    extended_in_place: int = 0
    extended_by_move: int = 0
    evicted_clean: int = 0
    evicted_lost: int = 0  # given up without a DRAM copy
    spilled: int = 0
    spilled_bytes: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    forgotten: int = 0  # dropped from DRAM to make room there
    copy_failures: int = 0
    no_room: int = 0  # allocations that failed even after eviction

    def as_dict(self) -> dict[str, int]:
        """Name → total."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def capacity_for(tokens: int) -> int:
    """Region capacity for so many tokens: the next multiple of the granule."""
    return max(1, -(-tokens // GRANULE_TOKENS)) * GRANULE_TOKENS


class PrefixCache:
    """Entries over an HBM tier and an optional DRAM tier.

    cost_ms(n): predicted device time of inferring n prefix tokens, what an eviction puts at stake.
    """

    def __init__(
        self,
        layout: KVLayout,
        hbm: TierMemory,
        dram: TierMemory | None,
        copier: CopyEngine,
        cost_ms: Callable[[int], float],
        *,
        incremental: bool = True,
    ) -> None:
        self._layout = layout
        self._hbm = hbm
        self._dram = dram
        self._copier = copier
        self._predict_ms = cost_ms
        self._incremental = incremental
        self._entries: dict[str, Entry] = {}
        self._retired: set[Entry] = set()
        self._by_extent: dict[Extent, Entry] = {}
        self._hbm_policy: CostAwarePolicy[Entry] = CostAwarePolicy()
        self._dram_policy: CostAwarePolicy[Entry] = CostAwarePolicy()
        self._loading: list[Entry] = []
        self._spilling: list[Entry] = []
        self._scratch: dict[Extent, KVRegion] = {}
        self._reserved: KVRegion | None = None
        self._pinned_bytes = 0
        self._clean_idle_bytes = 0
        self.counters = CacheCounters()

    # ---- reading ----

    def find(self, user_id: str, tokens: Tokens) -> tuple[Entry | None, Coverage]:
        """The user's entry and how it relates to this prefix. Changes nothing."""
        entry = self._entries.get(user_id)
        return entry, Coverage.NONE if entry is None else self.coverage(entry, tokens)

    def coverage(self, entry: Entry, tokens: Tokens) -> Coverage:
        """How the entry's sequence, computed or being computed, relates to this prefix."""
        held, wanted = entry.tokens.array, tokens.array
        shared = min(held.shape[1], wanted.shape[1])
        if not shared or not np.array_equal(held[:, :shared], wanted[:, :shared]):
            return Coverage.NONE
        if held.shape[1] == wanted.shape[1]:
            return Coverage.COVERS
        if not self._incremental:
            return Coverage.NONE
        return Coverage.COVERS if held.shape[1] > wanted.shape[1] else Coverage.PREFIX

    @property
    def pinned_bytes(self) -> int:
        """HBM of entries that are pinned, computing or loading: what cannot be taken back now."""
        return self._pinned_bytes

    @property
    def hbm_used(self) -> int:
        """Bytes handed out of the HBM tier, scratch included."""
        return self._hbm.arena.used

    @property
    def dram_used(self) -> int:
        """Bytes handed out of the DRAM tier."""
        return self._dram.arena.used if self._dram else 0

    @property
    def entries(self) -> int:
        """Users with an entry in either tier."""
        return len(self._entries)

    def nbytes(self, tokens: int) -> int:
        """HBM that an entry of so many tokens takes."""
        return self._layout.nbytes(capacity_for(tokens))

    # ---- computing ----

    def open(self, user_id: str, tokens: Tokens) -> Entry | None:
        """absent → computing: a new entry with room for `tokens`, replacing what the user had.

        None if the memory cannot be had even by evicting every idle entry; the user's old entry then stays.
        """
        region = self._allocate(len(tokens))
        if region is None:
            return None
        old = self._entries.get(user_id)
        if old is not None:
            self._retire(old)
        entry = Entry(user_id, tokens)
        entry.extent, entry.region = region
        entry.computing = True
        self._entries[user_id] = entry
        self._by_extent[entry.extent] = entry
        self._pinned_bytes += entry.extent.size
        self.counters.opened += 1
        return entry

    def extend(self, entry: Entry, tokens: Tokens) -> bool:
        """ready → computing: `tokens` continues the entry's sequence; the computed part is kept.

        In place when the region has room, else moved to a larger one. False (nothing changed) without memory. Others
        may keep reading the entry meanwhile: what is computed stays where a reader of the old length looks for it,
        unless the entry had to move, which is refused while others hold it.
        """
        assert entry.ready and entry.region is not None and entry.extent is not None
        with _Rebook(self, entry):
            if len(tokens) > entry.region.capacity:
                if entry.spill is not None or not self._move(entry, len(tokens)):
                    return False
                self.counters.extended_by_move += 1
            else:
                self.counters.extended_in_place += 1
            entry.tokens = tokens
            entry.computing = True
        return True

    def finish(self, entry: Entry) -> None:
        """computing → pinned or idle: all its tokens are there."""
        assert entry.computing and entry.region is not None and entry.region.length == len(entry.tokens)
        with _Rebook(self, entry):
            entry.computing = False

    def abort(self, entry: Entry) -> None:
        """computing → absent (or gone once its pins are released): the computation failed or nobody wants it."""
        assert entry.computing
        with _Rebook(self, entry):
            entry.computing = False
        entry.failed = True
        self._retire(entry)

    # ---- holding ----

    def pin(self, entry: Entry) -> None:
        """Hold the entry: it keeps its HBM until unpinned as often."""
        with _Rebook(self, entry):
            entry.pins += 1
        if entry.ready:
            self._hbm_policy.touch(entry)

    def unpin(self, entry: Entry) -> None:
        """Release one hold."""
        assert entry.pins > 0, "unpinned more often than pinned"
        with _Rebook(self, entry):
            entry.pins -= 1
        self._free_if_retired(entry)

    # ---- tiers ----

    def load(self, entry: Entry) -> bool:
        """in DRAM → loading. False (nothing changed) when HBM has no room."""
        assert entry.region is None and entry.stored is not None and self._dram is not None
        stored = entry.stored
        allocated = self._allocate_capacity(stored.capacity)
        if allocated is None:
            return False
        self._dram_policy.remove(entry)  # being read: must not be forgotten under the copy
        with _Rebook(self, entry):
            entry.extent, entry.region = allocated
            entry.region.length = stored.length
            self._by_extent[entry.extent] = entry
            source = self._dram.view(stored.extent, self._layout.dtype)
            source = source[: entry.region.storage.numel()]
            entry.load = self._copier.submit(entry.region.storage, source, urgent=True)
        self._loading.append(entry)
        return True

    def poll(self) -> list[Entry]:
        """Take note of finished copies; returns the entries that came (ready) or failed to come (gone)."""
        self._loading, arrived = self._settle(self._loading, self._loaded)
        self._spilling, _ = self._settle(self._spilling, self._spilled)
        self._write_back()
        return arrived

    @property
    def copying(self) -> bool:
        """Copies are under way."""
        return bool(self._loading or self._spilling)

    # ---- scratch ----

    def reserve_scratch(self, tokens: int) -> None:
        """Set memory for one full inference of `tokens` aside, at start. CapacityError when the budget cannot hold
        that and one entry of the same size."""
        allocated = self._allocate(tokens)
        size = self.nbytes(tokens)
        if allocated is None or self._hbm.arena.free_bytes < size:
            raise CapacityError(
                f"worker.hbm_bytes = {self._hbm.arena.size} cannot hold one prefix and one full inference of "
                f"relay.max_prefix_tokens = {tokens} tokens: each takes {size} bytes "
                f"({self._layout.bytes_per_token} a token); set worker.hbm_bytes to at least {2 * size} "
                f"or lower relay.max_prefix_tokens"
            )
        self._reserved = allocated[1]
        self._scratch[allocated[0]] = allocated[1]

    @property
    def scratch_free(self) -> bool:
        """The scratch region is not lent."""
        return self._reserved is not None

    def borrow(self) -> KVRegion:
        """The scratch region, empty; only while it is free."""
        region, self._reserved = self._reserved, None
        assert region is not None, "the scratch region is lent"
        region.length = 0
        return region

    def give_back(self, region: KVRegion) -> None:
        """Return what `borrow` lent."""
        assert self._reserved is None
        self._reserved = region

    # ---- shutting down and checking ----

    def close(self) -> None:
        """Wait for copies under way and let go of everything."""
        for entry in [*self._loading, *self._spilling]:
            ticket = entry.load or entry.spill
            if ticket is not None:
                try:
                    ticket.wait()
                except DeviceError:
                    self.counters.copy_failures += 1
        self._copier.close()

    def check_integrity(self) -> None:
        """Raise CacheCorruption where books and memory disagree."""
        self._hbm.arena.check_integrity()
        held = sum(extent.size for extent in [*self._by_extent, *self._scratch])
        if held != self._hbm.arena.used:
            raise CacheCorruption(f"HBM: entries and scratch hold {held} bytes, the arena lent {self._hbm.arena.used}")
        everyone = [*self._entries.values(), *self._retired]
        pinned = sum(e.extent.size for e in everyone if e.extent and (e.pins or e.computing or e.load))
        if pinned != self._pinned_bytes:
            raise CacheCorruption(f"pinned bytes are {pinned}, booked {self._pinned_bytes}")
        clean = sum(e.extent.size for e in everyone if e.extent and e.evictable and self._loses_nothing(e))
        if clean != self._clean_idle_bytes:
            raise CacheCorruption(f"reclaimable bytes are {clean}, booked {self._clean_idle_bytes}")
        if self._dram is not None:
            self._dram.arena.check_integrity()
            stored = sum(e.stored.extent.size for e in everyone if e.stored)
            if stored != self._dram.arena.used:
                raise CacheCorruption(f"DRAM: entries hold {stored} bytes, the arena lent {self._dram.arena.used}")
        for entry in everyone:
            if (entry.extent is None) != (entry.region is None):
                raise CacheCorruption(f"entry of {entry.user_id!r} has a region without memory or the reverse")
            if entry.evictable != (entry in self._hbm_policy):
                raise CacheCorruption(f"entry of {entry.user_id!r} is {entry.state}, eviction thinks otherwise")

    # ---- inside: memory ----

    def _allocate(self, tokens: int) -> tuple[Extent, KVRegion] | None:
        return self._allocate_capacity(capacity_for(tokens))

    def _allocate_capacity(self, capacity: int) -> tuple[Extent, KVRegion] | None:
        nbytes = self._layout.nbytes(capacity)
        extent = self._hbm.arena.allocate(nbytes)
        if extent is None:
            self._evict_for(nbytes)
            extent = self._hbm.arena.allocate(nbytes)
        if extent is None:
            self.counters.no_room += 1
            return None
        return extent, KVRegion(self._layout, self._hbm.view(extent, self._layout.dtype), capacity)

    def _evict_for(self, nbytes: int) -> None:
        """Free the cheapest run of neighbouring idle entries that makes a hole of nbytes: written-back ones if they
        suffice, else any."""
        for only_clean in (True, False):
            evictable = {
                extent: self._hbm_policy.value(entry)
                for extent, entry in self._by_extent.items()
                if entry.evictable and (not only_clean or self._loses_nothing(entry))
            }
            window = self._hbm.arena.cheapest_window(nbytes, evictable)
            if window is not None:
                for extent in window:
                    self._evict(self._by_extent[extent])
                return

    def _evict(self, entry: Entry) -> None:
        """idle → in DRAM (if a copy is there) or absent."""
        if entry.clean:
            self.counters.evicted_clean += 1
        else:
            self.counters.evicted_lost += 1
        self._release_hbm(entry)
        if entry.stored is None:
            self._entries.pop(entry.user_id, None)
        elif entry.stored.length < len(entry.tokens):
            entry.tokens = entry.tokens.slice(0, entry.stored.length)  # the copy is of the sequence before it grew

    def _release_hbm(self, entry: Entry) -> None:
        assert entry.extent is not None
        with _Rebook(self, entry):
            del self._by_extent[entry.extent]
            self._hbm.arena.free(entry.extent)
            entry.extent = entry.region = None

    def _move(self, entry: Entry, tokens: int) -> bool:
        assert entry.region is not None and entry.extent is not None
        if entry.pins:
            return False
        # The entry itself must not be evicted to make room for its own continuation.
        entry.pins += 1
        self._hbm_policy.discard(entry)
        allocated = self._allocate(tokens)
        entry.pins -= 1
        if allocated is None:
            return False
        extent, region = allocated
        old, n = entry.region, entry.region.length
        for layer in range(self._layout.layers):
            for target, source in zip(region.layer(layer), old.layer(layer), strict=True):
                target[:, :n].copy_(source[:, :n])
        region.length = n
        del self._by_extent[entry.extent]
        self._hbm.arena.free(entry.extent)
        entry.extent, entry.region = extent, region
        self._by_extent[extent] = entry
        return True

    # ---- inside: tiers ----

    def _settle(self, waiting: list[Entry], then: Callable[[Entry, bool], None]) -> tuple[list[Entry], list[Entry]]:
        still, done = [], []
        for entry in waiting:
            ticket = entry.load or entry.spill
            assert ticket is not None
            try:
                finished, succeeded = ticket.done(), True
            except DeviceError:
                finished, succeeded = True, False
                self.counters.copy_failures += 1
            if finished:
                then(entry, succeeded)
                done.append(entry)
            else:
                still.append(entry)
        return still, done

    def _loaded(self, entry: Entry, succeeded: bool) -> None:
        assert entry.region is not None
        with _Rebook(self, entry):
            entry.load = None
        if succeeded:
            self.counters.loaded += 1
            self.counters.loaded_bytes += entry.region.storage.nbytes
            if entry.stored is not None:
                self._dram_policy.add(entry, entry.stored.extent.size, self._cost_ms(entry))
        else:
            entry.failed = True
            self._retire(entry)
        self._free_if_retired(entry)

    def _spilled(self, entry: Entry, succeeded: bool) -> None:
        assert entry.stored is not None
        with _Rebook(self, entry):
            entry.spill = None
            if not succeeded:
                self._release_dram(entry)
        if succeeded:
            self.counters.spilled += 1
            self.counters.spilled_bytes += entry.stored.extent.size
            if entry.stored.length < len(entry.tokens):
                self._forget(entry)  # extended meanwhile: the copy is of an older sequence
            else:
                self._dram_policy.add(entry, entry.stored.extent.size, self._cost_ms(entry))
        self._free_if_retired(entry)

    def _write_back(self) -> None:
        """Keep RECLAIMABLE_SHARE of HBM free or idle with a DRAM copy, cheapest entries first."""
        if self._dram is None or len(self._spilling) >= MAX_SPILLS:
            return
        enough = RECLAIMABLE_SHARE * self._hbm.arena.size
        if self._hbm.arena.free_bytes + self._clean_idle_bytes >= enough:
            return
        dirty = (entry for entry in self._hbm_policy.cheapest() if not entry.clean)
        for entry in list(islice(dirty, MAX_SPILLS - len(self._spilling))):
            if not self._start_spill(entry):
                return

    def _start_spill(self, entry: Entry) -> bool:
        """idle → spilling. False when DRAM has no room even after forgetting cheaper copies."""
        assert self._dram is not None and entry.region is not None and entry.extent is not None
        if entry.stored is not None:
            self._forget(entry)
        size = entry.extent.size
        extent = self._dram.arena.allocate(size)
        if extent is None:
            self._forget_for(size)
            extent = self._dram.arena.allocate(size)
        if extent is None:
            return False
        target = self._dram.view(extent, self._layout.dtype)[: entry.region.storage.numel()]
        with _Rebook(self, entry):
            entry.stored = StoredCopy(extent, entry.region.capacity, entry.region.length)
            entry.spill = self._copier.submit(target, entry.region.storage)
        self._spilling.append(entry)
        return True

    def _forget_for(self, nbytes: int) -> None:
        assert self._dram is not None
        copies = {
            entry.stored.extent: entry
            for entry in self._entries.values()
            if entry.stored and entry in self._dram_policy
        }
        window = self._dram.arena.cheapest_window(
            nbytes, {extent: self._dram_policy.value(entry) for extent, entry in copies.items()}
        )
        for extent in window or ():
            self._forget(copies[extent])
            self.counters.forgotten += 1

    def _forget(self, entry: Entry) -> None:
        """Drop the DRAM copy; with it the entry, unless it is in HBM."""
        with _Rebook(self, entry):
            self._release_dram(entry)
        if entry.region is None:
            self._entries.pop(entry.user_id, None)

    def _release_dram(self, entry: Entry) -> None:
        assert self._dram is not None and entry.stored is not None
        self._dram_policy.discard(entry)
        self._dram.arena.free(entry.stored.extent)
        entry.stored = None

    # ---- inside: life cycle ----

    def _retire(self, entry: Entry) -> None:
        """Take the entry out of sight; its memory goes back once nobody holds it."""
        if self._entries.get(entry.user_id) is entry:
            del self._entries[entry.user_id]
        entry.retired = True
        self._retired.add(entry)
        self._free_if_retired(entry)

    def _free_if_retired(self, entry: Entry) -> None:
        if not entry.retired or entry.pins or entry.computing or entry.load or entry.spill:
            return
        if entry.extent is not None:
            self._release_hbm(entry)
        if entry.stored is not None:
            self._release_dram(entry)
        self._retired.discard(entry)

    def _cost_ms(self, entry: Entry) -> float:
        return max(MIN_COST_MS, self._predict_ms(len(entry.tokens)))

    def _loses_nothing(self, entry: Entry) -> bool:
        return self._dram is None or entry.clean

    def _book(self, entry: Entry, sign: int) -> None:
        """Add (+1) or take out (-1) what an entry counts for in the running sums and the eviction order."""
        if entry.extent is None:
            return
        size = entry.extent.size
        if entry.pins or entry.computing or entry.load:
            self._pinned_bytes += sign * size
        elif entry.evictable and self._loses_nothing(entry):
            self._clean_idle_bytes += sign * size
        if sign > 0 and entry.evictable and entry not in self._hbm_policy:
            self._hbm_policy.add(entry, size, self._cost_ms(entry))
        elif sign > 0 and not entry.evictable:
            self._hbm_policy.discard(entry)


class _Rebook:
    """Around every change of an entry's place: take it out of the books, put it back as it is then."""

    def __init__(self, cache: PrefixCache, entry: Entry) -> None:
        self._cache = cache
        self._entry = entry

    def __enter__(self) -> None:
        self._cache._book(self._entry, -1)

    def __exit__(self, *_: object) -> None:
        self._cache._book(self._entry, +1)
        if self._entry.extent is None:
            self._cache._hbm_policy.discard(self._entry)
