"""Records that cannot be read: a stand-in is handed out in the place of each, and reading goes on behind it.

What any producer can send, or a broker's failing disk can make, must not end those who read the partition, nor the next
ones: a batch by an unknown codec, one that unpacks to gigabytes, a header's name that is not UTF-8, a flipped bit.
aiokafka raises at such a batch, over and over, or in its own task. So its unpacking is replaced, for our consumers
alone. Consumers bury a stand-in, which has no value, like any other bad message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
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

from relaygr_stream.telemetry.limiter import LogLimiter

# One record batch as a broker hands it out: its header checked, its codec undone, within bounds. Whatever the bytes
# are, `read_batch` returns or raises Unreadable, and takes at most UNPACKED_BYTES beside them. Knows nothing of
# partitions, nor of what the records contain.


#: A compressed batch may unpack to this: 16 times what a topic takes by default, where texts shrink to a third or a
#: tenth. The rest are bombs: 300 MB of zeros are 30 KB of zstd.
UNPACKED_BYTES: Final = 16 * 1024 * 1024
#: Most records of a batch. Our smallest message has 60 bytes, so that 1 MiB holds a quarter of this; without a bound
#: 1 MiB of zstd makes two million records of 500 bytes each, in memory.
MOST_RECORDS: Final = 65_536

#: Kafka's record batch, version 2: base offset, length of what follows, leader epoch, magic, CRC, attributes, last
#: offset delta, two timestamps, producer's id and epoch, base sequence, number of records.
HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_OVERHEAD: Final = 12  # base offset and length, which the length does not count
_CODEC, _CONTROL = 0x07, 0x20  # bits of the attributes
_XERIAL: Final = b"\x82SNAPPY\0"  # the Java client's snappy: 16 bytes of header, then blocks with their lengths
_XERIAL_HEADER: Final = 16


class Unreadable(Exception):
    """Why a batch cannot be read."""


class Span(NamedTuple):
    """What a header says of its batch's offsets: base ≤ offset < end."""

    base: int
    end: int


class Batch(NamedTuple):
    """A batch whose records can be iterated, which may raise anything if the batch was changed since it was sent."""

    span: Span
    records: Any  # DefaultRecordBatch
    dense: bool  # its records have the offsets base, base + 1, …
    control: bool  # a transaction's marker, which no reader gets


