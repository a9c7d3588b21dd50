"""The fleet as its statuses on `worker-status` tell it: the owner of each lane, what we sent to whom, and the choice of
another worker.

Statuses are ordered as in the topic. A status's age is the time since *this* process received it, so other machines'
clocks do not matter. Feed only live statuses (a tail from the topic's end): an older record may be of any age.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import structlog
from prometheus_client import Counter

from relaygr_stream.errors import DecodeError
from relaygr_stream.telemetry.clocks import Clock
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.messages import LaneStatus, WorkerStatus
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.worker_status import StatusReader, Tombstone

T = TypeVar("T")

# What workers that forward and triggers that delegate go by, when they choose another worker by the statuses.

#: A message to another worker and its answer go through a broker, 5 ms each at P99.
TRAVEL_MS: Final = 10.0
#: Peers looked at for one request, chosen at random: where every fifth has room, 3 of 100 searches find none.
#: Looking at all of 100 took 0.8 ms, which a hot lane's refusals would take from the loop hundreds of times a second.
LOOKED_AT: Final = 16
#: What we sent to a peer is dropped when the peer was not looked at for so long: it is done, or the peer is gone.
FORGET_S: Final = 60.0
#: Signals to one owner that are remembered: more than a trigger sends between two statuses.
MOST_SENT: Final = 4096
#: Forwarded rankings fill a peer's device up to this share; the rest is how much its own load varies in a second.
FULL_SHARE: Final = 0.85
#: A peer with less to spare gets nothing: an average over a second does not tell so small a share from none.
LEAST_SPARE: Final = 0.05

#: Status intervals after which every live worker has stated itself to a new reader.
STATUS_PERIODS: Final = 2

_log = structlog.get_logger(__name__)
_limited = LogLimiter().limited

#: A worker that has stated nothing for this long is dropped, so that the directory does not grow with every worker that
#: ever ran. It is far above any silence bound and any outage of one incarnation. If a dropped worker returns, its
#: status counts as a first one.
DROP_AFTER_S: Final = 600.0


def draw_sample(things: Sequence[T], choice: random.Random, most: int = LOOKED_AT) -> list[T]:
    """At most so many of them, chosen at random if there are more."""
    return list(things) if len(things) <= most else choice.sample(things, most)


def better_of_two(found: Sequence[tuple[float, T]], choice: random.Random) -> list[tuple[float, T]]:
    """Two of them at random, the sooner first; all of them where there are fewer. found: each with its milliseconds.

    Every choice of another worker is this one, among those that will be in time: forwarding, delegation, hedges. Until
    the next status all who choose would find the same worker the best of all (Mitzenmacher, The Power of Two Choices).
    """
    return sorted(choice.sample(found, min(2, len(found))), key=itemgetter(0))


# What this process sent to other workers lately, whose newest statuses may not know of it yet.


@dataclass(slots=True)
class SentRankings:
    """Rankings in full, in milliseconds of the worker's device by its own costs.

    They count until they are worked off in what the worker has to spare: its stated queue is a mean, and says nothing
    of one ranking.
    """

    at_s: float  # when it was looked at last
    status: WorkerStatus | None = None  # the worker's newest then
    spare: float = 0.0  # share of its device that others' rankings may use, as of that status
    waiting_ms: float = 0.0  # sent and not worked off yet
    lately_ms: float = 0.0  # a sum of what was sent that fades as the worker's own average does
    stated_ms: float = 0.0  # the same as of that status

    def advance(self, status: WorkerStatus, average_s: float, now_s: float) -> None:
        """Let time pass: the worker works off what it has room for. average_s: it averages its busy share over this."""
        seconds, before = max(0.0, now_s - self.at_s), self.spare
        self.at_s = now_s
        self.lately_ms *= math.exp(-seconds / average_s)
        if status is not self.status:
            # Its busy share includes our rankings, but not those that we sent since its last status.
            ours = min(self.lately_ms, self.stated_ms) / (average_s * 1e3)
            self.status, self.stated_ms = status, self.lately_ms
            self.spare = min(FULL_SHARE, max(0.0, FULL_SHARE + ours - status.busy_share))
        # Its spare share changed at some time in between: count on the smaller one.
        self.waiting_ms = max(0.0, self.waiting_ms - min(before, self.spare) * seconds * 1e3)

    def send(self, ms: float) -> None:
        """Count a ranking that takes so long there."""
        self.waiting_ms += ms
        self.lately_ms += ms

    @property
    def ahead_ms(self) -> float:
        """Milliseconds until they are done, as of `advance`; infinite for a worker without time to spare."""
        return math.inf if self.spare < LEAST_SPARE else self.waiting_ms / self.spare


class _Signal(NamedTuple):
    at_s: float
    ms: float
    nbytes: int
    delegated: bool


class Ahead(NamedTuple):
    """What a worker has before it. ms: until it has finished its stated queue and the signals sent since its status;
    own_bytes, delegated_bytes: the prefix KV of those signals, for its lanes' users and for other workers'."""

    ms: float
    own_bytes: int
    delegated_bytes: int


class SentSignals:
    """Signals. Each counts until the worker's next status, whose queue and pinned bytes have it."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s  # when it was used last
        self._sent: deque[_Signal] = deque(maxlen=MOST_SENT)

    def send(self, ms: float, nbytes: int, now_s: float, *, delegated: bool) -> None:
        """Count a signal that takes so long there, and whose prefix KV take so many bytes. delegated: for another
        worker's user."""
        self.at_s = now_s
        self._sent.append(_Signal(now_s, ms, nbytes, delegated))

    def ahead(self, claim: Claim, now_s: float) -> Ahead:
        """What the worker has before it, by its newest claim. Drops older signals."""
        self.at_s, sent = now_s, self._sent
        while sent and sent[0].at_s < claim.received_s - TRAVEL_MS / 1e3:
            sent.popleft()
        done_s = claim.received_s + claim.worker.pre_infer_wait_ms / 1e3
        nbytes = [0, 0]
        for each in sent:
            done_s = max(done_s, each.at_s) + each.ms / 1e3
            nbytes[each.delegated] += each.nbytes
        return Ahead(max(0.0, (done_s - now_s) * 1e3), *nbytes)


