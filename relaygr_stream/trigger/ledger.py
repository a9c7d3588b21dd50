"""The bytes that a lane's owner has pinned, plus those it will pin once it has read every signal.

The owner states pinned bytes P and the offset O up to which it has read the lane's signals. Every signal that it will
ever pin is counted in P or lies at an offset ≥ O, however old the statement is. So

    outstanding = P + bytes of signals at offsets ≥ O + bytes of signals not yet acknowledged by the broker

is never less than what the owner holds. Where outstanding + new would exceed the budget, summed over the owner's lanes
(load.py), a delegate is looked for; what is pinned the owner itself bounds. A signal leaves the sum when the owner has
read it, not after a time: time alone cannot tell a signal that is never read from one that is read, and pinned, later.

Signals of unknown size (of this lane's previous trigger, or of another writer) show as a gap between the log's end and
this trigger's next offset. The lane is on hold until the owner has read past them.

One ledger per lane; callers pass the time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Final, NamedTuple

from relaygr_stream.wire.messages import LaneStatus

#: A signal beyond the log's end counts as lost only if it was acknowledged at least this long before the end was asked
#: for: while partition leadership moves, the end may be milliseconds behind an acknowledgement.
SETTLE_S: Final = 2.0


@dataclass(eq=False, slots=True)
class Pending:
    """A signal handed to the producer, not yet acknowledged."""

    nbytes: int
    failed_s: float | None = None  # when the producer gave up; the signal may or may not be in the log


class _Logged(NamedTuple):
    offset: int
    nbytes: int
    at_s: float
    batch: int  # the first offset of its batch


class LaneLedger:
    """The signals of one lane that count against its owner's budget.

    log_end: the end of the lane's signal log when this trigger took the lane over, at now_s.
    keep_s: how long the log keeps a signal. The ledger keeps each signal that long, also after it is read: an owner's
    successor may start at an earlier offset. A signal not read within keep_s is never read.
    """

    def __init__(self, log_end: int, keep_s: float, now_s: float) -> None:
        self._log_end = log_end
        self._unknown_below = log_end
        self._unknown_s = now_s  # when signals of unknown size were last found
        self._keep_s = keep_s
        self._pending: set[Pending] = set()
        self._pending_bytes = 0
        self._logged: list[_Logged] = []  # by offset
        self._unread_bytes = 0  # of entries of _logged at offsets ≥ _read_to
        self._read_to = 0
        self._pinned_bytes = 0
        self._budget_bytes = 0

    @property
    def outstanding(self) -> int:
        """Bytes that the owner has pinned or will pin, signals of unknown size excluded."""
        return self._pinned_bytes + self._unread_bytes + self._pending_bytes

    @property
    def budget(self) -> int:
        """Pinned bytes that the owner grants the lane."""
        return self._budget_bytes

    @property
    def on_hold(self) -> bool:
        """Whether there may be unread signals of unknown size."""
        return self._read_to < self._unknown_below

    def observe(self, status: LaneStatus) -> None:
        """Apply the current owner's statement; the owner may have changed."""
        self._pinned_bytes = status.pinned_bytes
        self._budget_bytes = status.budget_bytes
        self._read_to = status.pre_infer_offset
        self._recount()

    def admit(self, nbytes: int) -> Pending:
        """Count a signal that is handed to the producer; the caller asked for its room before (load.py)."""
        pending = Pending(nbytes)
        self._pending.add(pending)
        self._pending_bytes += nbytes
        return pending

    def counts(self, pending: Pending) -> bool:
        """Whether this ledger counts the signal as handed on and not acknowledged."""
        return pending in self._pending

    def acknowledged(self, pending: Pending, offset: int, now_s: float, batch: int | None = None) -> None:
        """Record the signal at this offset of the log. batch: the first offset of its batch; None: a batch of one."""
        self._settle(pending)
        if offset > self._log_end:  # another writer's signals lie in between
            self._unknown_below, self._unknown_s = offset, now_s
        self._log_end = max(self._log_end, offset + 1)
        logged = _Logged(offset, pending.nbytes, now_s, offset if batch is None else batch)
        if not self._logged or offset > self._logged[-1].offset:
            self._logged.append(logged)
        else:
            insort(self._logged, logged)
        if offset >= self._read_to:
            self._unread_bytes += pending.nbytes

    def withdrawn(self, pending: Pending) -> None:
        """The signal was never handed on: it counts no longer."""
        self._settle(pending)

    def failed(self, pending: Pending, now_s: float) -> None:
        """Note that the producer gave up. The signal may still be in the log, so it counts until `reconcile`."""
        pending.failed_s = now_s

    def reconcile(self, log_end: int, asked_s: float) -> int:
        """Compare with the log's true end, as asked for at asked_s; returns the number of lost signals.

        Without this, signals that the log lost (a crashed broker, a recreated topic) would count for ever, since no
        owner reads them. A failed signal is below this end or not in the log. A log holds a batch completely or not at
        all. The embedded broker states an end inside its last batch; no signal of that batch is lost.
        """
        settled_s, expired_s = asked_s - SETTLE_S, asked_s - self._keep_s
        if (
            log_end == self._log_end
            and not self._pending
            and (not self._logged or self._logged[0].at_s > expired_s)
            and (not self._unknown_below or self._unknown_s > expired_s)
        ):
            return 0  # the common case
        # The log keeps a minute of signals: only signals beyond its end, and expired ones, are visited.
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
        if not self._pending and log_end > self._log_end:  # no signal of this trigger is pending: another writer's
            self._unknown_below = self._log_end = log_end
            self._unknown_s = asked_s
        expired = 0  # signals are acknowledged in about the order of their offsets
        while expired < len(self._logged) and self._logged[expired].at_s <= expired_s:
            expired += 1
        del self._logged[:expired]
        if self._unknown_s <= expired_s:
            self._unknown_below = 0
        self._recount()
        return len(behind) - len(kept)

    def _settle(self, pending: Pending) -> None:
        self._pending.remove(pending)
        self._pending_bytes -= pending.nbytes

    def _recount(self) -> None:
        self._unread_bytes = sum(entry.nbytes for entry in self._logged[self._index(self._read_to) :])

    def _index(self, offset: int) -> int:
        """Index in _logged of the first signal at this offset or beyond."""
        return bisect_left(self._logged, offset, key=lambda entry: entry.offset)