def split(answer: bytes) -> Iterator[memoryview]:
    """The batches of a fetch's answer. The last may be cut short; then it is left out, and comes with the next. Behind
    one whose length cannot be, nothing is told apart.
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


def span_of(batch: memoryview) -> Span:
    """What its header says, true or not."""
    header = HEADER.unpack_from(batch)
    return Span(header[0], header[0] + header[6] + 1)


def read_batch(batch: memoryview, position: int, end: int, check_crc: bool) -> Batch:
    """position: the offset to read next. end: where the partition ends, as the broker states it. check_crc: always, not
    only where the header is out of the ordinary.

    A broker states the end before it reads the log, so a batch that was committed meanwhile lies beyond the end: it is
    taken if it continues at the position and its checksum is right.

    Raises Unreadable.
    """
    base, _, _, magic, _, attributes, last, _, _, _, _, _, count = HEADER.unpack_from(batch)
    if magic != 2:
        raise Unreadable(f"its batch is of format {magic}; senders must use Kafka's format 2 (Kafka 0.11 and later)")
    codec, control = attributes & _CODEC, bool(attributes & _CONTROL)
    dense, beyond = count == last + 1, base + last >= end
    read = DefaultRecordBatch(batch)
    # A header that a failing disk changed would otherwise lead astray: to offsets that are not there, or past records.
    if (check_crc or codec or control or beyond or not dense) and not read.validate_crc():
        raise Unreadable("its batch was changed since it was sent: the checksum is wrong")
    if last < 0 or base < 0 or (beyond and not base <= position <= base + last):
        raise Unreadable(f"its batch claims the offsets {base}…{base + last} of a partition that ends at {end}")
    if count > MOST_RECORDS:
        raise Unreadable(f"its batch has {count} records, at most {MOST_RECORDS} are read")
    if codec:
        plain = bytearray(batch[: HEADER.size])
        struct.pack_into(">h", plain, 21, attributes & ~_CODEC)
        read = DefaultRecordBatch(bytes(plain) + _unpack(codec, batch[HEADER.size :]))
    return Batch(Span(base, base + last + 1), read, dense, control)


def _unpack(codec: int, packed: memoryview) -> bytes:
    name, decoder = _CODECS.get(codec, (f"codec {codec}", None))
    if decoder is None:
        raise Unreadable(f"its batch is compressed by an unknown {name}")
    room = np.empty(UNPACKED_BYTES, np.uint8)  # costs address space; memory only as far as it is written
    try:
        return room[: decoder(bytes(packed), room)].tobytes()
    except Exception as error:  # cramjam's DecompressionError, struct's of a cut block: hostile bytes
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


log = structlog.get_logger(__name__)
limited = LogLimiter().limited

#: Header of a stand-in, and so of its dead letter: what could not be read. The record itself is in the log, at the
#: origin that the dead letter names.
HEADER_UNREADABLE: Final = "relaygr-unreadable"
#: Of one batch so many records have a stand-in each; the last one names all that follow it.
STAND_INS: Final = 1000


def pass_unreadable(consumer: Any) -> None:
    """Make an AIOKafkaConsumer, started and with nothing assigned yet, hand out stand-ins instead of raising."""
    fetcher = consumer._fetcher

    def end_of(partition: TopicPartition) -> int:
        """Where the partition ended when the broker began its answer."""
        return int(fetcher._subscriptions.subscription.assignment.state_value(partition).highwater)

    # aiokafka's own reading of an answer, in which two names mean what is in here.
    ours = {"MemoryRecords": _Answer, "PartitionRecords": partial(_Records, end_of)}
    code = aiokafka_fetcher.Fetcher._proc_fetch_request.__code__
    fetcher._proc_fetch_request = MethodType(FunctionType(code, {**vars(aiokafka_fetcher), **ours}), fetcher)


class _Answer:
    """In place of aiokafka's MemoryRecords: a partition's bytes in the answer to a fetch, and no look at them."""

    def __init__(self, content: bytes | None) -> None:
        self.content = content or b""

    def has_next(self) -> bool:
        return bool(self.content)

    def size_in_bytes(self) -> int:
        return len(self.content)


class _Records(aiokafka_fetcher.PartitionRecords):  # type: ignore[misc]  # untyped
    """In place of aiokafka's: the records from the fetch's offset on, none left out without a stand-in."""

    next_fetch_offset: int

    def __init__(self, end_of: Callable[[TopicPartition], int], partition: TopicPartition, *others: Any) -> None:
        self._end = end_of(partition)
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
                    yield from self._read(batch.records, batch.span.base if batch.dense else None, batch.span.end)
            except Exception as error:  # whatever hostile bytes make a decoder raise
                yield from self._stand_ins(self._end_of_bad(data, follower), error)
                break  # its length may be wrong as well: the next fetch tells what follows
            self.next_fetch_offset = max(self.next_fetch_offset, batch.span.end)
        if self.next_fetch_offset == began_at:
            # Else the same bytes would come again, for ever.
            yield from self._stand_ins(began_at + 1, Unreadable("the broker's answer holds no whole batch behind it"))

    def _read(self, records: Any, base: int | None, end: int) -> Iterator[ConsumerRecord]:
        """base: where the offsets have no gaps."""
        for index, record in enumerate(records):
            offset = record.offset
            if offset >= end or (base is not None and offset != base + index):
                raise Unreadable(f"record {index} of its batch claims the offset {offset}")
            if offset >= self.next_fetch_offset:  # a fetch within a batch brings the whole batch
                self.next_fetch_offset = offset + 1
                yield self._consumer_record(self._tp, record)

    def _end_of_bad(self, batch: memoryview, follower: memoryview | None) -> int:
        """Where reading goes on: where this header and the next one say, as far as that can be; the nearer of the two,
        because what is read again is not lost.
        """
        at = self.next_fetch_offset
        ends = [span_of(batch).end, *([span_of(follower).base] if follower else [])]
        return min((end for end in ends if at <= end <= self._end), default=at + 1)

    def _stand_ins(self, end: int, error: Exception) -> Iterator[ConsumerRecord]:
        """One for each offset up to end, or for the rest of them."""
        if isinstance(error, UnicodeDecodeError):
            why = f"the name of a header is not UTF-8: {error}"
        else:
            why = str(error) if isinstance(error, Unreadable) else f"its batch cannot be read: {error!r}"
        at = self.next_fetch_offset
        for offset in range(at, min(end, at + STAND_INS)):
            rest = end - offset if offset == at + STAND_INS - 1 else 1
            self.next_fetch_offset = offset + rest
            detail = why if rest == 1 else f"{rest} records from here on: {why}"
            limited(log.warning, "unreadable")(
                "record unreadable", topic=self._tp.topic, lane=self._tp.partition, offset=offset, detail=detail
            )
            headers = ((HEADER_UNREADABLE, detail.encode()),)
            yield ConsumerRecord(self._tp.topic, self._tp.partition, offset, 0, 0, None, None, None, -1, -1, headers)