B = TypeVar("B", SentRankings, SentSignals)


class Books(Generic[B]):
    """A book for each worker to which this process sends. Those that were not used for FORGET_S are dropped."""

    def __init__(self, kind: type[B]) -> None:
        self._kind: Final[type[B]] = kind
        self._books: dict[str, B] = {}

    def of_worker(self, name: str, now_s: float) -> B:
        """The worker's book; a new one if there is none."""
        found = self._books.get(name)
        if found is None:
            self._books = {name: book for name, book in self._books.items() if now_s - book.at_s <= FORGET_S}
            found = self._books[name] = self._kind(now_s)
        return found


class Claim(msgspec.Struct, frozen=True):  # one a lane for every status; a frozen dataclass takes four times as long
    """A worker's newest status and its statement on one lane."""

    worker: WorkerStatus
    lane: LaneStatus
    received_s: float  # by this process's monotonic clock

    def age_ms(self, now_s: float) -> float:
        """Milliseconds since this process received it."""
        return max(0.0, (now_s - self.received_s) * 1000.0)


@dataclass(frozen=True, slots=True)
class _Worker:
    status: WorkerStatus
    received_s: float
    order: int
    claims: dict[int, Claim]


class Leaders(Protocol):
    """Knows which partitions of a topic have a leader; bus/producer.py's TopicLeaders does."""

    def has_leader(self, partition: int) -> bool:
        """False if the partition is known to have no leader."""


class StatusMetrics(Protocol):
    """Counts the worker statuses that a process skips."""

    statuses_unreadable: Counter
    statuses_unsigned: Counter


