"""Finds records with too many headers in a batch, before a decoder makes objects of them.

An empty header takes two bytes on the wire and about a hundred in memory, so 1 MiB of them is 50 MB of objects. The
walk reads seven numbers of each record and skips its bytes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION, MAX_CORRELATION_BYTES, MOST_HEADERS

#: The headers that a refused record keeps: with them its client is told.
_KEPT: Final = {name.encode(): name for name in (HEADER_CORRELATION, HEADER_REPLY_PARTITION)}
_WORD: Final = 2**64 - 1


class RefusedRecord(NamedTuple):
    """A record with too many headers: why it is not read, and the headers that say where to answer."""

    why: str
    kept: tuple[tuple[str, bytes], ...]


class Walk(NamedTuple):
    """The result of `walk`.

    content: the records without the headers of the refused ones, up to the first malformed record.
    records: how many those are. refused: by index. whole: whether no record is malformed.
    """

    content: bytes | memoryview
    records: int
    refused: dict[int, RefusedRecord]
    whole: bool


def walk(content: bytes | memoryview, count: int) -> Walk:
    """Walk the `count` uncompressed records of a batch. Copies them only if one is refused."""
    refused: dict[int, RefusedRecord] = {}
    parts: list[bytes] = []  # what is kept of the content before `copied`
    copied = at = index = 0
    try:
        for index in range(count):
            began = at
            length, start = _varint(content, at)
            end, at = start + length, start + 1
            if content[start] >= 0x80:  # attributes: a byte to some decoders, a number of several bytes to others
                raise ValueError
            for _ in range(2):  # time, offset
                while content[at] >= 0x80:
                    at += 1
                at += 1
            for _ in range(2):  # key, value
                if (size := content[at]) < 0x80:  # 2 · size, odd for null
                    at += 1 + (0 if size & 1 else size >> 1)
                else:
                    size, at = _varint(content, at)
                    at += max(size, 0)
            headers_at = at
            headers, at = _varint(content, at)
            if at > end or end > len(content):
                raise ValueError
            if headers > MOST_HEADERS:
                refused[index] = RefusedRecord(
                    f"its record has {headers} headers in {end - at} bytes, at most {MOST_HEADERS} are read",
                    _kept(content, at, end),
                )
                body = bytes(content[start:headers_at]) + b"\0"  # no headers
                parts += [bytes(content[copied:began]), _length(len(body)), body]
                copied = end
            at = began = end
    except (ValueError, IndexError):
        return Walk(b"".join([*parts, bytes(content[copied:began])]), index, refused, whole=False)
    if not refused:
        return Walk(content, count, refused, whole=True)
    return Walk(b"".join([*parts, bytes(content[copied:])]), count, refused, whole=True)


def _kept(content: bytes | memoryview, at: int, end: int) -> tuple[tuple[str, bytes], ...]:
    """The _KEPT among the first MOST_HEADERS headers."""
    found: dict[str, bytes] = {}
    for _ in range(MOST_HEADERS):
        size, at = _varint(content, at)
        name, at = _KEPT.get(bytes(content[at : at + min(size, 64)])), at + max(size, 0)
        size, at = _varint(content, at)
        if at > end:
            break
        if name is not None and 0 <= size <= MAX_CORRELATION_BYTES:
            found.setdefault(name, bytes(content[at : at + size]))
        at += max(size, 0)
    return tuple(found.items())


def _varint(content: bytes | memoryview, at: int) -> tuple[int, int]:
    """A number in Kafka's zigzag form, and where it ends. Raises IndexError, ValueError for more than 64 bits."""
    value = content[at]
    if value >= 0x80:
        value, shift = value & 0x7F, 7
        while (byte := content[(at := at + 1)]) >= 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
            if shift > 63:
                raise ValueError
        value = (value | byte << shift) & _WORD
    return (value >> 1) ^ -(value & 1), at + 1


def _length(size: int) -> bytes:
    """A length of a record, as `_varint` reads it."""
    value, found = size << 1, bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
