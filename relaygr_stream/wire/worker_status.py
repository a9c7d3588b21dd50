"""Reads records of `worker-status`: verifies signatures if a secret is set, and bounds every number and text.

Triggers calculate with a status, and a name's incarnation only grows. So a status is refused if it could defeat a
trigger's bound, block a worker's name for good, or fill a reader's memory.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

import msgspec

from relaygr_stream.errors import DecodeError
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.clocks import Clock
from relaygr_stream.wire.codec import MAX_MESSAGE_BYTES, decode
from relaygr_stream.wire.messages import CostModel, LaneStatus, WorkerStatus
from relaygr_stream.wire.records import Record, kind_of
from relaygr_stream.wire.signature import Headers, Signer
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.wire.versions import VersionedDecoder

S = TypeVar("S", bound=msgspec.Struct)

#: Header of a tombstone: the incarnation that it removes, in ASCII decimal.
HEADER_INCARNATION: Final = "relaygr-incarnation"
#: Most lanes of any cluster (kafka.partitions); a reader that knows its topics uses their count.
MAX_LANES: Final = 10_000
#: An incarnation is the start's Unix time in nanoseconds, or one more than the last of its name. An incarnation further
#: ahead of this reader's clock is refused: otherwise no later start of that name would count.
MAX_AHEAD_S: Final = 86_400.0
#: A signed status further from this reader's clock is refused: it may be an old record, written again. Clocks that NTP
#: keeps differ by milliseconds.
MAX_SKEW_S: Final = 60.0
#: A petabyte; sums of such numbers are still exact as floats.
MAX_BYTES: Final = 1 << 50
#: The largest offset of a Kafka log.
MAX_OFFSET: Final = (1 << 63) - 1
#: An hour, like every other time in a message.
MAX_MS: Final = 3.6e6
#: A worker states about 50 counters; this leaves room for later releases. A reader keeps some 130 bytes for each.
MAX_COUNTERS: Final = 128
#: Bytes of a status beside its lanes. With every text as long as it may be, today's takes 7 KiB, of which 2 KiB are
#: counters; without, 3 KiB.
BASE_BYTES: Final = 12 << 10
#: Bytes for each lane that a status states: today's has 128 with the largest numbers.
LANE_BYTES: Final = 160
#: Bytes for each scenario of a group that serves several: today's has 1,400 with the largest numbers.
SCENARIO_BYTES: Final = 2 << 10
#: Most names kept, for each lane of the cluster: a restarted worker may have a new name. A small cluster has room for
#: LEAST_NAMES, because spare workers have no lanes.
NAMES_PER_LANE: Final = 2
LEAST_NAMES: Final = 1000
#: The counter of the bytes that are pinned on other workers' behalf now: with WorkerStatus.delegated_bytes, the whole
#: room for them.
DELEGATED_PINNED: Final = "delegated_pinned_bytes"
#: The counter of rankings with scores that the worker answered within their scenario's SLO of reading them.
WITHIN_SLO: Final = "within_slo"
#: The counter of the milliseconds for which brokers have throttled the worker by quotas, since its start.
THROTTLED_MS: Final = "throttled_ms"
#: Longest text in a status, in characters: host names have at most 255.
MAX_TEXT: Final = 300


class Tombstone(NamedTuple):
    """Removes a worker's name: it stopped in order, or an operator removed it."""

    name: str
    incarnation: int | None  # the incarnation that is removed; None: any


def rising_ms(last_ms: int, clock_ms: int) -> int:
    """The time that a status states behind one with last_ms: a signed one that does not rise counts as written again.

    Behind a clock that was ahead, and is right again, it is as far ahead as readers believe.
    """
    return max(clock_ms, min(last_ms + 1, clock_ms + int(MAX_SKEW_S * 1000)))