class OwnerDirectory:
    """Lane → the newest claim of its current owner.

    Beyond the reader's `most_names`, a new name replaces the one that has been silent longest.

    Of two incarnations of one name, the later serving one counts: an incarnation that starts or ends does not replace
    one that serves, and a silent one gives way to any. Only a `serving` worker owns lanes. If two workers claim one
    lane, the one with the newer status in the topic owns it. A tombstone removes a name.

    silence_ms: an owner that has stated nothing for longer does not count. metrics: count the statuses that cannot be
    decoded, and those without a valid signature, which are skipped.
    """

    def __init__(
        self,
        silence_ms: float,
        metrics: StatusMetrics | None = None,
        clock: Clock = time.monotonic,
        reader: StatusReader | None = None,
    ) -> None:
        self._silence_ms = silence_ms
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._owners: dict[int, Claim] = {}
        self._order = 0
        self._heard_s = -math.inf
        self._metrics = metrics
        self._reader = reader or StatusReader()

    def on_records(self, records: Iterable[Record]) -> None:
        """Apply records of `worker-status`, in the topic's order; unreadable ones are skipped."""
        for record in records:
            try:
                found = self._reader.read(record)
            except DecodeError as error:
                unsigned = error.reason == "unsigned"
                if (metrics := self._metrics) is not None:
                    (metrics.statuses_unsigned if unsigned else metrics.statuses_unreadable).inc()
                _limited(_log.warning, error.reason)(
                    "worker status unsigned" if unsigned else "worker status unreadable",
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
        """Apply one status as received now."""
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
            self._drop_expired(now)

    def owner(self, lane: int, silence_ms: float | None = None) -> Claim | None:
        """The newest claim of the lane's current owner; None if it has none or the owner is silent.

        silence_ms: replaces the directory's own bound.
        """
        claim = self._owners.get(lane)
        bound_ms = self._silence_ms if silence_ms is None else silence_ms
        return claim if claim is not None and claim.age_ms(self._clock()) <= bound_ms else None

    @property
    def speaking(self) -> bool:
        """Whether any worker is not silent."""
        return (self._clock() - self._heard_s) * 1000.0 <= self._silence_ms

    @property
    def serves(self) -> bool:
        """Whether any worker is not silent, and some worker owns a lane."""
        return bool(self._owners) and self.speaking

    def workers(self, silence_ms: float | None = None) -> dict[str, WorkerStatus]:
        """The newest status of every worker that is not silent; silence_ms as for `owner`."""
        horizon = self._clock() - (self._silence_ms if silence_ms is None else silence_ms) / 1000.0
        return {name: worker.status for name, worker in self._workers.items() if worker.received_s >= horizon}

    def lanes_of(self, name: str) -> tuple[WorkerStatus, list[int]] | None:
        """A serving worker's newest status, and its lanes that no other worker claimed since; None: silent, or none."""
        known = self._workers.get(name)
        if known is None or (self._clock() - known.received_s) * 1000.0 > self._silence_ms:
            return None
        lanes = [lane for lane in known.claims if self._owners[lane].worker.name == name]
        return (known.status, lanes) if lanes else None

    def sample_workers(self, choice: random.Random, silence_ms: float | None = None) -> list[WorkerStatus]:
        """At most LOOKED_AT of `workers`, chosen at random: for frequent callers that need any suitable worker."""
        return draw_sample(list(self.workers(silence_ms).values()), choice)

    def _give_to_newest(self, lane: int) -> None:
        claimants = [worker for worker in self._workers.values() if lane in worker.claims]
        if claimants:
            self._owners[lane] = max(claimants, key=lambda worker: worker.order).claims[lane]
        else:
            del self._owners[lane]

    def _supersedes(self, status: WorkerStatus, known: _Worker, now: float) -> bool:
        """Whether a status replaces the known one of its name."""
        if status.incarnation == known.status.incarnation:
            return True
        if (now - known.received_s) * 1000.0 > self._silence_ms:
            return True  # even an earlier one: its predecessor ran on a clock that was ahead, and is gone
        serves, served = status.state == "serving", known.status.state == "serving"
        return serves if serves != served else status.incarnation > known.status.incarnation

    def _is_replay(self, status: WorkerStatus) -> bool:
        """Whether a signed status is an old one, written again: one incarnation's signed statuses have rising times."""
        known = self._workers.get(status.name)
        return (
            self._reader.signer is not None
            and known is not None
            and known.status.incarnation == status.incarnation
            and known.status.sent_ms >= status.sent_ms
            and self._reader.is_fresh(known.status.sent_ms)  # else from a clock that was wrong, maybe ours
        )

    def _remove(self, tombstone: Tombstone) -> None:
        known = self._workers.get(tombstone.name)
        if known is not None and self._reader.removes(tombstone, known.status):
            self._drop(tombstone.name)

    def _drop_expired(self, now: float) -> None:
        for name in [name for name, worker in self._workers.items() if now - worker.received_s > DROP_AFTER_S]:
            self._drop(name)
        if len(self._workers) > self._reader.most_names:
            self._drop(min(self._workers, key=lambda name: self._workers[name].received_s))

    def _drop(self, name: str) -> None:
        for lane in self._workers.pop(name).claims:
            if self._owners[lane].worker.name == name:
                self._give_to_newest(lane)
