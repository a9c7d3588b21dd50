"""A message as it was read from Kafka, independent of the client library."""

from __future__ import annotations

from typing import Any, NamedTuple


class Record(NamedTuple):
    """One message of one lane; `topic` is the full name."""

    topic: str
    lane: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


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
