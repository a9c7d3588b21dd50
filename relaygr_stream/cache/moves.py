"""Copies of entries between the tiers: reloads that are asked for, write-backs that keep HBM easy to clear.

Changes an entry's place, as prefix_cache.py does, whose other half this is. Knows nothing of why an entry is needed.
"""

from __future__ import annotations

from itertools import islice

from relaygr_stream.cache.copy import CopyEngine, CopyTicket
from relaygr_stream.cache.entry import Entry, StoredCopy
from relaygr_stream.cache.entry_table import CacheCounters, Holdings
from relaygr_stream.cache.tiers import DramTier
from relaygr_stream.errors import CacheCorruption, DeviceError

#: Share of HBM that can be had without waiting for a copy: below it, idle entries are written back to DRAM. A quarter
#: keeps copies rare; where that is less than the largest sequence (the scratch region), the latter counts.
RECLAIMABLE_SHARE = 0.25
#: Write-backs under way at once: one being copied, one waiting, so that the copy engine never runs dry between steps.
MAX_SPILLS = 2
#: The cheapest idle entries among which one to write back is looked for. Where all of these have a copy already, there
#: is plenty to evict.
LOOKED_AT = 256


class Moves:
    """Copies under way. least_bytes: so much of HBM at least is kept free, or idle with a DRAM copy."""

    def __init__(self, holdings: Holdings, copier: CopyEngine, counters: CacheCounters, least_bytes: int) -> None:
        self._holdings = holdings
        self._hbm, self._dram = holdings.hbm, holdings.dram
        self._copier = copier
        self._counters = counters
        self._enough_bytes = max(RECLAIMABLE_SHARE * self._hbm.size, least_bytes)
        self._loading: list[Entry] = []
        self._spilling: list[Entry] = []

    @property
    def copying(self) -> bool:
        """Copies are under way."""
        return bool(self._loading or self._spilling)

    def load(self, entry: Entry, *, urgent: bool = True) -> bool:
        """in DRAM → loading. False (nothing changed) when HBM has no room. urgent: before write-backs."""
        assert entry.region is None and entry.stored is not None and self._dram is not None
        place = self._holdings.room(entry.stored.capacity)
        if place is None:
            return False
        entry.extent, entry.region = place
        entry.region.length = entry.stored.length
        entry.load = self._copier.submit(
            entry.region.storage, self._dram.view(entry.stored), urgent=urgent, convert=self._dram.storage.reload
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
        self.write_back()
        return arrived

    def close(self) -> None:
        """Finish the copies under way; no others can begin. Raises DeviceError when one does not finish."""
        self._copier.close()

    def check_integrity(self) -> None:
        """Raise CacheCorruption where an entry is not being copied as these lists say."""
        for entry in self._loading:
            if entry.load is None or entry.region is None or entry.stored is None:
                raise CacheCorruption(f"{entry} is being loaded, and is {entry.state}")
        for entry in self._spilling:
            if entry.spill is None or entry.region is None or entry.stored is None:
                raise CacheCorruption(f"{entry} is being spilled, and is {entry.state}")

    def _over(self, ticket: CopyTicket) -> bool | None:
        """None: still copying; else whether it succeeded."""
        try:
            return True if ticket.done() else None
        except DeviceError:
            self._counters.copy_failures += 1
            return False

    def _loaded(self, entry: Entry, ticket: CopyTicket, succeeded: bool) -> None:
        assert entry.region is not None and self._dram is not None
        entry.load = None
        if succeeded:
            entry.approximate = self._dram.storage.approximate
            self._counters.loaded += 1
            self._counters.loaded_bytes += entry.region.storage.nbytes
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
            self._counters.spilled += 1
            self._counters.spilled_bytes += entry.stored.extent.size
            self._holdings.note(entry)
        else:
            entry.unspillable = True
            self._holdings.release_dram(entry)
        self._holdings.free_if_retired(entry)

    def write_back(self) -> None:
        """Keep RECLAIMABLE_SHARE of HBM free or idle with a DRAM copy, cheapest entries first."""
        if self._dram is None or self._dram.full or len(self._spilling) >= MAX_SPILLS:
            return
        if self._hbm.reclaimable_bytes >= self._enough_bytes:
            return
        cheapest = islice(self._hbm.cheapest(), LOOKED_AT)
        dirty = (entry for entry in cheapest if not (entry.clean or entry.unspillable or entry.lent))
        for entry in list(islice(dirty, MAX_SPILLS - len(self._spilling))):
            self._start_spill(entry, self._dram)

    def copy_out(self, entry: Entry) -> bool:
        """Have a DRAM copy made of what is ready in HBM, once those under way are. False: DRAM has no room for it."""
        assert self._dram is not None
        if len(self._spilling) >= MAX_SPILLS:
            return True
        self._start_spill(entry, self._dram)
        return entry.spill is not None

    def _start_spill(self, entry: Entry, dram: DramTier) -> None:
        """idle → spilling; stays idle when DRAM has no room now even after forgetting other copies. One that is held
        stays so, and gets its copy meanwhile."""
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
