"""Replaces each unreadable record by a stand-in, so that reading continues behind it.

A producer or a broker's failing disk can make batches that aiokafka cannot read: with an unknown codec, of gigabytes
when unpacked, with a header name that is not UTF-8, with a flipped bit. aiokafka raises at such a batch again and
again, or in its own task. This module therefore replaces its unpacking, for this package's consumers only. A record
with too many headers (record_walk.py) is replaced, too. A stand-in has no value, so consumers send it to `dead-letter`
as any bad message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from types import FunctionType, MethodType
from typing import Any, Final, NamedTuple

import cramjam
import numpy as np
import structlog
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.consumer import fetcher as aiokafka_fetcher
from aiokafka.record.default_records import DefaultRecordBatch

from relaygr_stream.bus.record_walk import RefusedRecord, walk
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.records import HEADER_UNREADABLE

log = structlog.get_logger(__name__)
limited = LogLimiter().limited

#: Largest number of stand-ins for one batch; the last one names all records that follow it.
STAND_INS: Final = 1000
#: Largest unpacked batch: 16 times the default size limit of a topic, since texts shrink to a third or a tenth. Larger
#: ones are bombs: 300 MB of zeros are 30 KB of zstd.
UNPACKED_BYTES: Final = 16 * 1024 * 1024
#: Largest number of records of a batch. The smallest message has 60 bytes, so 1 MiB holds a quarter of this. Without a
#: bound, 1 MiB of zstd could make two million records of 500 bytes each in memory.
MOST_RECORDS: Final = 65_536

#: Kafka's record batch, version 2: base offset, length of the rest, leader epoch, magic, CRC, attributes, last offset
#: delta, two timestamps, producer's id and epoch, base sequence, number of records.
HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_OVERHEAD: Final = 12  # bytes of base offset and length, which the length does not count
_CODEC, _CONTROL = 0x07, 0x20  # bits of the attributes
_XERIAL: Final = b"\x82SNAPPY\0"  # start of the Java client's snappy: 16 bytes of header, then blocks with lengths
_XERIAL_HEADER: Final = 16


class Unreadable(Exception):
    """A batch cannot be read; the message says why."""


class BatchSpan(NamedTuple):
    """A batch's offsets by its header: base ≤ offset < end."""

    base: int
    end: int


class Batch(NamedTuple):
    """A batch with records to iterate. Iterating may raise any exception if the batch was changed after it was sent."""

    span: BatchSpan
    records: Any  # DefaultRecordBatch
    refused: Mapping[int, RefusedRecord]  # by index: records with too many headers, which `records` has without them
    whole: bool  # False: a malformed record follows these
    dense: bool  # whether its records have the offsets base, base + 1, …
    control: bool  # whether it is a transaction's marker, which is not handed out


def split(answer: bytes) -> Iterator[memoryview]:
    """The batches of a fetch's answer. An incomplete last batch is left out, since the next fetch returns it.

    After a batch with an impossible length, the rest of the answer is one batch.
    """
    at = 0
    while len(answer) - at >= HEADER.size:
        size = _OVERHEAD + int(struct.unpack_from(">i", answer, at + 8)[0])
        if size > len(answer) - at:
            return
        if size < HEADER.size:
            size = len(answer) - at
        yield memoryview(answer)[at : at + size]
        at += size


def span_of(batch: memoryview) -> BatchSpan:
    """The batch's offsets by its header, which is not checked."""
    header = HEADER.unpack_from(batch)
    return BatchSpan(header[0], header[0] + header[6] + 1)


