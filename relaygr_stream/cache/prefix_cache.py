"""The prefix cache: the life cycle of prefix KV in two tiers, from computing to eviction.

All calls come from one thread (the device thread), so a lookup and the pin that follows it are one step. Entries are
found by user. Whether an entry serves a request is decided by comparing the token sequences, which is exact and takes
microseconds at 24 bytes a token (docs/explanation/decisions.md).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import partial
from typing import Final

from relaygr_stream.cache.arena import Extent
from relaygr_stream.cache.copy import CopyEngine
from relaygr_stream.cache.entry import Coverage, Entry, Found, Source
from relaygr_stream.cache.entry_table import CacheCounters, EntryTable, PredictMs
from relaygr_stream.cache.fading import CostAwarePolicy
from relaygr_stream.cache.kept import Restored
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.cache.moves import Moves
from relaygr_stream.cache.restart import restore
from relaygr_stream.cache.scratch import Scratch
from relaygr_stream.cache.tiers import MakePolicy, capacity_for
from relaygr_stream.cache.transit import Transit
from relaygr_stream.errors import CapacityError
from relaygr_stream.models.api import Tokens
from relaygr_stream.models.kv import KVLayout, KVRegion
from relaygr_stream.wire.erase import Erase


class PrefixCache:
    """Entries in an HBM tier and an optional DRAM tier.

    predict_ms(n): predicted device time of computing n prefix tokens, the basis of eviction costs.
    scratch_tokens: the longest sequence; the cache reserves memory for one full inference of it.
    incremental: whether K/V stay valid as a sequence grows; if not, only equal sequences match.
    max_stale_tokens: number of newest tokens that a covering entry may lack; its reader appends them to the suffix.
    policy: makes each tier's eviction order.

    Raises CapacityError if HBM cannot hold the scratch region and one entry of the same size, or DRAM one copy.
    """

    def __init__(
        self,
        layout: KVLayout,
        hbm: TierMemory,
        dram: TierMemory | None,
        copier: CopyEngine,
        predict_ms: PredictMs,
        *,
        scratch_tokens: int,
        incremental: bool = True,
        max_stale_tokens: int = 0,
        policy: MakePolicy = CostAwarePolicy,
    ) -> None:
        self._incremental = incremental
        max_stale = max_stale_tokens if incremental else 0
        #: How an entry's sequence, computed or being computed, relates to a prefix: coverage(entry, tokens).
        self.coverage: Final = partial(
            Entry.coverage, incremental=incremental, sliceable=layout.sliceable, max_stale=max_stale
        )
        self._sliceable = layout.sliceable
        self._sizes: dict[int, int] = {}  # bytes by number of tokens: at most as many as the longest sequence has
        self._max_stale = max_stale
        self.counters = CacheCounters()
        self._table = EntryTable(layout, hbm, dram, predict_ms, self.counters, policy)
        self._hbm, self._dram = self._table.hbm, self._table.dram
        capacity = capacity_for(scratch_tokens)
        self._scratch_bytes = self._hbm.size_of(capacity)
        self._moves = Moves(self._table, copier, self.counters, self._scratch_bytes)
        #: Completes finished copies and starts write-backs; returns the entries loaded, or `failed` to load.
        self.poll: Final = self._moves.poll
        self.transit = Transit(self._table, predict_ms, self._moves)
        self._most_capacity = capacity
        reserved = self._hbm.allocate(capacity)
        if reserved is None or self._hbm.size < 2 * self._scratch_bytes:
            raise CapacityError(
                f"worker.hbm_bytes = {hbm.arena.size} cannot hold one prefix and one full inference of "
                f"{scratch_tokens} tokens (relay.max_prefix_tokens + relay.max_suffix_tokens): each takes "
                f"{self._scratch_bytes} bytes ({layout.bytes_per_token} a token, {layout.nbytes(0)} beside); set "
                f"worker.hbm_bytes to at least {2 * self._scratch_bytes} or lower relay.max_prefix_tokens"
            )
        self.scratch = Scratch(reserved[1])
        if self._dram is not None and self._dram.size < self._dram.size_of(capacity):
            raise CapacityError(
                f"worker.dram_bytes = {self._dram.size} cannot hold one prefix of {scratch_tokens} tokens "
                f"(relay.max_prefix_tokens + relay.max_suffix_tokens): it takes {self._dram.size_of(capacity)} bytes; "
                f"set worker.dram_bytes to at least that, to 0 for no DRAM tier, or lower relay.max_prefix_tokens"
            )

    # ---- reading ----

    def find(self, user_id: str, tokens: Tokens) -> Found:
        """The user's entry and how it relates to this prefix. Changes nothing, except as Moves.readable."""
        entry = self._table.by_user.get(user_id)
        if entry is not None and entry.stored is not None and entry.stored.unverified is not None:
            entry = self._moves.readable(entry)
        return entry, Coverage.NONE if entry is None else self.coverage(entry, tokens)

    def serves(self, entry: Entry, tokens: Tokens) -> bool:
        """Whether an entry that covers this prefix has computed enough of it by now, and is not being rewritten."""
        if entry.region is None or (entry.computing and not self._sliceable):
            return False
        return 0 < entry.region.length >= len(tokens) - self._max_stale

    @property
    def pinned_bytes(self) -> int:
        """Bytes of HBM that cannot be freed now: entries that are pinned, computing or loading."""
        return self._hbm.held_bytes

    @property
    def hbm_used(self) -> int:
        """Allocated bytes of the HBM tier, scratch included."""
        return self._hbm.used

    @property
    def dram_used(self) -> int:
        """Allocated bytes of the DRAM tier."""
        return self._dram.used if self._dram else 0

    @property
    def entries(self) -> int:
        """The number of users with an entry in either tier."""
        return len(self._table)

    @property
    def copying(self) -> bool:
        """Whether copies between the tiers are in progress."""
        return self._moves.copying

    def nbytes(self, tokens: int) -> int:
        """Bytes of HBM for a new entry of `tokens` tokens."""
        size = self._sizes.get(tokens)
        if size is None:
            size = self._sizes[tokens] = self._hbm.size_of(capacity_for(tokens))
        return size

    def entry_bytes(self, entry: Entry) -> int:
        """Bytes of HBM that the entry takes, or will take when loaded: its region may have room for more tokens."""
        if entry.extent is not None:
            return entry.extent.size
        assert entry.stored is not None
        return self._hbm.size_of(entry.stored.capacity)

    # ---- computing ----

    def open(self, user_id: str, tokens: Tokens, source: Source = Source.RANKING) -> Entry | None:
        """absent → computing: a new entry with room for `tokens`, which replaces the user's former entry.

        source: on whose word; the caller has seen that the former one's is no better.
        Returns None if HBM has no room even after eviction; the user's former entry may be evicted then too.
        """
        place = self._table.allocate_hbm(capacity_for(len(tokens)))
        if place is None:
            return None
        self.counters.opened += 1
        return self._table.add(place, user_id, tokens, source)

    def extend(self, entry: Entry, tokens: Tokens) -> Entry | None:
        """ready → computing: the entry's sequence grows to `tokens`, which continue it. Returns the entry to compute.

        If the region has room, it is the same entry; readers of the old length may continue to read. Otherwise, or if
        the region has a state that a reader or a copy may not find rewritten, it is a new entry in another region, with
        a copy of the computed part; the old entry stays until its last holder releases it. Returns None and changes
        nothing if HBM has no room.
        """
        assert entry.ready and entry.region is not None
        if len(tokens) <= entry.region.capacity and (self._sliceable or not (entry.pins or entry.spill)):
            self.counters.extended_in_place += 1
            entry.tokens = tokens
            entry.computing = True
            self._table.note(entry)
            return entry
        self.pin(entry)  # it must not be evicted to make room for its own continuation
        place = self._table.allocate_hbm(capacity_for(len(tokens)))
        grown = None if place is None else self._move(entry, entry.region, place, tokens)
        self.unpin(entry)
        return grown

    def finish(self, entry: Entry) -> None:
        """computing → pinned or idle: all its tokens are computed."""
        assert entry.computing and entry.region is not None and entry.region.length == len(entry.tokens)
        entry.computing = False
        self._table.note(entry)
        self._table.free_if_retired(entry)

    def cut_short(self, entry: Entry) -> None:
        """computing → pinned or idle with the tokens computed so far; absent if there are none."""
        assert entry.computing and entry.region is not None
        if not (self._incremental and entry.region.length):
            self.abort(entry)
            return
        self.counters.cut_short += 1
        entry.tokens = entry.tokens.slice(0, entry.region.length)
        self.finish(entry)

    def abort(self, entry: Entry) -> None:
        """computing → absent, or gone when its last pin is released: the computation failed."""
        assert entry.computing
        entry.computing = False
        entry.failed = True
        self._table.retire(entry)

    def evict(self, entry: Entry) -> None:
        """any state → absent: its contents in both tiers are not trusted.

        Memory in use is freed when its last holder releases it. Requests that wait for the entry find it `failed`.
        """
        if not entry.retired:
            self.counters.distrusted += 1
        entry.failed = True
        self._table.retire(entry)

    def evict_user(self, user_id: str) -> Entry | None:
        """Evict the user's entry and return it; None if there is none."""
        entry = self._table.by_user.get(user_id)
        if entry is not None:
            self.evict(entry)
        return entry

    def erase_users(self, users: Set[str]) -> list[Entry]:
        """Remove the entries of these users from both tiers, and return them, those included that newer ones replaced.
        Those in use are freed by their last holder, whose requests they still serve."""
        self.transit.erase(users)
        found = [entry for entry in self._table.everyone() if entry.user_id in users]
        for entry in found:
            self.counters.erased += 1
            entry.erased = True
            self._table.retire(entry)
        return found

    def confirm(self, entry: Entry, source: Source) -> None:
        """A request of this source asks for the entry's sequence."""
        entry.source = max(entry.source, source)

    def contradict(self, entry: Entry, source: Source) -> None:
        """A request of this source asks for another sequence of its user: if it is as good, any may replace it now."""
        if source >= entry.source:
            entry.source = Source.RANKING

    # ---- holding ----

    def pin(self, entry: Entry) -> None:
        """Hold the entry's HBM until an `unpin` for each `pin`."""
        entry.pins += 1
        if entry.pins == 1:  # else it is held already
            self._table.note(entry)

    def unpin(self, entry: Entry) -> None:
        """Release one pin."""
        assert entry.pins > 0, "unpinned more often than pinned"
        entry.pins -= 1
        if not entry.pins:
            self._table.note(entry)
            self._table.free_if_retired(entry)

    def pins(self) -> dict[Entry, int]:
        """The pinned entries and their numbers of pins."""
        return self._table.pins()

    # ---- tiers ----

    def load(self, entry: Entry) -> bool:
        """in DRAM → loading, before write-backs. Returns False and changes nothing if HBM has no room."""
        return self._moves.load(entry)

    # ---- restarting ----

    @property
    def waits_for_restore(self) -> bool:
        """Whether the DRAM tier's file holds copies of an earlier process that are not found again yet."""
        return self._dram is not None and self._dram.kept is not None and self._dram.kept.waits

    def restore(self, erases: Sequence[Erase] = (), *, drop: str = "") -> Restored:
        """Find the copies of an earlier process again, in the DRAM tier's file. erases: of users, since. drop:
        why nothing is taken; "": what fits is.

        Call it before anything else is in DRAM. Each is verified by its digest before it serves.
        """
        if self._dram is None or self._dram.kept is None:
            return Restored()
        if drop:
            self._dram.kept.file.drop(drop)
        restored = restore(self._table, self._dram, self._dram.kept, self._most_capacity, erases)
        self.counters.restored += restored.entries
        return restored

    # ---- closing and checking ----

    def close(self) -> None:
        """Finish the copies in progress; later copies fail. Raises DeviceError if one does not finish."""
        self._moves.close()

    def check_integrity(self) -> None:
        """Raise CacheCorruption if accounts and memory disagree. O(n log n) in the number of entries."""
        self._table.check_integrity(self._scratch_bytes, self.transit.reserved_bytes)
        self._moves.check_integrity()

    def _move(self, entry: Entry, old: KVRegion, place: tuple[Extent, KVRegion], tokens: Tokens) -> Entry:
        new = place[1]
        new.copy_from(old, old.length)
        new.length = old.length
        self.counters.extended_by_move += 1
        grown = self._table.add(place, entry.user_id, tokens, entry.source)
        self._table.hand_over_copy(entry, grown)
        return grown
