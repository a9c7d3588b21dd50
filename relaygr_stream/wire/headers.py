"""The headers of records: their names, the kind of a record, and signatures."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Final

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

# On a replayed message: how often it was replayed. On the marker in the dead-letter topic: which dead letter it was.
HEADER_REPLAYS: Final = "relaygr-replays"  # ASCII decimal
HEADER_REPLAY_OF: Final = "relaygr-replay-of"  # PARTITION:OFFSET of the dead letter

MAX_CORRELATION_BYTES: Final = 64

Headers = Iterable[tuple[str, bytes | None]]  # Kafka allows null for a header's value


def header(headers: Headers, name: str) -> bytes:
    """The first value of the header `name`; empty if there is none."""
    return next((value or b"" for found, value in headers if found == name), b"")


def kind_of(headers: Headers) -> str:
    """The kind of a record, from its headers; "": the topic's main message."""
    return header(headers, HEADER_KIND).decode("ascii", errors="backslashreplace")


def signature(secret: str, *parts: bytes) -> bytes:
    """HMAC-SHA256 with the secret's UTF-8 bytes over the parts, each preceded by its length (4 bytes, big-endian).

    The first part names the purpose, so that a signature for one purpose is never valid for another.
    """
    framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret.encode(), framed, "sha256")


def answer_signature(secret: str, correlation: bytes, value: bytes) -> bytes:
    """The signature of an answer to the call with this correlation id."""
    return signature(secret, b"answer", correlation, value)