def read_batch(batch: memoryview, position: int, end: int, check_crc: bool) -> Batch:
    """Check and unpack one batch, in at most UNPACKED_BYTES of additional memory. Raises Unreadable for any bad bytes.

    position: the next offset to read. end: the partition's end as the broker states it. check_crc: check every
    checksum; otherwise only if the header is unusual.

    A broker states the end before it reads the log, so a batch committed meanwhile lies beyond the end. It is accepted
    if it contains the position and its checksum is right.
    """
    base, _, _, magic, _, attributes, last, _, _, _, _, _, count = HEADER.unpack_from(batch)
    if magic != 2:
        raise Unreadable(f"its batch is of format {magic}; senders must use Kafka's format 2 (Kafka 0.11 and later)")
    codec, control = attributes & _CODEC, bool(attributes & _CONTROL)
    dense, beyond = count == last + 1, base + last >= end
    read = DefaultRecordBatch(batch)
    # A header changed by a failing disk could name offsets that do not exist, or skip records.
    if (check_crc or codec or control or beyond or not dense) and not read.validate_crc():
        raise Unreadable("its batch was changed after it was sent: the checksum is wrong")
    if last < 0 or base < 0 or (beyond and not base <= position <= base + last):
        raise Unreadable(f"its batch claims the offsets {base}…{base + last} of a partition that ends at {end}")
    if count > MOST_RECORDS:
        raise Unreadable(f"its batch has {count} records, at most {MOST_RECORDS} are read")
    content = _unpack(codec, batch[HEADER.size :]) if codec else batch[HEADER.size :]
    found = walk(content, count)
    if codec or found.refused or not found.whole:
        plain = bytearray(batch[: HEADER.size])
        struct.pack_into(">h", plain, 21, attributes & ~_CODEC)
        struct.pack_into(">i", plain, HEADER.size - 4, found.records)
        read = DefaultRecordBatch(bytes(plain) + found.content)
    return Batch(BatchSpan(base, base + last + 1), read, found.refused, found.whole, dense, control)


def _unpack(codec: int, packed: memoryview) -> bytes:
    name, decoder = _CODECS.get(codec, (f"codec {codec}", None))
    if decoder is None:
        raise Unreadable(f"its batch is compressed by an unknown {name}")
    room = np.empty(UNPACKED_BYTES, np.uint8)  # address space; it takes memory only where it is written
    try:
        return room[: decoder(bytes(packed), room)].tobytes()
    except Exception as error:  # hostile bytes: DecompressionError, or struct.error for a cut block
        raise Unreadable(f"its {name} batch cannot be unpacked into {UNPACKED_BYTES} bytes: {error}") from error


def _snappy(packed: bytes, room: Any) -> int:
    if not packed.startswith(_XERIAL):
        return int(cramjam.snappy.decompress_raw_into(packed, room))
    at, filled = _XERIAL_HEADER, 0
    while at < len(packed):
        (size,) = struct.unpack_from(">I", packed, at)
        filled += cramjam.snappy.decompress_raw_into(packed[at + 4 : at + 4 + size], room[filled:])
        at += 4 + size
    return filled


_CODECS: Final[dict[int, tuple[str, Callable[[bytes, Any], int]]]] = {
    1: ("gzip", cramjam.gzip.decompress_into),
    2: ("snappy", _snappy),
    3: ("lz4", cramjam.lz4.decompress_into),
    4: ("zstd", cramjam.zstd.decompress_into),
}


# The replacements for aiokafka's reading.


def pass_unreadable(consumer: Any, known: Mapping[TopicPartition, int] | None = None) -> None:
    """Make a started AIOKafkaConsumer without an assignment hand out stand-ins instead of raising.

    known: offsets up to which stand-ins are no news, and are logged at `debug` only.
    """
    fetcher = consumer._fetcher
    # The code of aiokafka's own function, with two of its global names replaced.
    ours = {"MemoryRecords": _Answer, "PartitionRecords": partial(_Records, fetcher._subscriptions, known or {})}
    code = aiokafka_fetcher.Fetcher._proc_fetch_request.__code__
    fetcher._proc_fetch_request = MethodType(FunctionType(code, {**vars(aiokafka_fetcher), **ours}), fetcher)


class _Answer:
    """Replaces aiokafka's MemoryRecords: a partition's bytes in the answer to a fetch, not parsed."""

    def __init__(self, content: bytes | None) -> None:
        self.content = content or b""

    def has_next(self) -> bool:
        return bool(self.content)

    def size_in_bytes(self) -> int:
        return len(self.content)


