"""Residents: the prefix KV that are here, or on their way; the one decision that signals and rankings share.

    find ─► HBM: ready | being computed | in DRAM: load | shorter: prefill the rest | nothing: prefill all
         └─ another sequence of the user, on a better word (Source): that stays

Signals pin what they acquire (signals.py), rankings are scored from it (placement.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from relaygr_stream.cache.entry import Coverage, Entry, Found
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.engine.commands import PrefillTask
from relaygr_stream.engine.pins import PinTable, source_of
from relaygr_stream.engine.prefill import PrefillJobs
from relaygr_stream.models.api import Tokens

#: What there is: all of it in HBM; an entry that is computed, or loaded, for others; a load or a job begun now, for
#: what is in DRAM, for what a shorter entry lacks, or for everything; or nothing to hold, because HBM has no room or
#: the user's other sequence stays.
Way = Literal["ready", "computing", "loading", "dram", "shorter", "nothing", "no_room", "kept"]


@dataclass(frozen=True, slots=True)
class Acquired:
    """An entry that a caller may hold now, before anything else changes the cache; None where there is nothing to hold.

    whole: it has, or will have, all of the prefix; False: acquire again once its copy or computation is over. missing:
    tokens of the job that was begun.
    """

    way: Way
    entry: Entry | None = None
    whole: bool = True
    missing: int = 0


NO_ROOM: Final = Acquired("no_room")
KEPT: Final = Acquired("kept")


class Residents:
    """Finds prefix KV, and begins what lacks of them. cache, jobs, pins: what there is, is computed, and is held."""

    def __init__(self, cache: PrefixCache, jobs: PrefillJobs, pins: PinTable) -> None:
        self.cache: Final = cache
        self.jobs: Final = jobs
        self.pins: Final = pins

    def find(self, user_key: str, tokens: Tokens, request_key: str = "") -> Found:
        """The user's entry and its coverage. If it is of no use, what the request's own signal pinned: a newer sequence
        of the user may have replaced that."""
        entry, coverage = self.cache.find(user_key, tokens)
        if coverage is Coverage.NONE:
            pinned = self.pins.entry(request_key)
            if pinned is not None and self.serves(pinned, tokens):
                return pinned, Coverage.COVERS
        return entry, coverage

    def is_here(self, found: Found, tokens: Tokens) -> bool:
        """Whether all of it is here. While it is computed, for a later request, a ranking would wait for what another
        worker may have ready."""
        entry, coverage = found
        if entry is None or coverage is not Coverage.COVERS:
            return False
        return not entry.computing or self.cache.serves(entry, tokens)

    def serves(self, entry: Entry, tokens: Tokens) -> bool:
        """Whether the entry has, or will have, this prefix."""
        return not entry.failed and self.cache.coverage(entry, tokens) is Coverage.COVERS

    def acquire(
        self,
        found: Found,
        user_key: str,
        tokens: Tokens,
        due: float,
        request_key: str,
        signal: PrefillTask | None = None,
    ) -> Acquired:
        """What to hold for this prefix; begins the load or the job that it needs.

        found: by `find`, just now. due: when its ranking is expected, or has to be answered. request_key: of the
        ranking, or the signal. signal: of the admitted request that it is for; None: its ranking has come.
        """
        entry, coverage = found
        if entry is None or coverage is Coverage.NONE:
            source = self.pins.source(request_key) if signal is None else source_of(signal.lane)
            if entry is not None and entry.source > source:
                return KEPT
            return self._begin("nothing", self.cache.open(user_key, tokens, source), due, signal)
        if signal is not None:
            self.cache.confirm(entry, source_of(signal.lane))
        whole = coverage is Coverage.COVERS
        if whole and entry.load is None and self.cache.serves(entry, tokens):
            return Acquired("ready", entry)
        if entry.computing or entry.load is not None:
            return Acquired("computing" if entry.computing else "loading", entry, whole)
        if entry.region is None:
            return Acquired("dram", entry, whole) if self.cache.load(entry) else NO_ROOM
        way: Way = "shorter"
        if (begun := self.cache.extend(entry, tokens)) is None:
            way, begun = "nothing", self.cache.open(user_key, tokens, entry.source)
        return self._begin(way, begun, due, signal)

    def contradict(self, signal: PrefillTask) -> None:
        """A signal asks for its sequence and does not get it: another one of its user is outdated all the same."""
        entry, coverage = self.find(signal.user_key, signal.tokens)
        if entry is not None and coverage is Coverage.NONE:
            self.cache.contradict(entry, source_of(signal.lane))

    def _begin(self, way: Way, entry: Entry | None, due: float, signal: PrefillTask | None) -> Acquired:
        """Begin the job of an entry that lacks tokens."""
        if entry is None:
            return NO_ROOM
        assert entry.region is not None
        self.jobs.start(entry, due, signal)
        return Acquired(way, entry, missing=len(entry.tokens) - entry.region.length)
