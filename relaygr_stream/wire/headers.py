"""The headers of records: their names, the kind of a record, and signatures. Knows nothing of what values hold."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Final

# A ranking request and its answer. In headers, not in the value, so that a worker can answer a request whose value it
# cannot decode.
HEADER_CORRELATION: Final = "relaygr-correlation-id"  # 1–64 opaque bytes, echoed
HEADER_REPLY_PARTITION: Final = "relaygr-reply-partition"  # ASCII decimal: the partition of `scores` to answer on

# A record of any topic.
HEADER_KIND: Final = "relaygr-kind"  # ASCII; without it: the topic's main message. Readers skip what they do not know
HEADER_SIGNATURE: Final = "relaygr-signature"  # 32 bytes: HMAC-SHA256 with a secret that both sides have

# A dead letter; its value and key are the original's.
HEADER_REASON: Final = "relaygr-reason"
HEADER_DETAIL: Final = "relaygr-detail"
HEADER_ORIGIN_TOPIC: Final = "relaygr-origin-topic"
HEADER_ORIGIN_PARTITION: Final = "relaygr-origin-partition"
HEADER_ORIGIN_OFFSET: Final = "relaygr-origin-offset"

# A replay: on the message, how often it was replayed; on the marker left in the dead-letter topic, which.
HEADER_REPLAYS: Final = "relaygr-replays"  # ASCII decimal
HEADER_REPLAY_OF: Final = "relaygr-replay-of"  # PARTITION:OFFSET of the letter

# Reserved for later releases: nothing else may use these names (docs/protocol.md, "Reserved names").
HEADER_TRACE_PARENT: Final = "traceparent"  # W3C Trace Context
HEADER_TRACE_STATE: Final = "tracestate"  # W3C Trace Context
KIND_CANCEL: Final = "cancel"  # on `ranking`: the request of that correlation id is not awaited any more

MAX_CORRELATION_BYTES: Final = 64

Headers = Iterable[tuple[str, bytes | None]]  # Kafka allows null for a header's value


def header(headers: Headers, name: str) -> bytes:
    """The first value of that header; empty if there is none."""
    return next((value or b"" for found, value in headers if found == name), b"")


def kind_of(headers: Headers) -> str:
    """What kind of message a record's headers say that it is; "": the topic's main one."""
    return header(headers, HEADER_KIND).decode("ascii", errors="backslashreplace")


def signature(secret: str, *parts: bytes) -> bytes:
    """HMAC-SHA256 with the secret's UTF-8 over the parts, each behind its length as 4 bytes, big-endian.

    The first part says what is signed, so that a signature of one thing is never one of another.
    """
    framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret.encode(), framed, "sha256")


def answer_signature(secret: str, correlation: bytes, value: bytes) -> bytes:
    """The signature of an answer to that call."""
    return signature(secret, b"answer", correlation, value)