class StatusReader:
    """Reads worker statuses from records.

    lanes: the cluster's number of lanes. signer: records without its valid signature are refused as `unsigned`; None:
    signatures are not checked. max_bytes: longest status. wall: the clock, in Unix seconds.
    """

    def __init__(
        self,
        lanes: int = MAX_LANES,
        signer: Signer | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
        wall: Clock = time.time,
    ) -> None:
        self._lanes = lanes
        self.signer = signer
        self._max_bytes = max_bytes
        self._wall = wall
        self.most_names = max(LEAST_NAMES, NAMES_PER_LANE * lanes)

    @classmethod
    def from_settings(cls, settings: Settings, topics: TopicSet) -> StatusReader:
        """The reader for these settings and topics. Lanes may have grown further than is known here."""
        reader = cls(MAX_LANES, Signer.from_settings(settings.handover), topics.worker_status.max_message_bytes)
        reader.most_names = max(LEAST_NAMES, NAMES_PER_LANE * topics.lanes)
        return reader

    async def prepare(self) -> None:
        """Derive the signatures' keys on a thread; without this the first record blocks the loop: 0.6 s a secret."""
        if self.signer is not None:
            await asyncio.to_thread(self.signer.prepare)

    def signed(self, topic: str, key: bytes, value: bytes | None, headers: Headers = ()) -> list[tuple[str, bytes]]:
        """The headers of a record that is to be sent, with its signature if the fleet has a secret."""
        return list(headers) if self.signer is None else self.signer.sign(topic, key, value, headers)

    def read(self, record: Record, *, fresh: bool = True) -> WorkerStatus | Tombstone | None:
        """The worker's status or tombstone in a record; None for another kind of record.

        fresh: also refuse a signed status with an old time; False for records written before this reader started.
        Raises DecodeError, with reason `unsigned` if the signature is missing or wrong, or the signed record is old.
        """
        if kind_of(record.headers):
            return None
        self.verify(record)
        name = (record.key or b"").decode(errors="replace")
        if record.value is None:
            return Tombstone(name, _incarnation(record))
        status = decode(WorkerStatus, record.value, self._max_bytes)
        self._check(status)
        most = BASE_BYTES + LANE_BYTES * len(status.lanes) + SCENARIO_BYTES * len(status.scenarios or ())
        if len(record.value) > most:
            stated = f"{len(record.value)} bytes with {len(status.lanes)} lanes"
            raise DecodeError("oversized", f"{stated}, the limit is {most}")
        if status.name != name:
            raise DecodeError("invalid", f"the key is {name[:MAX_TEXT]!r}, the status that of {status.name!r}")
        if fresh:
            self.check_fresh(status.sent_ms)
        return status

    def other(self, record: Record, kind: str, decoder: VersionedDecoder[S]) -> S | None:
        """The message in a record of another kind than statuses; None for a tombstone, or a record of no such kind.

        Raises DecodeError, with reason `unsigned` if the signature is missing or wrong.
        """
        if kind_of(record.headers) != kind or record.value is None:
            return None
        self.verify(record)
        return decoder.decode(record.value)

    def removes(self, tombstone: Tombstone, status: WorkerStatus) -> bool:
        """Whether the tombstone removes the worker with this newest status: another incarnation stays.

        With signatures, a tombstone without an incarnation is ignored: it may be an old one, written again.
        """
        if tombstone.incarnation is None:
            return self.signer is None
        return tombstone.incarnation == status.incarnation

    def verify(self, record: Record) -> None:
        """Raise DecodeError `unsigned` unless the signature is valid or no secret is set."""
        if self.signer is not None and not self.signer.verifies(record):
            raise DecodeError("unsigned", "no signature, or not one made with handover.secret")

    def is_fresh(self, sent_ms: int, late_s: float = MAX_SKEW_S) -> bool:
        """Whether a clock that agrees with ours may have stated this time just now, or so many seconds ago."""
        return -MAX_SKEW_S <= self._wall() - sent_ms / 1e3 <= late_s

    def check_fresh(self, sent_ms: int, late_s: float = MAX_SKEW_S) -> None:
        """Raise DecodeError `unsigned` if the signed time is not fresh: the record may be written again."""
        if self.signer is not None and not self.is_fresh(sent_ms, late_s):
            age_s = self._wall() - sent_ms / 1e3
            when, most_s = ("before", late_s) if age_s > 0 else ("after", MAX_SKEW_S)
            raise DecodeError(
                "unsigned",
                f"stated {abs(age_s):.0f} s {when} now, by its sender's clock; believed up to {most_s:.0f} s {when}",
            )

    def _check(self, status: WorkerStatus) -> None:
        for name, value, least, most in self._bounds(status):
            if not least <= value <= most:  # neither is NaN
                raise DecodeError("invalid", f"{name} must be {least}…{most:g}, got {value}")
        for lane in status.lanes:
            if not self._within_bounds(lane):
                raise DecodeError("invalid", f"out of bounds, of {self._lanes} lanes: {lane}")
        if len({lane.lane for lane in status.lanes}) != len(status.lanes):
            raise DecodeError("invalid", "a lane is stated twice")
        for field in ("host", "device", "model_version", "model_note"):
            if len(getattr(status, field)) > MAX_TEXT:
                raise DecodeError("invalid", f"{field} has more than {MAX_TEXT} characters")
        if any(len(name) > MAX_TEXT for name in status.counters):
            raise DecodeError("invalid", f"the name of a counter has more than {MAX_TEXT} characters")

    def _within_bounds(self, lane: LaneStatus) -> bool:
        """Whether every number of a lane is within bounds; spelled out, since it runs thousands of times a second."""
        return (
            0 <= lane.lane < self._lanes
            and 0 <= lane.budget_bytes <= MAX_BYTES
            and 0 <= lane.pinned_bytes <= MAX_BYTES
            and 0 <= lane.pre_infer_offset <= MAX_OFFSET
            and 0 <= (lane.ranking_offset or 0) <= MAX_OFFSET
        )

    def _bounds(self, status: WorkerStatus) -> Iterator[tuple[str, float, float, float]]:
        """(name, value, least, most) of every number that a reader calculates with."""
        ahead_ns = int((self._wall() + MAX_AHEAD_S) * 1e9)
        yield "incarnation", status.incarnation, 0, ahead_ns
        yield "lanes", len(status.lanes), 0, self._lanes
        yield "queue_ms", status.queue_ms, 0, MAX_MS
        yield "pre_infer_wait_ms", status.pre_infer_wait_ms, 0, MAX_MS
        yield "head_start_ms", status.head_start_ms, 0, MAX_MS
        yield "busy_share", status.busy_share, 0, 1
        yield "lag", status.lag, 0, MAX_OFFSET
        yield "counters", len(status.counters), 0, MAX_COUNTERS
        least = 1 if status.lanes else 0  # a worker without lanes may have no model yet
        yield "bytes_per_token", status.bytes_per_token, least, MAX_BYTES
        yield "alloc_bytes", status.alloc_bytes, least, MAX_BYTES
        for field in ("hbm_used_bytes", "hbm_bytes", "dram_used_bytes", "dram_bytes", "delegated_bytes"):
            yield field, getattr(status, field), 0, MAX_BYTES
        for name, total in status.counters.items():
            yield f"counter {name[:MAX_TEXT]!r}", total, -sys.float_info.max, sys.float_info.max


