"""The headers that a dead letter carries beside the original's key and value."""

from __future__ import annotations

from typing import Final

from relaygr_stream.bus.records import Record
from relaygr_stream.errors import DecodeError
from relaygr_stream.messages import (
    HEADER_DETAIL,
    HEADER_ORIGIN_OFFSET,
    HEADER_ORIGIN_PARTITION,
    HEADER_ORIGIN_TOPIC,
    HEADER_REASON,
)

MAX_DETAIL_BYTES: Final = 1000  # a decoder's message may quote the input


def dead_letter_headers(record: Record, error: DecodeError) -> list[tuple[str, bytes]]:
    """Reason and origin, then the original's own headers."""
    return [
        (HEADER_REASON, error.reason.encode()),
        (HEADER_DETAIL, error.detail.encode()[:MAX_DETAIL_BYTES]),
        (HEADER_ORIGIN_TOPIC, record.topic.encode()),
        (HEADER_ORIGIN_PARTITION, str(record.lane).encode()),
        (HEADER_ORIGIN_OFFSET, str(record.offset).encode()),
        *record.headers,
    ]
