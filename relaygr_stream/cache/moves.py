"""Copies of entries between the tiers: reloads from DRAM, and write-backs that make HBM entries cheap to evict.

entry.py lists the modules that may change an entry; this is one of them.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from itertools import islice
from typing import Final

import structlog
import torch

from relaygr_stream.cache.copy import Before, CopyEngine, CopyTicket
from relaygr_stream.cache.entry import Entry, StoredCopy
from relaygr_stream.cache.entry_table import CacheCounters, EntryTable
from relaygr_stream.cache.kept import DigestTicket
from relaygr_stream.cache.tiers import DramTier
from relaygr_stream.errors import CacheCorruption, DeviceError
from relaygr_stream.models.api import Tokens
from relaygr_stream.telemetry.limiter import LogLimiter

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: The share of HBM that should be free or evictable without loss; below it, idle entries are written back to DRAM. A
#: quarter keeps copies rare. The size of the largest sequence (the scratch region) is a lower bound.
RECLAIMABLE_SHARE = 0.25
#: Write-backs in progress at once: one copying, one waiting, so that the copy engine is busy between steps.
MAX_SPILLS = 2
#: Time for what is not in the tier's file yet when a worker ends: 2 GB, at the 1 GB/s of a digest.
KEEP_S = 2.0
#: The cheapest idle entries examined for a write-back. If all of them have a copy, there is enough to evict.
MAX_EXAMINED = 256


class Moves:
    """The copies in progress. least_bytes: least HBM to keep free, or idle with a DRAM copy."""

    def __init__(self, table: EntryTable, copier: CopyEngine, counters: CacheCounters, least_bytes: int) -> None:
        self._table = table
        self._hbm, self._dram = table.hbm, table.dram
        self._copier = copier
        self._counters = counters
        self._enough_bytes = max(RECLAIMABLE_SHARE * self._hbm.size, least_bytes)
        self._loading: list[Entry] = []
        self._spilling: list[Entry] = []
        self._kept = None if self._dram is None else self._dram.kept
        if self._kept is not None:
            self._hbm.fresh = deque()
        self._digesting: list[tuple[str, StoredCopy, DigestTicket]] = []
        self._all_clean: tuple[int, ...] = ()  # `_changes` when all that was examined had a copy

    @property
    def copying(self) -> bool:
        """Whether copies are in progress."""
        return bool(self._loading or self._spilling)

    def readable(self, entry: Entry) -> Entry | None:
        """The entry, whose sequence can be read: of an earlier process, it is in the tier's file. None: the disk does
        not give it, and the entry is evicted."""
        if entry.stored is None or entry.stored.unverified is None or self._kept is None:
            return entry
        try:
            self._kept.fetch_tokens(entry.stored)
        except DeviceError as error:
            self._failed("reading the tier's file", error)
            entry.failed = True
            self._table.retire(entry)
            return None
        return entry

    def load(self, entry: Entry) -> bool:
        """in DRAM → loading, before write-backs. Returns False and changes nothing if HBM has no room."""
        assert entry.region is None and entry.stored is not None and self._dram is not None
        place = self._table.allocate_hbm(entry.stored.capacity)
        if place is None:
            return False
        entry.extent, entry.region = place
        entry.region.length = entry.stored.length
        if entry.stored.unverified is None:
            entry.load = self._start_load(entry)
        else:
            entry.load = self._copier.enqueue(self._digest_of(entry.stored), urgent=True)
        self._loading.append(entry)
        self._table.note(entry)
        return True

    def poll(self) -> list[Entry]:
        """Complete finished copies and start write-backs. Returns the entries loaded, or `failed` to load.

        Raises DeviceError where the tier's file was shortened, or had lost pages as a copy ended: none of its copies is
        to be trusted.
        """
        if self._kept is not None and not self._kept.file.whole:  # lost pages cost more to ask for: where copies end
            self._kept.file.check()
        loaded = []
        for entry in self._loading[:]:
            if entry.load is not None and (succeeded := self._outcome(entry.load)) is not None:
                if succeeded and isinstance(entry.load, DigestTicket):
                    if self._verify(entry, entry.load.digest):
                        entry.load = self._start_load(entry)
                        continue
                    succeeded = False
                self._loading.remove(entry)
                self._loaded(entry, succeeded)
                loaded.append(entry)
        for entry in self._spilling[:]:
            if entry.spill is not None and (succeeded := self._outcome(entry.spill)) is not None:
                self._spilling.remove(entry)
                self._spilled(entry, succeeded)
        for item in self._digesting[:]:
            if (succeeded := self._outcome(item[2])) is not None:
                self._digesting.remove(item)
                if succeeded:
                    self._digested(*item)
        if self._dram is not None and self._hbm.fresh:
            self._write_fresh(self._hbm.fresh, self._dram)
        if self._dram is not None and self._hbm.reclaimable_bytes < self._enough_bytes:
            self._write_back(self._dram)
        return loaded

    def keep(self, entry: Entry) -> None:
        """Write the entry's DRAM copy down in the tier's file, if it has one, once its digest is known. A copy of an
        earlier process is verified by it instead, and the entry evicted if it is damaged."""
        copy = entry.stored
        if self._kept is None or copy is None:
            return
        if copy.unverified is None:
            self._kept.write_tokens(copy, entry.tokens)
        elif any(copy is other for _, other, _ in self._digesting):
            return
        ticket = self._digest_of(copy)
        self._copier.compute(ticket)
        self._digesting.append((entry.user_id, copy, ticket))

    @property
    def keeping(self) -> bool:
        """Whether copies are still to be written down."""
        fresh = self._hbm.fresh and not (self._dram is None or self._dram.full)
        return bool(self._digesting or self._spilling or fresh)

    def close(self) -> None:
        """Finish the copies in progress; later copies fail. Raises DeviceError if one does not finish.

        Where copies are kept in a file, what is idle in HBM alone is copied there first, for KEEP_S at most.
        """
        until = time.monotonic() + KEEP_S
        try:
            while self._kept is not None and self.keeping and time.monotonic() < until:
                self.poll()
                time.sleep(1e-3)
        finally:
            self._copier.close()

    def check_integrity(self) -> None:
        """Raise CacheCorruption if an entry in these lists is not being copied."""
        for entry in self._loading:
            if entry.load is None or entry.region is None or entry.stored is None:
                raise CacheCorruption(f"{entry} is in the list of loads, but its state is {entry.state.value}")
        for entry in self._spilling:
            if entry.spill is None or entry.region is None or entry.stored is None:
                raise CacheCorruption(f"{entry} is in the list of spills, but its state is {entry.state.value}")

    def _outcome(self, ticket: CopyTicket) -> bool | None:
        """Whether the copy succeeded; None while it is in progress. Raises DeviceError as `poll`: what it has read of
        the file may not be what was written."""
        try:
            if not ticket.done():
                return None
        except DeviceError as error:
            self._failed("a copy between tiers", error)
            return False
        if self._kept is not None:
            self._kept.file.check()
        return True

    def _failed(self, what: str, error: DeviceError) -> None:
        self._counters.copy_failures += 1
        limited(log.warning, "copy")(f"{what} failed, and is dropped", error=str(error))

    def _digested(self, user_id: str, copy: StoredCopy, ticket: DigestTicket) -> None:
        entry = self._table.by_user.get(user_id)
        if self._dram is None or self._kept is None or entry is None or entry.stored is not copy:
            return  # the copy is gone by now
        if copy.unverified is None:
            self._kept.commit(entry, ticket.digest, self._dram.uses(user_id))
        elif not self._verify(entry, ticket.digest):
            entry.failed = True
            self._table.retire(entry)

    def _verify(self, entry: Entry, digest: bytes) -> bool:
        """Whether the entry's copy of an earlier process has its digest; it may serve from now on."""
        copy = entry.stored
        assert copy is not None
        if copy.unverified not in (None, digest):
            self._counters.damaged += 1
            limited(log.warning, "damaged")(
                "prefix KV in the tier's file are damaged, and dropped", bytes=copy.extent.size
            )
            return False
        copy.unverified = None
        entry.tokens = Tokens(entry.tokens.array.copy())  # they may live longer than the copy
        return True

    def _digest_of(self, copy: StoredCopy) -> DigestTicket:
        assert self._kept is not None
        return DigestTicket(self._kept, copy)

    def _start_load(self, entry: Entry) -> CopyTicket:
        assert self._dram is not None and entry.region is not None and entry.stored is not None
        before = self._fetch_of(entry.stored)
        return self._copier.submit(
            entry.region.storage.view(torch.uint8), self._dram.view(entry.stored), urgent=True, before=before
        )

    def _fetch_of(self, copy: StoredCopy) -> Before | None:
        return None if self._kept is None else partial(self._kept.file.fetch, copy.extent)

    def _loaded(self, entry: Entry, succeeded: bool) -> None:
        assert entry.region is not None
        entry.load = None
        if succeeded:
            self._counters.loaded += 1
            self._counters.loaded_bytes += entry.region.storage.nbytes
            self._table.note(entry)
            self._table.free_if_retired(entry)
        else:
            entry.failed = True
            self._table.retire(entry)

    def _spilled(self, entry: Entry, succeeded: bool) -> None:
        assert entry.stored is not None
        entry.spill = None
        if succeeded:
            self._counters.spilled += 1
            self._counters.spilled_bytes += entry.stored.extent.size
            self._table.note(entry)
            if not entry.retired:
                self.keep(entry)
        else:
            entry.unspillable = True
            self._table.release_dram(entry)
        self._table.free_if_retired(entry)

    def _write_fresh(self, fresh: deque[Entry], dram: DramTier) -> None:
        """Where copies are kept in a file: start those of entries lately idle while DRAM has room without evicting."""
        while fresh and not dram.full and len(self._spilling) < MAX_SPILLS:
            entry = fresh.popleft()
            wanted = entry.evictable and not (entry.clean or entry.unspillable or entry.leases)
            if wanted and entry.region is not None and dram.has_hole(entry.region.capacity):
                self._start_spill(entry, dram)

    def _write_back(self, dram: DramTier) -> None:
        """Start copies of the cheapest idle entries: less than RECLAIMABLE_SHARE of HBM is free or clean."""
        if dram.full or len(self._spilling) >= MAX_SPILLS or self._all_clean == self._changes:
            return
        cheapest = islice(self._hbm.cheapest(), MAX_EXAMINED)
        candidates = (entry for entry in cheapest if not (entry.clean or entry.unspillable or entry.leases))
        dirty = list(islice(candidates, MAX_SPILLS - len(self._spilling)))
        if not dirty:
            self._all_clean = self._changes
        for entry in dirty:
            self._start_spill(entry, dram)

    @property
    def _changes(self) -> tuple[int, ...]:
        """What there was since the start that may bring an entry without a copy among the cheapest."""
        counters = self._counters
        return self._hbm.dirtied, counters.evicted_clean, counters.evicted_lost, counters.erased, counters.distrusted

    def copy_out(self, entry: Entry) -> bool:
        """Start a DRAM copy of an entry that is ready in HBM. Returns False if DRAM has no room.

        Returns True without starting it if MAX_SPILLS are in progress: call again later.
        """
        assert self._dram is not None
        if len(self._spilling) >= MAX_SPILLS:
            return True
        self._start_spill(entry, self._dram)
        return entry.spill is not None

    def _start_spill(self, entry: Entry, dram: DramTier) -> None:
        """idle → spilling; stays idle if DRAM has no room even after evicting other copies.

        A held entry stays held while it is copied.
        """
        assert entry.region is not None
        if entry.stored is not None:
            self._table.release_dram(entry)  # the copy is older than the entry's growth
        extent = self._table.allocate_dram(entry.region.capacity)
        if extent is None:
            return
        entry.stored = StoredCopy(extent, entry.region.capacity, entry.region.length)
        before = self._fetch_of(entry.stored)
        entry.spill = self._copier.submit(
            dram.view(entry.stored), entry.region.storage.view(torch.uint8), before=before
        )
        self._spilling.append(entry)
        self._table.note(entry)