def _incarnation(record: Record) -> int | None:
    """The incarnation in a tombstone's header; None if absent, -1, which matches none, if malformed."""
    text = dict(record.headers).get(HEADER_INCARNATION)
    if text is None:
        return None
    return int(text) if text.isdigit() and len(text) <= len(str(MAX_OFFSET)) else -1


def worker_statuses(records: Iterable[Record]) -> Iterator[WorkerStatus]:
    """The worker statuses among records, signed or not, of any age; for viewers only. Other and unreadable records are
    skipped."""
    for record in records:
        if not kind_of(record.headers):
            with suppress(DecodeError):
                yield decode(WorkerStatus, record.value)


# ---- the predicted cost of a request, from its owner's status ----

#: Costs of a worker that has measured nothing yet (all its coefficients are zero) or whose fit is unusable: the
#: built-in HSTU (4 layers, D = 128, H·dqk = H·dv = 128) at 50 GFLOP/s, a slow CPU core. Projections: 0.9 MFLOP a token
#: or candidate; attention among n tokens: 1,024·n² FLOP; of m candidates to n tokens: 2,048·n·m. They overestimate any
#: accelerator: an unnecessary pre-inference, which the load bound limits, is better than a missed SLO.
FALLBACK_COSTS: Final = CostModel(c0=1.0, c1=0.02, c2=2e-5, c3=4e-5, c4=0.02)
#: Upper bound of a coefficient: an hour per token, or per token squared, is not a measurement. It keeps sums of
#: products with token counts finite: infinity times 0 is NaN, which passes any bound.
MAX_COEFFICIENT: Final = 3.6e6


def usable_costs(costs: CostModel) -> CostModel:
    """The stated costs if all coefficients are finite, within bounds and not all zero, else FALLBACK_COSTS."""
    coefficients = (costs.c0, costs.c1, costs.c2, costs.c3, costs.c4)
    for coefficient in coefficients:
        if not 0 <= coefficient <= MAX_COEFFICIENT:
            return FALLBACK_COSTS
    return costs if any(coefficients) else FALLBACK_COSTS


class Room(NamedTuple):
    """Bytes that a worker's lanes have pinned together, and may have."""

    pinned: int
    budget: int

    @classmethod
    def from_status(cls, owner: WorkerStatus) -> Room:
        """As its status says."""
        return cls(sum(lane.pinned_bytes for lane in owner.lanes), sum(lane.budget_bytes for lane in owner.lanes))


def prefix_bytes(tokens: int, owner: WorkerStatus) -> int:
    """HBM bytes of a prefix KV of `tokens` on that worker, rounded up to allocation units."""
    return counted_bytes(tokens, owner.bytes_per_token, owner.alloc_bytes)


def counted_bytes(tokens: int, bytes_per_token: int, alloc_bytes: int) -> int:
    """As prefix_bytes, of a worker that states these numbers."""
    return -(-tokens * bytes_per_token // alloc_bytes) * alloc_bytes
