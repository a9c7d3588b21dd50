"""Reads records of `worker-status` with care: signatures where a secret is set, bounds on every number and text.

A status is arithmetic for the triggers, and a name's incarnation is for ever: what would let a bound be computed away,
end a name for good or fill a memory is refused. Knows nothing of who owns what.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from relaygr_stream.errors import DecodeError
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.messages import MAX_MESSAGE_BYTES, LaneStatus, WorkerStatus, decode, kind_of
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.signature import Signer
from relaygr_stream.wire.topic_files import TopicSet, load_topics

#: Header of a tombstone: the incarnation, in ASCII decimal, that the name's records are removed up to.
HEADER_INCARNATION: Final = "relaygr-incarnation"
#: Lanes that any cluster may have (kafka.partitions); a reader that knows its topics takes fewer.
MAX_LANES: Final = 10_000
#: An incarnation is the start's time in nanoseconds, or one more than the last of its name. One further ahead of our
#: clock than this is refused: a start within that time is always later than all that were believed.
MAX_AHEAD_S: Final = 86_400.0
#: A signed status that is older or younger than this by our clock is not believed: it may be one that was recorded and
#: written again. Machines that keep time by NTP differ by milliseconds.
MAX_SKEW_S: Final = 60.0
#: Two to the power of 50: a petabyte, and far from where sums of it lose bits as a float.
MAX_BYTES: Final = 1 << 50
#: Of an offset, a Kafka log's largest.
MAX_OFFSET: Final = (1 << 63) - 1
#: An hour, as of every other time in a message.
MAX_MS: Final = 3.6e6
#: A second of a thousand devices.
MAX_DEVICE_MS_PER_S: Final = 1e6
#: A worker states some 50 counters; several versions' worth of them is no attack yet.
MAX_COUNTERS: Final = 512
#: Characters of a text that a status may have: host names have 255 at most.
MAX_TEXT: Final = 300


class Tombstone(NamedTuple):
    """A name's records are removed: it stopped in order, or an operator says so."""

    name: str
    incarnation: int | None  # and what it was; None: whatever it was


class StatusReader:
    """Records to worker statuses.

    lanes: so many the cluster has. signer: records that it does not verify are refused as `unsigned`. wall: Unix
    seconds.
    """

    def __init__(
        self,
        lanes: int = MAX_LANES,
        signer: Signer | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._lanes = lanes
        self.signer = signer
        self._max_bytes = max_bytes
        self._wall = wall

    @classmethod
    def of(cls, settings: Settings, topics: TopicSet | None = None) -> StatusReader:
        """As configured."""
        topics = topics or load_topics(settings.kafka)
        return cls(topics.lanes, Signer.of(settings.handover.secret), topics.worker_status.max_message_bytes)

    async def prepare(self) -> None:
        """Derive the key of signatures beside the loop; without this the first record waits for it."""
        if self.signer is not None:
            await asyncio.to_thread(self.signer.prepare)

    def read(self, record: Record, *, fresh: bool = True) -> WorkerStatus | Tombstone | None:
        """What the record states of a worker; None: it is about something else.

        fresh: it was written just now; not of records that were there before we started. Raises DecodeError, with
        reason `unsigned` where the signature is missing or wrong, or the signed record an old one.
        """
        if kind_of(record.headers):
            return None
        self.verify(record)
        name = (record.key or b"").decode(errors="replace")
        if record.value is None:
            return Tombstone(name, _incarnation(record))
        status = decode(WorkerStatus, record.value, self._max_bytes)
        self._check(status)
        if status.name != name:
            raise DecodeError("invalid", f"the key is {name[:MAX_TEXT]!r}, the status that of {status.name!r}")
        if fresh:
            self.check_fresh(status.sent_ms)
        return status

    def verify(self, record: Record) -> None:
        """Raise DecodeError `unsigned` unless who wrote the record has the secret, or there is none."""
        if self.signer is not None and not self.signer.verifies(record):
            raise DecodeError("unsigned", "no signature, or not one made with this handover.secret")

    def check_fresh(self, sent_ms: int) -> None:
        """Raise DecodeError `unsigned` where what was signed then may have been written again now."""
        off_s = abs(self._wall() - sent_ms / 1e3)
        if self.signer is not None and off_s > MAX_SKEW_S:
            raise DecodeError(
                "unsigned",
                f"stated {off_s:.0f} s from now by its sender's clock; clocks must agree within {MAX_SKEW_S:.0f} s",
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
        if status.computed_share == 0:
            raise DecodeError("invalid", "computed_share must be above 0")
        for field in ("host", "device", "model_version", "model_note"):
            if len(getattr(status, field)) > MAX_TEXT:
                raise DecodeError("invalid", f"{field} has more than {MAX_TEXT} characters")
        if any(len(name) > MAX_TEXT for name in status.counters):
            raise DecodeError("invalid", f"the name of a counter has more than {MAX_TEXT} characters")

    def _within_bounds(self, lane: LaneStatus) -> bool:
        """Every number of a lane's; there are thousands a second of these."""
        return (
            0 <= lane.lane < self._lanes
            and 0 <= lane.budget_bytes <= MAX_BYTES
            and 0 <= lane.pinned_bytes <= MAX_BYTES
            and 0 <= lane.pre_infer_offset <= MAX_OFFSET
            and 0 <= lane.device_ms_per_s <= MAX_DEVICE_MS_PER_S
        )

    def _bounds(self, status: WorkerStatus) -> Iterator[tuple[str, float, float, float]]:
        """(what, value, least, most) of every number that someone reckons with."""
        ahead_ns = int((self._wall() + MAX_AHEAD_S) * 1e9)
        yield "incarnation", status.incarnation, 0, ahead_ns
        yield "lanes", len(status.lanes), 0, self._lanes
        yield "queue_ms", status.queue_ms, 0, MAX_MS
        yield "pre_infer_wait_ms", status.pre_infer_wait_ms, 0, MAX_MS
        yield "busy_share", status.busy_share, 0, 1
        yield "computed_share", status.computed_share, 0, 1
        yield "lag", status.lag, 0, MAX_OFFSET
        yield "counters", len(status.counters), 0, MAX_COUNTERS
        least = 1 if status.lanes else 0  # a worker without lanes may not have a model yet
        yield "bytes_per_token", status.bytes_per_token, least, MAX_BYTES
        yield "alloc_bytes", status.alloc_bytes, least, MAX_BYTES
        for field in ("hbm_used_bytes", "hbm_bytes", "dram_used_bytes", "dram_bytes"):
            yield field, getattr(status, field), 0, MAX_BYTES
        for name, total in status.counters.items():
            yield f"counter {name[:MAX_TEXT]!r}", total, -sys.float_info.max, sys.float_info.max


def _incarnation(record: Record) -> int | None:
    """What a tombstone's header says; one that cannot be read is of no incarnation that there is."""
    text = dict(record.headers).get(HEADER_INCARNATION)
    if text is None:
        return None
    return int(text) if text.isdigit() and len(text) <= len(str(MAX_OFFSET)) else -1


def worker_statuses(records: Iterable[Record]) -> Iterator[WorkerStatus]:
    """The workers' statuses among records, for who only looks on: signed or not, of any age and size; what else there
    is, or cannot be read, is skipped."""
    for record in records:
        if not kind_of(record.headers):
            with suppress(DecodeError):
                yield decode(WorkerStatus, record.value)
