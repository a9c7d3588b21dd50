"""One user's prefix KV and its place in the tiers.

Only prefix_cache.py, entry_table.py, moves.py and transit.py change an entry; other modules read it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from relaygr_stream.cache.arena import Extent
from relaygr_stream.cache.copy import CopyTicket
from relaygr_stream.models.api import Tokens
from relaygr_stream.models.kv import KVRegion


class EntryState(enum.Enum):
    """An entry's life cycle: absent → computing → pinned → idle → spilling → in DRAM → loading → pinned."""

    COMPUTING = "computing"
    PINNED = "pinned"
    IDLE = "idle"
    SPILLING = "spilling"
    DRAM = "dram"
    LOADING = "loading"
    GONE = "gone"


class Coverage(enum.Enum):
    """How an entry's sequence relates to a request's prefix."""

    NONE = "none"  # no entry, or another sequence: the entry is of no use
    PREFIX = "prefix"  # the entry holds the beginning of the prefix: prefill the missing tokens
    COVERS = "covers"  # the entry holds the prefix (up to max_stale tokens), and possibly newer tokens to ignore


class Source(enum.IntEnum):
    """On whose word an entry rests: a request replaces another sequence of its user only on a word that is as good.

    Who writes `ranking` may name any user, and any worker as its delegate; signals of a lane come from its trigger.
    """

    RANKING = 0  # of a ranking alone
    DELEGATED = 1  # of a signal on another worker's behalf
    SIGNAL = 2  # of a signal of the user's lane


@dataclass(slots=True)
class StoredCopy:
    """A copy in the DRAM tier of an entry's first `length` tokens, in a region of `capacity` tokens.

    unverified: of a copy that an earlier process made: the digest that its bytes must have before it serves.
    """

    extent: Extent
    capacity: int
    length: int
    unverified: bytes | None = None


class Entry:
    """The prefix KV of one user's sequence under one model version."""

    __slots__ = (
        "computing", "erased", "extent", "failed", "leases", "load", "pins", "region", "retired", "source", "spill",
        "stored", "tokens", "unspillable", "user_id",
    )  # fmt: skip

    def __init__(self, user_id: str, tokens: Tokens, source: Source = Source.RANKING) -> None:
        self.user_id = user_id  # with its tenant: messages.tenant_key
        self.source = source  # the best that asked for it
        self.tokens = tokens  # the sequence that the entry represents when complete; coverage compares it exactly
        self.extent: Extent | None = None  # in the HBM tier
        self.region: KVRegion | None = None  # over that extent; region.length tokens are computed
        self.stored: StoredCopy | None = None
        self.pins = 0
        self.leases = 0  # number of other workers that read its DRAM copy, which must not change meanwhile
        self.computing = False
        self.load: CopyTicket | None = None
        self.spill: CopyTicket | None = None
        self.failed = False  # its contents are invalid; a failed entry is also retired
        self.retired = False  # replaced by a newer sequence of the user: freed when it has no holder
        self.erased = False  # its user was erased: nothing of it stays in the tier's file
        self.unspillable = False  # a copy to DRAM failed; it is not tried again

    def __str__(self) -> str:
        """The text for errors. It does not name the user, since errors reach answers and logs."""
        return f"an entry of {len(self.tokens)} tokens"

    @property
    def state(self) -> EntryState:
        """The entry's place in the life cycle, derived from its fields."""
        if self.computing:
            return EntryState.COMPUTING
        if self.load is not None:
            return EntryState.LOADING
        if self.region is None:
            return EntryState.GONE if self.stored is None else EntryState.DRAM
        if self.pins:
            return EntryState.PINNED
        return EntryState.IDLE if self.spill is None else EntryState.SPILLING

    @property
    def ready(self) -> bool:
        """Whether all its tokens are in HBM."""
        return self.region is not None and not self.computing and self.load is None

    @property
    def held(self) -> bool:
        """Whether its HBM cannot be freed: it is pinned, computing or loading."""
        return bool(self.pins or self.computing or self.load is not None)

    @property
    def evictable(self) -> bool:
        """Whether its HBM can be freed now: no reader, writer or copy uses it."""
        return self.region is not None and not self.held and self.spill is None and not self.retired

    @property
    def evictable_from_dram(self) -> bool:
        """Whether its DRAM copy can be freed now: it is complete and unused, and the entry in HBM is not clean.

        The tier evicts copies to make room for copies that make HBM entries clean. To evict the copy of a clean entry
        would gain nothing, and in a small DRAM tier it would never end.
        """
        unused = self.stored is not None and self.load is None and self.spill is None and not self.leases
        return unused and not self.retired and (self.region is None or not self.clean)

    @property
    def clean(self) -> bool:
        """Whether its DRAM copy is complete, so that evicting it from HBM loses nothing."""
        return self.stored is not None and self.spill is None and self.stored.length == len(self.tokens)

    def coverage(self, tokens: Tokens, *, incremental: bool, sliceable: bool = True, max_stale: int = 0) -> Coverage:
        """How the entry's sequence, computed or being computed, relates to a request's prefix.

        incremental: whether K/V stay valid as a sequence grows; if not, only equal sequences match.
        sliceable: whether a longer sequence has the K/V of its beginning; if not, a longer entry is of no use.
        max_stale: number of newest tokens of the prefix that a covering entry may lack.
        """
        held, wanted = self.tokens.array, tokens.array
        shared = min(held.shape[1], wanted.shape[1])
        if not shared or not (held[:, :shared] == wanted[:, :shared]).all():
            return Coverage.NONE
        if held.shape[1] == wanted.shape[1]:
            return Coverage.COVERS
        if not incremental or (held.shape[1] > wanted.shape[1] and not sliceable):
            return Coverage.NONE
        return Coverage.COVERS if held.shape[1] + max_stale >= wanted.shape[1] else Coverage.PREFIX


#: A user's entry, if there is one, and how it relates to a request's prefix.
Found = tuple[Entry | None, Coverage]
