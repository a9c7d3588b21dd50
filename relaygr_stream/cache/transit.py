"""Leases and reservations: the cache's side of copies to and from the DRAM tiers of other workers.

A lease keeps an entry's DRAM copy unchanged while another worker reads it. A reservation is DRAM for a copy that
arrives and has no entry yet. Only the DRAM tier takes part: its bytes are on the host, so the network needs no device,
and a returning user's entry is reloaded from DRAM during retrieval.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from relaygr_stream.cache.arena import Extent
from relaygr_stream.cache.entry import Coverage, Entry, StoredCopy
from relaygr_stream.cache.entry_table import MIN_COST_MS, EntryTable, PredictMs
from relaygr_stream.cache.moves import Moves
from relaygr_stream.cache.tier_file import TierFile
from relaygr_stream.cache.tiers import DramTier
from relaygr_stream.models.api import Tokens


@dataclass(frozen=True, slots=True)
class Lease:
    """A DRAM copy that another worker reads. data: all its bytes (uint8).

    uses: the entry's faded uses. file: the tier's, if it has one.
    """

    entry: Entry
    tokens: Tokens
    capacity: int
    data: torch.Tensor
    uses: float
    file: TierFile | None = None

    def fetch(self) -> None:
        """Have the data in memory. Raises DeviceError where the file's disk does not give them."""
        if self.file is not None and self.entry.stored is not None:
            self.file.fetch(self.entry.stored.extent)


@dataclass(slots=True, eq=False)
class Reservation:
    """Memory for an arriving copy. data: the bytes to fill (uint8). file: as of a lease."""

    user_id: str
    tokens: Tokens
    copy: StoredCopy
    data: torch.Tensor
    file: TierFile | None = None
    filled: bool = False  # the copy became the user's entry
    erased: bool = False  # its user was erased meanwhile: it becomes nothing

    def fetch(self) -> None:
        """As of a lease: before they are filled."""
        if self.file is not None:
            self.file.fetch(self.copy.extent)


class ListUsers(NamedTuple):
    """Return the ids of the users who have entries, in no order."""


class Worth(NamedTuple):
    """Return the value of each user's entry (see Transit.worth)."""

    users: Sequence[str]
    max_tokens: int = 0


class Lend(NamedTuple):
    """Return a Lease of the user's DRAM copy, "soon" or "never" (see Transit.lend)."""

    user_id: str


class GiveBack(NamedTuple):
    """End a lease."""

    lease: Lease


class Reserve(NamedTuple):
    """Return a Reservation for an arriving copy, "held" or "full" (see Transit.reserve)."""

    user_id: str
    tokens: Tokens
    capacity: int
    uses: float = 1.0


class Fill(NamedTuple):
    """Make the copy in the reservation the user's entry. Return whether it became the entry."""

    reservation: Reservation


class Discard(NamedTuple):
    """End a reservation whose copy does not arrive."""

    reservation: Reservation


#: The commands of Transit.handle.
TransitCommand = ListUsers | Worth | Lend | GiveBack | Reserve | Fill | Discard


def giving_back(reply: object) -> GiveBack | Discard | None:
    """The command that takes back what a command returned to somebody who waits for it no more; None: nothing is
    held."""
    if isinstance(reply, Lease):
        return GiveBack(reply)
    return Discard(reply) if isinstance(reply, Reservation) else None


