"""A message as it was read from Kafka, independent of the client library, and the headers of the relay."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, Protocol

# On a ranking request and its answer. They are headers so that a worker can answer a request that it cannot decode.
HEADER_CORRELATION: Final = "relaygr-correlation-id"  # 1–64 opaque bytes, echoed
HEADER_REPLY_PARTITION: Final = "relaygr-reply-partition"  # ASCII decimal: the partition of `scores` to answer on

# On a record of any topic.
HEADER_KIND: Final = "relaygr-kind"  # ASCII; absent: the topic's main message. Readers skip unknown kinds
HEADER_SIGNATURE: Final = "relaygr-signature"  # 32 bytes: HMAC-SHA256 with a shared secret

# Kinds.
KIND_CANCEL: Final = "cancel"  # on `ranking`: its client ranks this request no more; the value is a messages.Cancel
KIND_DELEGATED: Final = "delegated"  # on `ranking`: a pre-infer signal on another worker's behalf

# On a dead letter; its value and key are the original's.
HEADER_REASON: Final = "relaygr-reason"
HEADER_DETAIL: Final = "relaygr-detail"
HEADER_ORIGIN_TOPIC: Final = "relaygr-origin-topic"
HEADER_ORIGIN_PARTITION: Final = "relaygr-origin-partition"
HEADER_ORIGIN_OFFSET: Final = "relaygr-origin-offset"
HEADER_SCENARIO: Final = "relaygr-scenario"  # that the reader serves; absent: none

# On a stand-in (bus/unreadable.py) and its dead letter: why the record could not be read. It stays in the log.
HEADER_UNREADABLE: Final = "relaygr-unreadable"

# On a replayed message: how often it was replayed. On the marker in the dead-letter topic: which dead letter it was.
HEADER_REPLAYS: Final = "relaygr-replays"  # ASCII decimal
HEADER_REPLAY_OF: Final = "relaygr-replay-of"  # PARTITION:OFFSET of the dead letter

MAX_CORRELATION_BYTES: Final = 64
#: Most headers of a record that a reader takes, of any topic. The relay writes at most eight; tracing adds a few.
MOST_HEADERS: Final = 100
#: Memory of a record without its bytes: the tuples of record and headers, numbers, and the object that aiokafka makes.
BYTES_OF_A_RECORD: Final = 512
#: Memory of a header without its bytes: a tuple, its place in another, and what a text has beside its characters.
BYTES_OF_A_HEADER: Final = 100

Headers = Iterable[tuple[str, bytes | None]]  # Kafka allows null for a header's value


def header(headers: Headers, name: str) -> bytes:
    """The first value of the header `name`; empty if there is none."""
    for found, value in headers:
        if found == name:
            return value or b""
    return b""


def kind_of(headers: Headers) -> str:
    """The kind of a record, from its headers; "": the topic's main message."""
    for name, value in headers:
        if name == HEADER_KIND:
            return (value or b"").decode("ascii", errors="backslashreplace")
    return ""


class Record(NamedTuple):
    """One message of one lane; `topic` is the full name."""

    topic: str
    lane: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


class RecordReader(Protocol):
    """Who reads records, and commits their offsets."""

    def done(self, record: Record) -> None:
        """Mark the record as done. No effect if its lane is lost, or if it is done already."""


def held_bytes(record: Record) -> int:
    """Bytes of memory that a record holds: objects, key, value, headers. Every account of records counts these."""
    held = BYTES_OF_A_RECORD + len(record.key or b"") + len(record.value or b"")
    for name, value in record.headers:
        held += BYTES_OF_A_HEADER + sys.getsizeof(name) + len(value or b"")
    return held


def as_record(message: Any) -> Record:
    """The Record of an aiokafka ConsumerRecord."""
    return Record(
        message.topic,
        message.partition,
        message.offset,
        message.timestamp,
        message.key,
        message.value,
        message.headers,
    )
