"""Who owns which lane, as the workers themselves say on `worker-status`.

The order of the topic is the order of the statements; a status is as old as the time since *this* process received it,
so no clock but our own counts. Feed it live statuses only (a tail from the topic's end): one that was already there
when we started may be of any age. Knows nothing of budgets or admission.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from relaygr_stream.errors import DecodeError
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.messages import LaneStatus, WorkerStatus
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.worker_status import StatusReader, Tombstone

_log = structlog.get_logger(__name__)
_limited = LogLimiter().limited

#: A worker that stated nothing for this long is forgotten altogether. Far beyond any silence bound and any outage after
#: which the same incarnation could speak again (it may: a later status of it is taken like a first one), it only keeps
#: the directory from growing with every worker that ever lived.
FORGET_S: Final = 600.0
#: Names kept at once: twice as many as there can be lanes, since a worker started anew may have a new name. Beyond, the
#: one that is silent longest is forgotten for each new one.
MAX_NAMES: Final = 20_000


class Claim(msgspec.Struct, frozen=True):  # one a lane for every status; a frozen dataclass takes four times as long
    """A worker's newest status, as it concerns one lane."""

    worker: WorkerStatus
    lane: LaneStatus
    received_s: float  # our monotonic clock

    def age_ms(self, now_s: float) -> float:
        """Milliseconds since we received it."""
        return max(0.0, (now_s - self.received_s) * 1000.0)


@dataclass(frozen=True, slots=True)
class _Worker:
    status: WorkerStatus
    received_s: float
    order: int
    claims: dict[int, Claim]


class OwnerDirectory:
    """Lane → the newest claim of its present owner.

    Of two incarnations of one name the later one counts that serves: one that only starts, or ends, takes nothing from
    another that serves. Only a `serving` worker owns lanes. Of two workers that claim one lane, the one whose status is
    the newer in the topic owns it. A tombstone removes a name.

    silence_ms: an owner that stated nothing for longer is no owner. on_unreadable: called for each status that cannot
    be read, on_unsigned for each that its reader does not believe; they are skipped.
    """

    def __init__(
        self,
        silence_ms: float,
        on_unreadable: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        reader: StatusReader | None = None,
        on_unsigned: Callable[[], object] = lambda: None,
    ) -> None:
        self._silence_ms = silence_ms
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._owners: dict[int, Claim] = {}
        self._order = 0
        self._heard_s = -math.inf
        self._on_unreadable = on_unreadable
        self._on_unsigned = on_unsigned
        self._reader = reader or StatusReader()

    def on_records(self, records: Iterable[Record]) -> None:
        """Take records of `worker-status`, in the topic's order; unreadable ones are skipped."""
        for record in records:
            try:
                found = self._reader.read(record)
            except DecodeError as error:
                (self._on_unsigned if error.reason == "unsigned" else self._on_unreadable)()
                _limited(_log.warning, error.reason)(
                    "worker status unsigned" if error.reason == "unsigned" else "worker status unreadable",
                    worker=(record.key or b"").decode(errors="replace"),
                    reason=error.reason,
                    detail=error.detail,
                    offset=record.offset,
                )
                continue
            if isinstance(found, Tombstone):
                self._remove(found)
            elif found is not None and not self._is_replay(found):
                self.take(found)

    def take(self, status: WorkerStatus) -> None:
        """Take one status as received now."""
        now = self._clock()
        known = self._workers.get(status.name)
        if known is not None and not self._supersedes(status, known, now):
            return
        self._order += 1
        self._heard_s = now
        serving = status.state == "serving"
        claims = {lane.lane: Claim(status, lane, now) for lane in status.lanes} if serving else {}
        self._workers[status.name] = _Worker(status, now, self._order, claims)
        self._owners.update(claims)
        for lane in known.claims if known is not None else ():
            if lane not in claims and self._owners[lane].worker.name == status.name:
                self._give_to_newest(lane)
        if known is None:
            self._forget(now)

    def owner(self, lane: int, silence_ms: float | None = None) -> Claim | None:
        """The newest claim of the lane's present owner; None if nobody owns it or the owner is silent.

        silence_ms: in place of the directory's own bound.
        """
        claim = self._owners.get(lane)
        bound_ms = self._silence_ms if silence_ms is None else silence_ms
        return claim if claim is not None and claim.age_ms(self._clock()) <= bound_ms else None

    @property
    def speaking(self) -> bool:
        """Whether any worker is not silent."""
        return (self._clock() - self._heard_s) * 1000.0 <= self._silence_ms

    def workers(self, silence_ms: float | None = None) -> dict[str, WorkerStatus]:
        """The newest status of every worker that is not silent; silence_ms as for `owner`."""
        horizon = self._clock() - (self._silence_ms if silence_ms is None else silence_ms) / 1000.0
        return {name: worker.status for name, worker in self._workers.items() if worker.received_s >= horizon}

    def some(self, most: int, choice: random.Random) -> list[WorkerStatus]:
        """As `workers`, of so many chosen at random: for who asks often and needs one that will do."""
        horizon = self._clock() - self._silence_ms / 1000.0
        speaking = [worker for worker in self._workers.values() if worker.received_s >= horizon]
        return [w.status for w in (speaking if len(speaking) <= most else choice.sample(speaking, most))]

    def _give_to_newest(self, lane: int) -> None:
        claimants = [worker for worker in self._workers.values() if lane in worker.claims]
        if claimants:
            self._owners[lane] = max(claimants, key=lambda worker: worker.order).claims[lane]
        else:
            del self._owners[lane]

    def _supersedes(self, status: WorkerStatus, known: _Worker, now: float) -> bool:
        """Whether a status counts from now on in place of the one known of its name."""
        if status.incarnation == known.status.incarnation:
            return True
        silent = (now - known.received_s) * 1000.0 > self._silence_ms
        serves, served = status.state == "serving", known.status.state == "serving"
        return serves if serves != served and not silent else status.incarnation > known.status.incarnation

    def _is_replay(self, status: WorkerStatus) -> bool:
        """A signed status that was written before: signed ones of one incarnation have rising times."""
        known = self._workers.get(status.name)
        return (
            self._reader.signer is not None
            and known is not None
            and known.status.incarnation == status.incarnation
            and known.status.sent_ms >= status.sent_ms
        )

    def _remove(self, tombstone: Tombstone) -> None:
        """An incarnation that is not the one we know has not been heard of here, or not any more. Of a signed
        tombstone without one nobody can tell whose it was."""
        known = self._workers.get(tombstone.name)
        incarnation = tombstone.incarnation
        if known is None or (incarnation is None and self._reader.signer is not None):
            return
        if incarnation is None or known.status.incarnation == incarnation:
            self._drop(tombstone.name)

    def _forget(self, now: float) -> None:
        for name in [name for name, worker in self._workers.items() if now - worker.received_s > FORGET_S]:
            self._drop(name)
        if len(self._workers) > MAX_NAMES:
            self._drop(min(self._workers, key=lambda name: self._workers[name].received_s))

    def _drop(self, name: str) -> None:
        for lane in self._workers.pop(name).claims:
            if self._owners[lane].worker.name == name:
                self._give_to_newest(lane)
