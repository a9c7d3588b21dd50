"""A cache in use: every call in any order its contract allows, and what must hold after each.

Random machines and the long run draw the operations; `which` picks among what there is, whatever number it is.
"""

from __future__ import annotations

from typing import Literal

import torch

from relaygr_stream.cache.entry import Coverage, Entry, EntryState
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.cache.tier_file import TierFile
from relaygr_stream.cache.tiers import capacity_for
from relaygr_stream.cache.transit import Lease, Reservation
from relaygr_stream.models.api import Tokens
from relaygr_stream.models.kv import KVLayout, KVRegion
from tests.unit.cache.worlds import GRANULE_BYTES, LAYOUT, MOST, Copies, holds, make, sequence, table_of, write

Going = Literal["finish", "part", "cut short", "abort"]


class Play:
    """Users who come back with longer or other sequences, readers who keep what they pinned, copies that fail."""

    def __init__(
        self,
        hbm: int,
        dram: int | None,
        copier: Copies,
        *,
        incremental: bool = True,
        layout: KVLayout = LAYOUT,
        file: TierFile | None = None,
    ) -> None:
        self.copier = copier
        self.cache: PrefixCache = make(hbm, dram, copier, incremental=incremental, layout=layout, file=file)
        self._layout = layout
        self.readers: list[tuple[Entry, KVRegion, Tokens]] = []
        self.leases: list[Lease] = []
        self.reservations: list[Reservation] = []
        self.seen: set[EntryState] = set()
        self._incremental = incremental
        self._budgets = (hbm * GRANULE_BYTES, (dram or 0) * GRANULE_BYTES)

    # ---- what there is ----

    def entries(self) -> list[Entry]:
        """All of them, retired ones too."""
        return table_of(self.cache).everyone()

    def computing(self) -> list[Entry]:
        return [entry for entry in self.entries() if entry.computing]

    # ---- what happens ----

    def request(self, user: int, version: int, length: int, *, at_once: bool) -> None:
        """As a signal or ranking does: find, then the step that fits; a reader keeps a pin on what it found."""
        self._place(user, version, length)
        entry, _ = self.cache.find(f"u{user}", sequence(user, version, length))
        if at_once and entry is not None and entry.computing:
            assert entry.region is not None
            write(entry.region, entry.tokens)
            self.cache.finish(entry)

    def go_on(self, which: int, how: Going, share: float) -> None:
        """Something being computed is finished, goes on by a share of what it lacks, is given up or fails."""
        if not (computing := self.computing()):
            return
        entry = computing[which % len(computing)]
        region = entry.region
        assert region is not None
        if how == "finish":
            write(region, entry.tokens)
            self.cache.finish(entry)
        elif how == "part":
            missing = len(entry.tokens) - region.length
            if missing > 1:
                write(region, entry.tokens.slice(0, region.length + max(1, min(missing - 1, int(share * missing)))))
        elif how == "cut short":
            length = region.length
            self.cache.cut_short(entry)
            if self._incremental and length > 0 and not entry.retired:
                assert entry.ready
                assert len(entry.tokens) == length
        else:
            self.cache.abort(entry)
            assert self.cache.find(entry.user_id, entry.tokens)[0] is not entry

    def pin_what_is_not_ready(self, which: int) -> None:
        busy = [entry for entry in self.entries() if (entry.computing or entry.load) and not entry.retired]
        if busy:
            entry = busy[which % len(busy)]
            self.cache.pin(entry)
            assert entry.region is not None
            view = KVRegion(self._layout, entry.region.storage, entry.region.capacity, 0)
            self.readers.append((entry, view, entry.tokens))

    def let_go(self, which: int) -> None:
        if self.readers:
            self.cache.unpin(self.readers.pop(which % len(self.readers))[0])

    def poll(self, copies: int) -> None:
        """So many copies are made, if that is up to us; the cache looks."""
        self.copier.settle(copies)
        for entry in self.cache.poll():
            assert entry.failed or entry.ready or entry.retired

    def use_scratch(self) -> None:
        region = self.cache.scratch.borrow()
        assert (region.length, region.capacity) == (0, MOST)
        region.storage.fill_(-1.0)
        assert not self.cache.scratch.free
        self.cache.scratch.give_back(region)

    def lend(self, user: int) -> None:
        """Another worker asks for the user's entry."""
        lease = self.cache.transit.lend(f"u{user}")
        if isinstance(lease, Lease):
            self.leases.append(lease)

    def give_back(self, which: int) -> None:
        if self.leases:
            self.cache.transit.give_back(self.leases.pop(which % len(self.leases)))

    def reserve(self, user: int, version: int, length: int) -> None:
        """Another worker offers an entry of the user."""
        if not self._budgets[1]:
            return
        before = self.cache.find(f"u{user}", sequence(user, version, length))
        reservation = self.cache.transit.reserve(f"u{user}", sequence(user, version, length), capacity_for(length))
        if isinstance(reservation, Reservation):
            assert before[1] is not Coverage.COVERS
            self.reservations.append(reservation)

    def arrive(self, which: int, *, whole: bool) -> None:
        """A copy that was expected is there, or breaks off half way."""
        if not self.reservations:
            return
        reservation = self.reservations.pop(which % len(self.reservations))
        region = KVRegion.new(self._layout, reservation.copy.capacity)
        write(region, reservation.tokens)
        reservation.data.copy_(region.storage.view(torch.uint8))
        if not whole:
            reservation.data[len(reservation.data) // 2 :] = 255
            self.cache.transit.discard(reservation)
        elif self.cache.transit.fill(reservation):
            assert self.cache.find(reservation.user_id, reservation.tokens)[1] is Coverage.COVERS

    # ---- what must hold ----

    def check_books(self) -> None:
        self.cache.check_integrity()
        assert self.cache.hbm_used <= self._budgets[0]
        assert self.cache.dram_used <= self._budgets[1]
        held: dict[Entry, int] = {}
        for entry, _, _ in self.readers:
            held[entry] = held.get(entry, 0) + 1
        assert self.cache.pins() == held

    def check_contents(self) -> None:
        """Everyone reads their own: readers, entries in HBM, copies at rest in DRAM."""
        for _, region, tokens in self.readers:
            assert holds(region, tokens.slice(0, region.length))
        for lease in self.leases:
            assert self._stored_holds(lease.data, lease.capacity, lease.tokens)
        for entry in self.entries():
            self.seen.add(entry.state)
            if entry.region is not None and entry.load is None and not entry.failed:
                assert holds(entry.region, entry.tokens)
            if entry.stored is not None and entry.spill is None:
                dram = table_of(self.cache).dram
                assert dram is not None
                tokens = entry.tokens.slice(0, entry.stored.length)
                assert self._stored_holds(dram.view(entry.stored), entry.stored.capacity, tokens)

    def end(self) -> None:
        """Everyone lets go, copies come to rest: nothing is held any more."""
        for entry in self.computing():
            self.cache.abort(entry)
        for entry, _, _ in self.readers:
            self.cache.unpin(entry)
        self.readers.clear()
        for lease in self.leases:
            self.cache.transit.give_back(lease)
        for reservation in self.reservations:
            self.cache.transit.discard(reservation)
        self.leases.clear()
        self.reservations.clear()
        while self.cache.copying:
            self.poll(100)
        self.check_books()
        self.check_contents()
        assert self.cache.pinned_bytes == 0
        assert all(not entry.retired for entry in self.entries())
        self.cache.close()

    # ---- inside ----

    def _stored_holds(self, data: torch.Tensor, capacity: int, tokens: Tokens) -> bool:
        elements = torch.empty(self._layout.elements(capacity))
        elements.view(torch.uint8).copy_(data)
        return holds(KVRegion(self._layout, elements, capacity, len(tokens)), tokens)

    def _place(self, user: int, version: int, length: int) -> None:
        tokens = sequence(user, version, length)
        entry, coverage = self.cache.find(f"u{user}", tokens)
        if entry is not None and coverage is Coverage.COVERS:
            if entry.state is EntryState.DRAM:
                self.cache.load(entry)
            elif entry.ready:
                self._read(entry, tokens)
        elif entry is not None and coverage is Coverage.PREFIX:
            assert self._incremental
            if entry.ready:
                self._extend(entry, tokens)
            elif entry.state is EntryState.DRAM:
                self.cache.load(entry)
        else:
            self.cache.open(f"u{user}", tokens)

    def _extend(self, entry: Entry, tokens: Tokens) -> None:
        old = entry.region
        grown = self.cache.extend(entry, tokens)
        if grown is not None:
            assert grown.region is not None
            assert grown.region.length < len(tokens)
            assert holds(grown.region, tokens)
            assert (grown is entry) == (grown.region is old)

    def _read(self, entry: Entry, tokens: Tokens) -> None:
        self.cache.pin(entry)
        region = entry.region
        assert region is not None
        self.readers.append((entry, KVRegion(self._layout, region.storage, region.capacity, len(tokens)), tokens))
