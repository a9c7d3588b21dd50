"""One record batch as a broker hands it out: its header checked, its codec undone, within bounds.

Whatever the bytes are, `read_batch` returns or raises Unreadable, and takes at most UNPACKED_BYTES beside them. Knows
nothing of partitions, nor of what the records contain.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import cramjam
import numpy as np
from aiokafka.record.default_records import DefaultRecordBatch

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


def read_batch(batch: memoryview, end: int, check_crc: bool) -> Batch:
    """end: where the partition ends. check_crc: always, not only where the header is out of the ordinary.

    Raises Unreadable.
    """
    base, _, _, magic, _, attributes, last, _, _, _, _, _, count = HEADER.unpack_from(batch)
    if magic != 2:
        raise Unreadable(f"its batch is of format {magic}; senders must use Kafka's format 2 (Kafka 0.11 and later)")
    codec, control = attributes & _CODEC, bool(attributes & _CONTROL)
    dense = count == last + 1
    read = DefaultRecordBatch(batch)
    # A header that a failing disk changed would otherwise lead astray: to offsets that are not there, or past records.
    if (check_crc or codec or control or not dense) and not read.validate_crc():
        raise Unreadable("its batch was changed since it was sent: the checksum is wrong")
    if last < 0 or base < 0 or base + last >= end:
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
