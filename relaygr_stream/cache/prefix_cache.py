"""The life cycle of prefix KV in two tiers: computed, held, idle, spilled, brought back, forgotten.

All calls come from one thread (the device thread), so a lookup and the pin that follows it are one step. Entries are
found by user; whether an entry serves a request is decided by comparing the token sequences themselves, which is exact
and, at 24 bytes a token, takes microseconds (docs/decisions.md). Knows nothing of requests, deadlines or models.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from relaygr_stream.cache.arena import Extent
from relaygr_stream.cache.copy import CopyEngine, CopyTicket
from relaygr_stream.cache.counters import CacheCounters
from relaygr_stream.cache.entry import Coverage, Entry, StoredCopy
from relaygr_stream.cache.holdings import Holdings
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.cache.scratch import Scratch
from relaygr_stream.cache.storage import StorageKind, make_storage
from relaygr_stream.cache.tiers import DramTier, capacity_for
from relaygr_stream.errors import CacheCorruption, CapacityError, DeviceError
from relaygr_stream.models.kv import KVLayout, KVRegion
from relaygr_stream.models.tokens import Tokens

#: Share of HBM that can be had without waiting for a copy: below it, idle entries are written back to DRAM. A quarter
#: keeps copies rare; where that is less than the largest sequence (the scratch region), the latter counts.
RECLAIMABLE_SHARE = 0.25
#: Write-backs under way at once: one being copied, one waiting, so that the copy engine never runs dry between steps.
MAX_SPILLS = 2
#: The cheapest idle entries among which one to write back is looked for. Where all of these have a copy already, there
#: is plenty to evict.
LOOKED_AT = 256


class PrefixCache:
    """Entries over an HBM tier and an optional DRAM tier.

    predict_ms(n): predicted device time of inferring n prefix tokens, what an eviction puts at stake. incremental:
    whether the model's K/V of a sequence's beginning stay valid as it grows; if not, only equal sequences match.
    scratch_tokens: the longest sequence; memory for one full inference of it is set aside.

    storage: the form of copies in DRAM; entries reloaded from one that rounds are `approximate` from then on, with
    whatever is computed on top of them.

    Raises CapacityError when the HBM budget cannot hold that and one entry of the same size, or DRAM not one copy.
    """

    def __init__(
        self,
        layout: KVLayout,
        hbm: TierMemory,
        dram: TierMemory | None,
        copier: CopyEngine,
        predict_ms: Callable[[int], float],
        *,
        scratch_tokens: int,
        incremental: bool = True,
        storage: StorageKind = "exact",
    ) -> None:
        self._layout = layout
        self._copier = copier
        self._incremental = incremental
        self.counters = CacheCounters()
        self._holdings = Holdings(layout, hbm, dram, make_storage(storage, layout), predict_ms, self.counters)
        self._hbm, self._dram = self._holdings.hbm, self._holdings.dram
        self._loading: list[Entry] = []
        self._spilling: list[Entry] = []
        capacity = capacity_for(scratch_tokens)
        self._scratch_bytes = self._hbm.size_of(capacity)
        reserved = self._hbm.allocate(capacity)
        if reserved is None or self._hbm.size < 2 * self._scratch_bytes:
            raise CapacityError(
                f"worker.hbm_bytes = {hbm.arena.size} cannot hold one prefix and one full inference of "
                f"{scratch_tokens} tokens (relay.max_prefix_tokens + relay.max_suffix_tokens): each takes "
                f"{self._scratch_bytes} bytes ({layout.bytes_per_token} a token); set worker.hbm_bytes to at least "
                f"{2 * self._scratch_bytes} or lower relay.max_prefix_tokens"
            )
        self.scratch = Scratch(reserved[1])
        if self._dram is not None and self._dram.size < self._dram.size_of(capacity):
            raise CapacityError(
                f"worker.dram_bytes = {self._dram.size} cannot hold one prefix of {scratch_tokens} tokens "
                f"(relay.max_prefix_tokens + relay.max_suffix_tokens): it takes {self._dram.size_of(capacity)} bytes "
                f"with worker.dram_storage = {storage!r}; set worker.dram_bytes to at least that, to 0 for no DRAM "
                f"tier, or lower relay.max_prefix_tokens"
            )

    # ---- reading ----

    def find(self, user_id: str, tokens: Tokens) -> tuple[Entry | None, Coverage]:
        """The user's entry and how it relates to this prefix. Changes nothing."""
        entry = self._holdings.get(user_id)
        return entry, Coverage.NONE if entry is None else self.coverage(entry, tokens)

    def coverage(self, entry: Entry, tokens: Tokens) -> Coverage:
        """How the entry's sequence, computed or being computed, relates to this prefix."""
        return entry.coverage(tokens, incremental=self._incremental)

    @property
    def pinned_bytes(self) -> int:
        """HBM of entries that are pinned, computing or loading: what cannot be taken back now."""
        return self._hbm.held_bytes

    @property
    def hbm_used(self) -> int:
        """Bytes handed out of the HBM tier, scratch included."""
        return self._hbm.used

    @property
    def dram_used(self) -> int:
        """Bytes handed out of the DRAM tier."""
        return self._dram.used if self._dram else 0

    @property
    def entries(self) -> int:
        """Users with an entry in either tier."""
        return len(self._holdings)

    @property
    def copying(self) -> bool:
        """Copies are under way."""
        return bool(self._loading or self._spilling)

    def nbytes(self, tokens: int) -> int:
        """HBM that a new entry of so many tokens takes."""
        return self._hbm.size_of(capacity_for(tokens))

    def entry_bytes(self, entry: Entry) -> int:
        """HBM that this entry takes, or will take when it is loaded: its region may have been made for more tokens."""
        if entry.extent is not None:
            return entry.extent.size
        assert entry.stored is not None
        return self._hbm.size_of(entry.stored.capacity)

    # ---- computing ----

    def open(self, user_id: str, tokens: Tokens) -> Entry | None:
        """absent → computing: a new entry with room for `tokens`, replacing what the user had.

        None if the memory cannot be had even by evicting every idle entry; the user's old entry may be gone then too.
        """
        place = self._holdings.room(capacity_for(len(tokens)))
        if place is None:
            return None
        self.counters.opened += 1
        return self._holdings.add(place, user_id, tokens)

    def extend(self, entry: Entry, tokens: Tokens) -> Entry | None:
        """ready → computing: `tokens` continue the entry's sequence; what is computed is kept. Returns what to compute:

        the same entry where its region has room; others may go on reading it, for what is computed stays where a
        reader of the old length looks for it; else a new entry in a larger region, into which the computed part was
        copied; the old one stays until nobody holds it. None (nothing changed) without memory.
        """
        assert entry.ready and entry.region is not None
        if len(tokens) <= entry.region.capacity:
            self.counters.extended_in_place += 1
            entry.tokens = tokens
            entry.computing = True
            self._holdings.note(entry)
            return entry
        self.pin(entry)  # it must not be evicted to make room for its own continuation
        place = self._holdings.room(capacity_for(len(tokens)))
        grown = None if place is None else self._move(entry, entry.region, place, tokens)
        self.unpin(entry)
        return grown

    def finish(self, entry: Entry) -> None:
        """computing → pinned or idle: all its tokens are there."""
        assert entry.computing and entry.region is not None and entry.region.length == len(entry.tokens)
        entry.computing = False
        self._holdings.note(entry)
        self._holdings.free_if_retired(entry)

    def cut_short(self, entry: Entry) -> None:
        """computing → pinned or idle with the tokens computed so far, or absent if there are none."""
        assert entry.computing and entry.region is not None
        if not (self._incremental and entry.region.length):
            self.abort(entry)
            return
        self.counters.cut_short += 1
        entry.tokens = entry.tokens.slice(0, entry.region.length)
        self.finish(entry)

    def abort(self, entry: Entry) -> None:
        """computing → absent (or gone once its pins are released): the computation failed."""
        assert entry.computing
        entry.computing = False
        entry.failed = True
        self._holdings.retire(entry)

    # ---- holding ----

    def pin(self, entry: Entry) -> None:
        """Hold the entry: it keeps its HBM until unpinned as often."""
        entry.pins += 1
        self._holdings.note(entry)

    def unpin(self, entry: Entry) -> None:
        """Release one hold."""
        assert entry.pins > 0, "unpinned more often than pinned"
        entry.pins -= 1
        self._holdings.note(entry)
        self._holdings.free_if_retired(entry)

    def pins(self) -> dict[Entry, int]:
        """The entries that are held, and how often."""
        return self._holdings.pins()

    # ---- tiers ----

    def load(self, entry: Entry) -> bool:
        """in DRAM → loading. False (nothing changed) when HBM has no room."""
        assert entry.region is None and entry.stored is not None and self._dram is not None
        place = self._holdings.room(entry.stored.capacity)
        if place is None:
            return False
        entry.extent, entry.region = place
        entry.region.length = entry.stored.length
        entry.load = self._copier.submit(
            entry.region.storage, self._dram.view(entry.stored), urgent=True, convert=self._dram.storage.reload
        )
        self._loading.append(entry)
        self._holdings.note(entry)
        return True

    def poll(self) -> list[Entry]:
        """Take note of finished copies, start write-backs; returns entries that came, or failed to come (`failed`)."""
        arrived = []
        for entry in self._loading[:]:
            if entry.load is not None and (succeeded := self._over(entry.load)) is not None:
                self._loading.remove(entry)
                self._loaded(entry, entry.load, succeeded)
                arrived.append(entry)
        for entry in self._spilling[:]:
            if entry.spill is not None and (succeeded := self._over(entry.spill)) is not None:
                self._spilling.remove(entry)
                self._spilled(entry, succeeded)
        self._write_back()
        return arrived

    # ---- the end, and checking ----

    def close(self) -> None:
        """Finish the copies under way; no others can begin. Raises DeviceError when one does not finish."""
        self._copier.close()

    def check_integrity(self) -> None:
        """Raise CacheCorruption where books and memory disagree. Takes time in proportion to the entries."""
        self._holdings.check_integrity(self._scratch_bytes)
        for entry in self._loading:
            if entry.load is None or entry.region is None or entry.stored is None:
                raise CacheCorruption(f"the entry of {entry.user_id!r} is being loaded, and is {entry.state}")
        for entry in self._spilling:
            if entry.spill is None or entry.region is None or entry.stored is None:
                raise CacheCorruption(f"the entry of {entry.user_id!r} is being spilled, and is {entry.state}")

    # ---- inside ----

    def _move(self, entry: Entry, old: KVRegion, place: tuple[Extent, KVRegion], tokens: Tokens) -> Entry:
        new = place[1]
        for layer in range(self._layout.layers):
            for target, source in zip(new.layer(layer), old.layer(layer), strict=True):
                target[:, : old.length].copy_(source[:, : old.length])
        new.length = old.length
        self.counters.extended_by_move += 1
        grown = self._holdings.add(place, entry.user_id, tokens)
        grown.approximate = entry.approximate
        self._holdings.hand_over_copy(entry, grown)
        return grown

    def _over(self, ticket: CopyTicket) -> bool | None:
        """None: still copying; else whether it succeeded."""
        try:
            return True if ticket.done() else None
        except DeviceError:
            self.counters.copy_failures += 1
            return False

    def _loaded(self, entry: Entry, ticket: CopyTicket, succeeded: bool) -> None:
        assert entry.region is not None and self._dram is not None
        entry.load = None
        if succeeded:
            entry.approximate = self._dram.storage.approximate
            self.counters.loaded += 1
            self.counters.loaded_bytes += entry.region.storage.nbytes
            self._holdings.reloads.reloaded(entry.region.storage.nbytes, ticket.seconds)
            self._holdings.note(entry)
            self._holdings.free_if_retired(entry)
        else:
            entry.failed = True
            self._holdings.retire(entry)

    def _spilled(self, entry: Entry, succeeded: bool) -> None:
        assert entry.stored is not None
        entry.spill = None
        if succeeded:
            self.counters.spilled += 1
            self.counters.spilled_bytes += entry.stored.extent.size
            self._holdings.note(entry)
        else:
            entry.unspillable = True
            self._holdings.release_dram(entry)
        self._holdings.free_if_retired(entry)

    def _write_back(self) -> None:
        """Keep RECLAIMABLE_SHARE of HBM free or idle with a DRAM copy, cheapest entries first."""
        enough = max(RECLAIMABLE_SHARE * self._hbm.size, self._scratch_bytes)
        if self._dram is None or len(self._spilling) >= MAX_SPILLS or self._hbm.reclaimable_bytes >= enough:
            return
        if self._dram.full:
            return
        cheapest = islice(self._hbm.cheapest(), LOOKED_AT)
        dirty = (entry for entry in cheapest if not (entry.clean or entry.unspillable))
        for entry in list(islice(dirty, MAX_SPILLS - len(self._spilling))):
            self._start_spill(entry, self._dram)

    def _start_spill(self, entry: Entry, dram: DramTier) -> None:
        """idle → spilling; stays idle when DRAM has no room now even after forgetting other copies."""
        assert entry.region is not None
        if entry.stored is not None:
            self._holdings.release_dram(entry)  # of the sequence before it grew
        extent = self._holdings.dram_room(entry.region.capacity)
        if extent is None:
            return
        entry.stored = StoredCopy(extent, entry.region.capacity, entry.region.length)
        entry.spill = self._copier.submit(dram.view(entry.stored), entry.region.storage, convert=dram.storage.spill)
        self._spilling.append(entry)
        self._holdings.note(entry)
