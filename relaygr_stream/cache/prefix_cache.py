"""The life cycle of prefix KV in two tiers: computed, held, idle, spilled, brought back, forgotten.

All calls come from one thread (the device thread), so a lookup and the pin that follows it are one step. Entries are
found by user; whether an entry serves a request is decided by comparing the token sequences themselves, which is exact
and, at 24 bytes a token, takes microseconds (docs/decisions.md). Knows nothing of requests, deadlines or models.
"""

from __future__ import annotations

from collections.abc import Callable

from relaygr_stream.cache.arena import Extent
from relaygr_stream.cache.copy import CopyEngine
from relaygr_stream.cache.entry import Coverage, Entry, Found
from relaygr_stream.cache.entry_table import CacheCounters, Holdings
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.cache.moves import Moves
from relaygr_stream.cache.storage import Scratch, StorageKind, make_storage
from relaygr_stream.cache.tiers import capacity_for
from relaygr_stream.cache.transit import Transit
from relaygr_stream.errors import CapacityError
from relaygr_stream.models.api import KVLayout, KVRegion, Tokens


class PrefixCache:
    """Entries over an HBM tier and an optional DRAM tier.

    predict_ms(n): predicted device time of inferring n prefix tokens, what an eviction puts at stake. incremental:
    whether the model's K/V of a sequence's beginning stay valid as it grows; if not, only equal sequences match.
    max_stale_tokens: newest behaviours that an entry may lack and yet cover a prefix, as its reader sees to them.
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
        max_stale_tokens: int = 0,
        storage: StorageKind = "exact",
    ) -> None:
        self._incremental = incremental
        self._lag = max_stale_tokens if incremental else 0
        self.counters = CacheCounters()
        self._holdings = Holdings(layout, hbm, dram, make_storage(storage, layout), predict_ms, self.counters)
        self._hbm, self._dram = self._holdings.hbm, self._holdings.dram
        capacity = capacity_for(scratch_tokens)
        self._scratch_bytes = self._hbm.size_of(capacity)
        self._moves = Moves(self._holdings, copier, self.counters, self._scratch_bytes)
        self.transit = Transit(self._holdings, predict_ms, self._moves.copy_out)
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

    def find(self, user_id: str, tokens: Tokens) -> Found:
        """The user's entry and how it relates to this prefix. Changes nothing."""
        entry = self._holdings.get(user_id)
        return entry, Coverage.NONE if entry is None else self.coverage(entry, tokens)

    def coverage(self, entry: Entry, tokens: Tokens) -> Coverage:
        """How the entry's sequence, computed or being computed, relates to this prefix."""
        return entry.coverage(tokens, incremental=self._incremental, lag=self._lag)

    def serves(self, entry: Entry, tokens: Tokens) -> bool:
        """Whether what has been computed of the entry, which covers this prefix, is enough for it by now."""
        return entry.region is not None and 0 < entry.region.length >= len(tokens) - self._lag

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
        return self._moves.copying

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

    def evict(self, entry: Entry) -> None:
        """any state → absent: what it holds, in both tiers, is not to be trusted. Memory that is in use goes back when
        nobody holds it; who waits for the entry finds it `failed`."""
        if not entry.retired:
            self.counters.distrusted += 1
        entry.failed = True
        self._holdings.retire(entry)

    def evict_user(self, user_id: str) -> Entry | None:
        """The same for what the user has; returns it, None if there is nothing."""
        entry = self._holdings.get(user_id)
        if entry is not None:
            self.evict(entry)
        return entry

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

    @property
    def has_dram(self) -> bool:
        """Whether there is a tier behind HBM."""
        return self._dram is not None

    def in_hbm(self, user_id: str) -> bool:
        """Whether the user's entry is in HBM, or on its way there."""
        entry = self._holdings.get(user_id)
        return entry is not None and entry.region is not None

    def warm(self, user_id: str) -> bool:
        """in DRAM → loading, of the user's entry, before anyone asks for it. False (nothing changed) when there is no
        such entry, or when what would have to be evicted for it is worth more."""
        entry = self._holdings.get(user_id)
        if entry is None or entry.region is not None or entry.stored is None:
            return False
        return self._hbm.worth_room(entry, entry.stored.capacity) and self.load(entry, urgent=False)

    def load(self, entry: Entry, *, urgent: bool = True) -> bool:
        """in DRAM → loading. False (nothing changed) when HBM has no room. urgent: before write-backs."""
        return self._moves.load(entry, urgent=urgent)

    def poll(self) -> list[Entry]:
        """Take note of finished copies, start write-backs; returns entries that came, or failed to come (`failed`)."""
        return self._moves.poll()

    # ---- the end, and checking ----

    def close(self) -> None:
        """Finish the copies under way; no others can begin. Raises DeviceError when one does not finish."""
        self._moves.close()

    def check_integrity(self) -> None:
        """Raise CacheCorruption where books and memory disagree. Takes time in proportion to the entries."""
        self._holdings.check_integrity(self._scratch_bytes, self.transit.arriving_bytes)
        self._moves.check_integrity()

    # ---- inside ----

    def _move(self, entry: Entry, old: KVRegion, place: tuple[Extent, KVRegion], tokens: Tokens) -> Entry:
        new = place[1]
        new.copy_from(old, old.length)
        new.length = old.length
        self.counters.extended_by_move += 1
        grown = self._holdings.add(place, entry.user_id, tokens)
        grown.approximate = entry.approximate
        self._holdings.hand_over_copy(entry, grown)
        return grown