class _Records(aiokafka_fetcher.PartitionRecords):  # type: ignore[misc]  # untyped
    """Replaces aiokafka's PartitionRecords: records from the fetch's offset on, with a stand-in for each bad one."""

    next_fetch_offset: int

    def __init__(
        self,
        subscriptions: Any,
        known: Mapping[TopicPartition, int],
        partition: TopicPartition,
        *others: Any,
    ) -> None:
        # The partition's end when the broker began its answer.
        self._end = int(subscriptions.subscription.assignment.state_value(partition).highwater)
        self._known = known.get(partition, 0)
        super().__init__(partition, *others)

    def _unpack_records(self) -> Iterator[ConsumerRecord]:
        began_at = self.next_fetch_offset
        batches = list(split(self._records.content))
        for data, follower in zip_longest(batches, batches[1:]):
            try:
                batch = read_batch(data, self.next_fetch_offset, self._end, self._check_crcs)
                if follower and span_of(follower).base < batch.span.end:
                    raise Unreadable(f"its batch claims offsets up to {batch.span.end - 1}, and so does the next one")
                if not batch.control:
                    yield from self._read(batch)
            except Exception as error:  # hostile bytes may make a decoder raise any exception
                yield from self._stand_ins(self._end_of_bad(data, follower), error)
                break  # its length may be wrong too, so reading continues with the next fetch
            self.next_fetch_offset = max(self.next_fetch_offset, batch.span.end)
        if self.next_fetch_offset == began_at:
            # Otherwise the same bytes would arrive again, for ever.
            yield from self._stand_ins(began_at + 1, Unreadable("the broker's answer holds no whole batch behind it"))

    def _read(self, batch: Batch) -> Iterator[ConsumerRecord]:
        """The records of a batch, a stand-in for each refused one. Raises Unreadable at a malformed one."""
        index = -1
        for index, record in enumerate(batch.records):
            offset = record.offset
            if offset >= batch.span.end or (batch.dense and offset != batch.span.base + index):
                raise Unreadable(f"record {index} of its batch claims the offset {offset}")
            if offset >= self.next_fetch_offset:  # a fetch from within a batch returns the whole batch
                self.next_fetch_offset = offset + 1
                refused = batch.refused.get(index)
                yield self._consumer_record(self._tp, record) if refused is None else self._stand_in(offset, *refused)
        if not batch.whole:
            raise Unreadable(f"record {index + 1} of its batch is malformed")

    def _end_of_bad(self, batch: memoryview, follower: memoryview | None) -> int:
        """The offset at which reading continues after a bad batch.

        It is the end by this batch's header or the base of the next one, if possible; the smaller of both, since
        reading some records again loses none.
        """
        at = self.next_fetch_offset
        ends = [span_of(batch).end, *([span_of(follower).base] if follower else [])]
        return min((end for end in ends if at <= end <= self._end), default=at + 1)

    def _stand_ins(self, end: int, error: Exception) -> Iterator[ConsumerRecord]:
        """A stand-in for each offset up to `end`; after STAND_INS of them, one for all the rest."""
        if isinstance(error, UnicodeDecodeError):
            why = f"the name of a header is not UTF-8: {error}"
        else:
            why = str(error) if isinstance(error, Unreadable) else f"its batch cannot be read: {error!r}"
        at = self.next_fetch_offset
        for offset in range(at, min(end, at + STAND_INS)):
            rest = end - offset if offset == at + STAND_INS - 1 else 1
            self.next_fetch_offset = offset + rest
            detail = why if rest == 1 else f"{rest} records from here on: {why}"
            yield self._stand_in(offset, detail)

    def _stand_in(self, offset: int, detail: str, kept: tuple[tuple[str, bytes], ...] = ()) -> ConsumerRecord:
        write, kind = (log.debug, "known") if offset < self._known else (log.warning, "unreadable")
        limited(write, kind)(
            "record unreadable", topic=self._tp.topic, lane=self._tp.partition, offset=offset, detail=detail
        )
        headers = ((HEADER_UNREADABLE, detail.encode()), *kept)
        return ConsumerRecord(self._tp.topic, self._tp.partition, offset, 0, 0, None, None, None, -1, -1, headers)