class Transit:
    """Leases and reservations of one cache.

    predict_ms(n): predicted device time of recomputing n tokens. moves: make the DRAM copies that are lent.
    """

    def __init__(self, table: EntryTable, predict_ms: PredictMs, moves: Moves) -> None:
        self._table = table
        self._predict_ms = predict_ms
        self._moves = moves
        self._reserved: dict[Reservation, Extent] = {}

    @property
    def reserved_bytes(self) -> int:
        """Bytes of DRAM in reservations."""
        return sum(extent.size for extent in self._reserved.values())

    def handle(self, command: TransitCommand) -> object:
        """Execute the command; returns what the command's docstring says."""
        match command:
            case ListUsers():
                return self.users()
            case Worth(users, max_tokens):
                return self.worth(users, max_tokens)
            case Lend(user_id):
                return self.lend(user_id)
            case GiveBack(lease):
                self.give_back(lease)
            case Reserve(user_id, tokens, capacity, uses):
                return self.reserve(user_id, tokens, capacity, uses)
            case Fill(reservation):
                return self.fill(reservation)
            case Discard(reservation):
                self.discard(reservation)
        return None

    # ---- copies that leave ----

    def users(self) -> list[str]:
        """The ids of the users who have entries, or copies that arrive, in no order."""
        return list({*self._table.users(), *(reservation.user_id for reservation in self._reserved)})

    def worth(self, users: Sequence[str], max_tokens: int = 0) -> dict[str, float]:
        """By user, the value of a byte of a copy, as eviction has it: faded uses × recompute cost (ms) / bytes.

        Users without an entry, users whose entry is computing, and those whose entry has more than max_tokens (0: any
        number) are left out.
        """
        found, dram = {}, self._table.dram
        assert dram is not None
        for user_id in users:
            entry = self._table.by_user.get(user_id)
            if entry is None or entry.computing or (max_tokens and len(entry.tokens) > max_tokens):
                continue
            place = entry.stored or entry.region
            if place is not None and len(entry.tokens):
                nbytes = dram.size_of(place.capacity)
                found[user_id] = self._uses(user_id) * self._cost_ms(len(entry.tokens)) / nbytes
        return found

    def lend(self, user_id: str) -> Lease | Literal["soon", "never"]:
        """Lease the user's DRAM copy until `give_back`. "soon": the copy is in progress; "never": there is none."""
        entry, dram = self._table.by_user.get(user_id), self._table.dram
        if entry is None or dram is None or entry.computing or entry.failed:
            return "never"
        if entry.spill is not None:
            return "soon"
        if entry.stored is None or (entry.ready and not entry.clean and not entry.leases):
            return "soon" if self._may_copy_out(entry, dram) and self._moves.copy_out(entry) else "never"
        if entry.stored.unverified is not None:
            self._moves.keep(entry)
            return "soon"
        entry.leases += 1
        self._table.note(entry)
        stored = entry.stored
        tokens = entry.tokens.slice(0, stored.length)
        return Lease(entry, tokens, stored.capacity, dram.view(stored), self._uses(user_id), dram.file)

    def give_back(self, lease: Lease) -> None:
        """End the lease: the copy is read, or no longer needed."""
        assert lease.entry.leases > 0, "given back more often than lent"
        lease.entry.leases -= 1
        self._table.note(lease.entry)
        self._table.free_if_retired(lease.entry)

    # ---- copies that arrive ----

    def reserve(
        self, user_id: str, tokens: Tokens, capacity: int, uses: float = 1.0
    ) -> Reservation | Literal["held", "full"]:
        """Reserve DRAM for an arriving copy; evicts only copies that are worth less. uses: as its giver counts them.

        "held": the user's present entry is as good; "full": all copies in DRAM are worth more, or in use.
        """
        dram = self._table.dram
        assert dram is not None
        if not self._is_better(user_id, tokens):
            return "held"
        dram.learn(user_id, uses)
        if not dram.worth_room(user_id, capacity, self._cost_ms(len(tokens))):
            return "full"
        extent = self._table.allocate_dram(capacity)
        if extent is None:
            return "full"
        copy = StoredCopy(extent, capacity, len(tokens))
        reservation = Reservation(user_id, tokens, copy, dram.view(copy), dram.file)
        self._reserved[reservation] = extent
        return reservation

    def fill(self, reservation: Reservation) -> bool:
        """Make the complete copy the user's entry.

        Returns False, and discards the copy, if the user's present entry is as good by now, or the user erased.
        """
        if reservation.erased or not self._is_better(reservation.user_id, reservation.tokens):
            self.discard(reservation)
            return False
        del self._reserved[reservation]
        reservation.filled = True
        self._moves.keep(self._table.add_stored(reservation.copy, reservation.user_id, reservation.tokens))
        return True

    def discard(self, reservation: Reservation) -> None:
        """Free the reservation: the copy does not arrive."""
        assert self._table.dram is not None
        del self._reserved[reservation]
        self._table.dram.free(reservation.copy, erased=reservation.erased)

    def erase(self, users: Set[str]) -> None:
        """Copies of these users that arrive become nothing."""
        for reservation in self._reserved:
            reservation.erased = reservation.erased or reservation.user_id in users

    def _is_better(self, user_id: str, tokens: Tokens) -> bool:
        """Whether this prefix is better than the user's present entry.

        It is if there is no entry, or an unused one that holds only the beginning of this prefix.
        """
        entry = self._table.by_user.get(user_id)
        if entry is None or (entry := self._moves.readable(entry)) is None:
            return True
        less = entry.coverage(tokens, incremental=True) is Coverage.PREFIX
        return less and not entry.held and entry.spill is None

    def _may_copy_out(self, entry: Entry, dram: DramTier) -> bool:
        """Whether a DRAM copy of the entry is possible, and worth more than the copies to evict for it."""
        if entry.unspillable or entry.region is None:
            return False
        return dram.worth_room(entry.user_id, entry.region.capacity, self._cost_ms(len(entry.tokens)))

    def _uses(self, user_id: str) -> float:
        return max(tier.uses(user_id) for tier in (self._table.hbm, self._table.dram) if tier is not None)

    def _cost_ms(self, tokens: int) -> float:
        return max(MIN_COST_MS, self._predict_ms(tokens))
