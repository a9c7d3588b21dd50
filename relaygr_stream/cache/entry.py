"""One user's prefix KV and where it is. Only prefix_cache.py, holdings.py and moves.py change that; others read it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from relaygr_stream.cache.arena import Extent
from relaygr_stream.cache.copy import CopyTicket
from relaygr_stream.models.api import KVRegion, Tokens


class EntryState(enum.Enum):
    """absent → computing → pinned → idle → spilling → in DRAM → loading → pinned (DESIGN §7)."""

    COMPUTING = "computing"
    PINNED = "pinned"
    IDLE = "idle"
    SPILLING = "spilling"
    DRAM = "dram"
    LOADING = "loading"
    GONE = "gone"


class Coverage(enum.Enum):
    """How an entry's sequence relates to a request's prefix."""

    NONE = "none"  # no entry, or another sequence: never used
    PREFIX = "prefix"  # the entry holds a strict prefix of it: extend by the missing tokens
    COVERS = "covers"  # the entry holds all of it that matters (and maybe newer tokens, which causal KV lets us ignore)


@dataclass(slots=True)
class StoredCopy:
    """A copy in the DRAM tier of the first `length` tokens, in a region of `capacity`."""

    extent: Extent
    capacity: int
    length: int


class Entry:
    """The prefix KV of one user's sequence under one model version."""

    __slots__ = (
        "approximate", "computing", "extent", "failed", "lent", "load", "pins", "region", "retired", "spill",
        "stored", "tokens", "unspillable", "user_id",
    )  # fmt: skip

    def __init__(self, user_id: str, tokens: Tokens) -> None:
        self.user_id = user_id  # under its tenant: messages.tenant_key
        self.tokens = tokens  # the sequence it stands for once computed; kept to decide coverage exactly
        self.extent: Extent | None = None  # in the HBM tier
        self.region: KVRegion | None = None  # over that extent; region.length tokens are computed
        self.stored: StoredCopy | None = None
        self.approximate = False  # what is in HBM came, all or in part, from a DRAM copy that rounds
        self.pins = 0
        self.lent = 0  # how many other workers its DRAM copy is being sent to; it stays as it is meanwhile
        self.computing = False
        self.load: CopyTicket | None = None
        self.spill: CopyTicket | None = None
        self.failed = False  # its region's contents are worth nothing; retired as well
        self.retired = False  # replaced by a newer sequence of the user: freed when nobody holds it
        self.unspillable = False  # copying it failed: not tried again

    def __str__(self) -> str:
        """For errors, which reach answers and logs: it does not name the user."""
        return f"an entry of {len(self.tokens)} tokens"

    @property
    def state(self) -> EntryState:
        """The entry's place in the life cycle, derived."""
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
        """All of its tokens are in HBM."""
        return self.region is not None and not self.computing and self.load is None

    @property
    def held(self) -> bool:
        """Its HBM cannot be taken back: requests hold it, or it is being computed or loaded."""
        return bool(self.pins or self.computing or self.load is not None)

    @property
    def evictable(self) -> bool:
        """Its HBM can be taken now: nobody reads, writes or copies it."""
        return self.region is not None and not self.held and self.spill is None and not self.retired

    @property
    def forgettable(self) -> bool:
        """Its DRAM copy can be dropped now: it is whole, nobody reads it, and it is not what makes its HBM clean.

        Copies are forgotten to make room for others that make HBM clean: to forget those of clean entries for it would
        gain nothing, and where DRAM is small, go on for ever.
        """
        unused = self.stored is not None and self.load is None and self.spill is None and not self.lent
        return unused and not self.retired and (self.region is None or not self.clean)

    @property
    def clean(self) -> bool:
        """Its DRAM copy is whole, so that giving up its HBM loses nothing."""
        return self.stored is not None and self.spill is None and self.stored.length == len(self.tokens)

    def coverage(self, tokens: Tokens, *, incremental: bool, lag: int = 0) -> Coverage:
        """How its sequence, computed or being computed, relates to a request's prefix.

        incremental: whether K/V of a sequence's beginning are those of the whole; else only equal sequences match.
        lag: newest behaviours that it may lack and yet cover the prefix.
        """
        held, wanted = self.tokens.array, tokens.array
        shared = min(held.shape[1], wanted.shape[1])
        if not shared or not (held[:, :shared] == wanted[:, :shared]).all():
            return Coverage.NONE
        if held.shape[1] == wanted.shape[1]:
            return Coverage.COVERS
        if not incremental:
            return Coverage.NONE
        return Coverage.COVERS if held.shape[1] + lag >= wanted.shape[1] else Coverage.PREFIX


#: A user's entry, and how it relates to a request's prefix.
Found = tuple[Entry | None, Coverage]
