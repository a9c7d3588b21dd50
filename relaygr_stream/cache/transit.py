"""Copies that leave for, and come from, the DRAM tiers of other workers: who has them, and what they take meanwhile.

A loan keeps an entry's DRAM copy as it is while it is read; an arrival is memory that has no entry yet. Both end in
order or not, and the books balance either way. Only the DRAM tier takes part: its bytes are on the host, where a
network can read and write them without the device, and a user who comes back is reloaded from there during retrieval.
Knows nothing of networks, lanes or workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from relaygr_stream.cache.arena import Extent
from relaygr_stream.cache.entry import Coverage, Entry, StoredCopy
from relaygr_stream.cache.entry_table import MIN_COST_MS, Holdings
from relaygr_stream.cache.tiers import DramTier
from relaygr_stream.models.api import Tokens


@dataclass(frozen=True, slots=True)
class Loan:
    """A DRAM copy that is being read; data: all its bytes (uint8), in the tier's storage."""

    entry: Entry
    tokens: Tokens
    capacity: int
    data: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """Memory for a copy on its way here; data: to be filled (uint8), in the tier's storage."""

    user_id: str
    tokens: Tokens
    copy: StoredCopy
    data: torch.Tensor


class Transit:
    """Loans and arrivals of one cache. predict_ms(n): what recomputing n tokens takes. copy_out(entry): have a DRAM
    copy made of an entry that is in HBM; False: there is no room for it."""

    def __init__(
        self, holdings: Holdings, predict_ms: Callable[[int], float], copy_out: Callable[[Entry], bool]
    ) -> None:
        self._holdings = holdings
        self._predict_ms = predict_ms
        self._copy_out = copy_out
        self._arriving: dict[Arrival, Extent] = {}

    @property
    def arriving_bytes(self) -> int:
        """DRAM that is taken and has no entry yet."""
        return sum(extent.size for extent in self._arriving.values())

    # ---- leaving ----

    def users(self) -> list[str]:
        """Whose entries there are, in no order."""
        return self._holdings.users()

    def worth(self, users: Iterable[str]) -> dict[str, float]:
        """What a byte of each user's entry is worth: uses, as faded by now, × cost of recomputing it; by user who has
        an entry that can be lent, now or soon."""
        found = {}
        for user_id in users:
            entry = self._holdings.get(user_id)
            if entry is not None and not entry.computing and len(entry.tokens):
                uses = max(tier.uses(user_id) for tier in (self._holdings.hbm, self._holdings.dram) if tier is not None)
                found[user_id] = uses * self._cost_ms(len(entry.tokens)) / len(entry.tokens)
        return found

    def lend(self, user_id: str) -> Loan | Literal["soon", "never"]:
        """Hold the user's DRAM copy until `give_back`. "soon": it is being made; "never": there is nothing to lend."""
        entry, dram = self._holdings.get(user_id), self._holdings.dram
        if entry is None or dram is None or entry.computing or entry.failed:
            return "never"
        if entry.spill is not None:
            return "soon"
        if entry.stored is None or (entry.ready and not entry.clean and not entry.lent):
            return "soon" if self._may_copy_out(entry, dram) and self._copy_out(entry) else "never"
        entry.lent += 1
        self._holdings.note(entry)
        stored = entry.stored
        return Loan(entry, entry.tokens.slice(0, stored.length), stored.capacity, dram.view(stored))

    def give_back(self, loan: Loan) -> None:
        """The copy has been read, or is not needed any more."""
        assert loan.entry.lent > 0, "given back more often than lent"
        loan.entry.lent -= 1
        self._holdings.note(loan.entry)
        self._holdings.free_if_retired(loan.entry)

    # ---- coming ----

    def expect(self, user_id: str, tokens: Tokens, capacity: int) -> Arrival | Literal["held", "full"]:
        """Take room for a copy on its way here, like any other: by forgetting only what is worth less.

        "held": what is here already is as good; "full": everything here is worth more, or in use.
        """
        dram = self._holdings.dram
        assert dram is not None
        if not self._better(user_id, tokens):
            return "held"
        if not dram.worth_room(user_id, capacity, self._cost_ms(len(tokens))):
            return "full"
        extent = self._holdings.dram_room(capacity)
        if extent is None:
            return "full"
        copy = StoredCopy(extent, capacity, len(tokens))
        arrival = Arrival(user_id, tokens, copy, dram.view(copy))
        self._arriving[arrival] = extent
        return arrival

    def arrived(self, arrival: Arrival) -> bool:
        """All bytes are there: from now on it is the user's entry. False: what was computed here meanwhile is as good,
        and stays."""
        if not self._better(arrival.user_id, arrival.tokens):
            self.discard(arrival)
            return False
        del self._arriving[arrival]
        self._holdings.add_stored(arrival.copy, arrival.user_id, arrival.tokens)
        return True

    def discard(self, arrival: Arrival) -> None:
        """It will not come."""
        assert self._holdings.dram is not None
        self._holdings.dram.free(self._arriving.pop(arrival))

    # ---- inside ----

    def _better(self, user_id: str, tokens: Tokens) -> bool:
        """Whether this prefix would serve the user better than what he has here: he has nothing, or less of the same,
        from a time when his lane was here before, and nobody uses it."""
        entry = self._holdings.get(user_id)
        if entry is None:
            return True
        less = entry.coverage(tokens, incremental=True) is Coverage.PREFIX
        return less and not entry.held and entry.spill is None

    def _may_copy_out(self, entry: Entry, dram: DramTier) -> bool:
        """Only if no copy of a user who stays has to be forgotten for it that is worth more."""
        if entry.unspillable or entry.region is None:
            return False
        return dram.worth_room(entry.user_id, entry.region.capacity, self._cost_ms(len(entry.tokens)))

    def _cost_ms(self, tokens: int) -> float:
        return max(MIN_COST_MS, self._predict_ms(tokens))
