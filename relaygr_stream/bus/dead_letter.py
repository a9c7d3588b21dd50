"""The headers that a dead letter carries beside the original's key and value."""

from __future__ import annotations

from typing import Final

from relaygr_stream.bus.records import Record
from relaygr_stream.errors import ConfigError, DecodeError
from relaygr_stream.messages import (
    HEADER_DETAIL,
    HEADER_ORIGIN_OFFSET,
    HEADER_ORIGIN_PARTITION,
    HEADER_ORIGIN_TOPIC,
    HEADER_REASON,
)
from relaygr_stream.topic_check import DEAD_LETTER_HEADERS_BYTES
from relaygr_stream.topics import TopicSet

MAX_DETAIL_BYTES: Final = 1000  # a decoder's message may quote the input


def dead_letter_headers(record: Record, error: DecodeError) -> list[tuple[str, bytes]]:
    """Reason and origin, then the original's own headers."""
    return [
        (HEADER_REASON, error.reason.encode()),
        (HEADER_DETAIL, error.detail.encode(errors="backslashreplace")[:MAX_DETAIL_BYTES]),
        (HEADER_ORIGIN_TOPIC, record.topic.encode()),
        (HEADER_ORIGIN_PARTITION, str(record.lane).encode()),
        (HEADER_ORIGIN_OFFSET, str(record.offset).encode()),
        *record.headers,
    ]


def check_dead_letters_fit(topics: TopicSet) -> None:
    """A dead letter that its topic does not take would hold up its lane's commits for ever: ConfigError."""
    for topic in (topics.retrieval, topics.ranking, topics.pre_infer):
        if topics.dead_letter.max_message_bytes < topic.max_message_bytes + DEAD_LETTER_HEADERS_BYTES:
            raise ConfigError(
                f"topic {topics.dead_letter.name} takes {topics.dead_letter.max_message_bytes} bytes, {topic.name} "
                f"{topic.max_message_bytes}: a dead letter has up to {DEAD_LETTER_HEADERS_BYTES} more than its "
                f"original; raise max_message_bytes of the former"
            )
