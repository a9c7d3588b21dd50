"""The footprint bound: which bytes a lane's owner has pinned, or will have once it has read every signal.

The owner states pinned bytes P and the offset O up to which it has read the lane's signals. All signals it will ever
pin are in P or at offsets ≥ O, however old the statement is. So

    outstanding = P + bytes of signals at offsets ≥ O + bytes of signals not yet acknowledged by the broker

never falls short of what the owner holds, and admitting only while outstanding + new ≤ budget bounds the footprint
without fresh reports. A signal leaves the sum when the owner has read it, not after a time: a time cannot tell a signal
that was never read from one that will be read, and pinned, later.

Signals whose size is not known here (of this lane's previous trigger, or of anyone else) are seen as a gap between the
log's end and our own next offset: while the owner has not read past them, the lane is on hold.

Knows nothing of Kafka but that a lane's signals are a log with offsets. One ledger per lane; no clock of its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Final

from relaygr_stream.messages import LaneStatus

#: Only signals acknowledged at least this long before we asked for the log's end are taken for lost when they lie
#: behind it: the end may lag behind an acknowledgement while partition leadership moves, by milliseconds.
SETTLE_S: Final = 2.0


@dataclass(eq=False, slots=True)
class Pending:
    """A signal handed to the producer, not yet acknowledged."""

    nbytes: int
    failed_s: float | None = None  # when the producer gave up: it may or may not be in the log


@dataclass(order=True, slots=True)
class _Logged:
    offset: int
    nbytes: int
    at_s: float


class LaneLedger:
    """The signals of one lane that count against its owner's budget.

    log_end: the end of the lane's signal log when we took the lane over, at now_s.
    keep_s: how long the log keeps a signal. An owner's successor may start at earlier offsets than it had read, so
    signals already read are remembered that long; those not read within it never will be.
    """

    def __init__(self, log_end: int, keep_s: float, now_s: float) -> None:
        self._log_end = log_end
        self._unknown_below = log_end
        self._unknown_s = now_s  # when we last learned of signals of unknown size
        self._keep_s = keep_s
        self._pending: set[Pending] = set()
        self._pending_bytes = 0
        self._logged: list[_Logged] = []  # by offset
        self._unread_bytes = 0  # of _logged at offsets ≥ what the owner has read
        self._read_to = 0
        self._pinned_bytes = 0
        self._budget_bytes = 0

    @property
    def outstanding(self) -> int:
        """Bytes the owner has pinned or will pin, as far as we know of them."""
        return self._pinned_bytes + self._unread_bytes + self._pending_bytes

    @property
    def budget(self) -> int:
        """Pinned bytes the owner grants the lane."""
        return self._budget_bytes

    @property
    def on_hold(self) -> bool:
        """Whether there may be unread signals of unknown size."""
        return self._read_to < self._unknown_below

    def fits(self, nbytes: int) -> bool:
        """Whether a signal of so many bytes may be admitted. Changes nothing."""
        return not self.on_hold and self.outstanding + nbytes <= self._budget_bytes

    def observe(self, status: LaneStatus) -> None:
        """Take the present owner's statement, be it the same owner as before or not."""
        self._pinned_bytes = status.pinned_bytes
        self._budget_bytes = status.budget_bytes
        self._read_to = status.pre_infer_offset
        self._recount()

    def admit(self, nbytes: int) -> Pending:
        """Count a signal that is now handed to the producer; the caller asked `fits` before."""
        pending = Pending(nbytes)
        self._pending.add(pending)
        self._pending_bytes += nbytes
        return pending

    def acknowledged(self, pending: Pending, offset: int, now_s: float) -> None:
        """The signal is in the log at this offset."""
        self._settle(pending)
        if offset > self._log_end:  # someone else's signals lie in between
            self._unknown_below, self._unknown_s = offset, now_s
        self._log_end = max(self._log_end, offset + 1)
        insort(self._logged, _Logged(offset, pending.nbytes, now_s))
        if offset >= self._read_to:
            self._unread_bytes += pending.nbytes

    def failed(self, pending: Pending, now_s: float) -> None:
        """The producer gave up. The signal may be in the log all the same: it counts until `reconcile`."""
        pending.failed_s = now_s

    def reconcile(self, log_end: int, asked_s: float) -> int:
        """Compare with the log's true end, as asked for at asked_s; returns how many signals turned out lost.

        Without this, signals that the log lost (a crashed broker, a topic made anew) would count for ever, since
        nobody can read them. A failed one is below this end or nowhere.
        """
        settled_s = asked_s - SETTLE_S
        lost = [entry for entry in self._logged if entry.offset >= log_end and entry.at_s <= settled_s]
        for entry in lost:
            self._logged.remove(entry)
        for pending in [p for p in self._pending if p.failed_s is not None and p.failed_s <= settled_s]:
            self._settle(pending)
            if log_end > 0:
                insort(self._logged, _Logged(log_end - 1, pending.nbytes, asked_s))
        known_end = max(log_end, self._logged[-1].offset + 1 if self._logged else 0)
        self._log_end = min(self._log_end, known_end)
        self._unknown_below = min(self._unknown_below, known_end)
        if not self._pending and log_end > self._log_end:  # none of ours is on its way there: someone else's
            self._unknown_below = self._log_end = log_end
            self._unknown_s = asked_s
        forget_s = asked_s - self._keep_s
        self._logged = [entry for entry in self._logged if entry.at_s > forget_s]
        if self._unknown_s <= forget_s:
            self._unknown_below = 0
        self._recount()
        return len(lost)

    def _settle(self, pending: Pending) -> None:
        self._pending.remove(pending)
        self._pending_bytes -= pending.nbytes

    def _recount(self) -> None:
        first_unread = bisect_left(self._logged, self._read_to, key=lambda entry: entry.offset)
        self._unread_bytes = sum(entry.nbytes for entry in self._logged[first_unread:])
