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

from relaygr_stream.bus.records import Record
from relaygr_stream.errors import DecodeError
from relaygr_stream.messages import LaneStatus, WorkerStatus, decode
from relaygr_stream.telemetry.limiter import LogLimiter

_log = structlog.get_logger(__name__)
_limited = LogLimiter().limited

#: A worker that stated nothing for this long is forgotten altogether. Far beyond any silence bound and any outage after
#: which the same incarnation could speak again (it may: a later status of it is taken like a first one), it only keeps
#: the directory from growing with every worker that ever lived.
FORGET_S: Final = 600.0


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

    Of two incarnations of one name the later one counts. Only a `serving` worker owns lanes. Of two workers that claim
    one lane, the one whose status is the newer in the topic owns it.

    silence_ms: an owner that stated nothing for longer is no owner. on_unreadable: called for each status that cannot
    be read; it is skipped.
    """

    def __init__(
        self,
        silence_ms: float,
        on_unreadable: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._silence_ms = silence_ms
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._owners: dict[int, Claim] = {}
        self._order = 0
        self._heard_s = -math.inf
        self._on_unreadable = on_unreadable

    def on_records(self, records: Iterable[Record]) -> None:
        """Take records of `worker-status`, in the topic's order; unreadable ones are skipped."""
        for record in records:
            try:
                status = decode(WorkerStatus, record.value)
                _refuse_nonsense(status)
            except DecodeError as error:
                self._on_unreadable()
                _limited(_log.warning, error.reason)(
                    "worker status unreadable",
                    worker=(record.key or b"").decode(errors="replace"),
                    reason=error.reason,
                    detail=error.detail,
                    offset=record.offset,
                )
                continue
            self.take(status)

    def take(self, status: WorkerStatus) -> None:
        """Take one status as received now."""
        now = self._clock()
        known = self._workers.get(status.name)
        if known is not None and known.status.incarnation > status.incarnation:
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

    def _forget(self, now: float) -> None:
        gone = [name for name, worker in self._workers.items() if now - worker.received_s > FORGET_S]
        for name in gone:
            claims = self._workers.pop(name).claims
            for lane in claims:
                if self._owners[lane].worker.name == name:
                    self._give_to_newest(lane)


def _refuse_nonsense(status: WorkerStatus) -> None:
    """A status is arithmetic for the triggers: refuse one that would let a bound be computed away."""
    numbers = {
        "queue_ms": status.queue_ms,
        "pre_infer_wait_ms": status.pre_infer_wait_ms,
        "busy_share": status.busy_share,
        **{f"device_ms_per_s of lane {lane.lane}": lane.device_ms_per_s for lane in status.lanes},
        **{f"pinned_bytes of lane {lane.lane}": lane.pinned_bytes for lane in status.lanes},
        **{f"pre_infer_offset of lane {lane.lane}": lane.pre_infer_offset for lane in status.lanes},
    }
    for name, value in numbers.items():
        if not (math.isfinite(value) and value >= 0):
            raise DecodeError("invalid", f"{name} must be finite and not negative, got {value}")
    if not 0 < status.computed_share <= 1:
        raise DecodeError("invalid", f"computed_share must be above 0 and at most 1, got {status.computed_share}")
    if status.lanes and (status.bytes_per_token < 1 or status.alloc_bytes < 1):
        raise DecodeError(
            "invalid",
            f"bytes_per_token and alloc_bytes must be ≥ 1, got {status.bytes_per_token}, {status.alloc_bytes}",
        )
