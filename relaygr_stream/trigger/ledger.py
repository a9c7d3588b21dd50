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
from typing import Final, NamedTuple

from relaygr_stream.wire.messages import LaneStatus

#: Only signals acknowledged at least this long before we asked for the log's end are taken for lost when they lie
#: behind it: the end may lag behind an acknowledgement while partition leadership moves, by milliseconds.
SETTLE_S: Final = 2.0


@dataclass(eq=False, slots=True)
class Pending:
    """A signal handed to the producer, not yet acknowledged."""

    nbytes: int
    failed_s: float | None = None  # when the producer gave up: it may or may not be in the log


class _Logged(NamedTuple):
    offset: int
    nbytes: int
    at_s: float
    batch: int  # the offset at which its batch begins


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

    def acknowledged(self, pending: Pending, offset: int, now_s: float, batch: int | None = None) -> None:
        """The signal is in the log at this offset. batch: where the batch begins that it is in; None: it is alone."""
        self._settle(pending)
        if offset > self._log_end:  # someone else's signals lie in between
            self._unknown_below, self._unknown_s = offset, now_s
        self._log_end = max(self._log_end, offset + 1)
        logged = _Logged(offset, pending.nbytes, now_s, offset if batch is None else batch)
        if not self._logged or offset > self._logged[-1].offset:
            self._logged.append(logged)
        else:
            insort(self._logged, logged)
        if offset >= self._read_to:
            self._unread_bytes += pending.nbytes

    def failed(self, pending: Pending, now_s: float) -> None:
        """The producer gave up. The signal may be in the log all the same: it counts until `reconcile`."""
        pending.failed_s = now_s

    def reconcile(self, log_end: int, asked_s: float) -> int:
        """Compare with the log's true end, as asked for at asked_s; returns how many signals turned out lost.

        Without this, signals that the log lost (a crashed broker, a topic made anew) would count for ever, since
        nobody can read them. A failed one is below this end or nowhere. A log has a batch whole or not at all; an end
        in the middle of one (the embedded broker says that the log ends behind the first of the last batch) is
        somewhat early, and nothing of that batch is lost.
        """
        settled_s, forget_s = asked_s - SETTLE_S, asked_s - self._keep_s
        if (
            log_end == self._log_end
            and not self._pending
            and (not self._logged or self._logged[0].at_s > forget_s)
            and (not self._unknown_below or self._unknown_s > forget_s)
        ):
            return 0  # as known: so most lanes are, most of the time
        # The log keeps a minute of signals: only what lies behind its end, or in the past, is looked at.
        behind = self._logged[self._index(log_end) :]
        kept = [entry for entry in behind if entry.at_s > settled_s or entry.batch < log_end]
        if behind:
            self._logged[-len(behind) :] = kept
        for pending in [p for p in self._pending if p.failed_s is not None and p.failed_s <= settled_s]:
            self._settle(pending)
            if log_end > 0:
                insort(self._logged, _Logged(log_end - 1, pending.nbytes, asked_s, log_end - 1))
        known_end = max(log_end, self._logged[-1].offset + 1 if self._logged else 0)
        self._log_end = min(self._log_end, known_end)
        self._unknown_below = min(self._unknown_below, known_end)
        if not self._pending and log_end > self._log_end:  # none of ours is on its way there: someone else's
            self._unknown_below = self._log_end = log_end
            self._unknown_s = asked_s
        forgotten = 0  # they were acknowledged in about the order of their offsets
        while forgotten < len(self._logged) and self._logged[forgotten].at_s <= forget_s:
            forgotten += 1
        del self._logged[:forgotten]
        if self._unknown_s <= forget_s:
            self._unknown_below = 0
        self._recount()
        return len(behind) - len(kept)

    def _settle(self, pending: Pending) -> None:
        self._pending.remove(pending)
        self._pending_bytes -= pending.nbytes

    def _recount(self) -> None:
        self._unread_bytes = sum(entry.nbytes for entry in self._logged[self._index(self._read_to) :])

    def _index(self, offset: int) -> int:
        """Where the signals at this offset and beyond begin."""
        return bisect_left(self._logged, offset, key=lambda entry: entry.offset)
