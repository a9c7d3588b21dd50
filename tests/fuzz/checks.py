"""What every target of the fuzzer uses: its limits, and how it says that something got through."""

from __future__ import annotations

import math
from typing import Any, Final

from relaygr_stream.errors import DecodeError
from relaygr_stream.settings.schema import Kafka, Relay
from relaygr_stream.wire.codec import Message, decode
from relaygr_stream.wire.topic_files import load_topics

REPLIES: Final = 8
MAX_BYTES: Final = 1 << 20
MAX_TIMEOUT_MS: Final = 5000.0
#: Limits small enough for mutations to pass them.
RELAY: Final = Relay(max_prefix_tokens=64, max_suffix_tokens=8, max_candidates=64)
TOPICS: Final = load_topics(Kafka())
REASONS: Final = {"oversized", "malformed", "unknown_version", "invalid"}


class Finding(Exception):
    """Something got through that must not."""


def holds(condition: object, what: str) -> None:
    """Raise Finding unless the condition holds."""
    if not condition:
        raise Finding(what)


def decoded_or_none(kind: type[Any], raw: bytes) -> Message | None:
    try:
        found: Message = decode(kind, raw, MAX_BYTES)
    except DecodeError as error:
        holds(error.reason in REASONS, f"reason {error.reason}")
        holds(len(error.detail) < 2000, f"a detail of {len(error.detail)} characters")
        return None
    return found


def all_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(all_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(all_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def printable(text: str) -> bool:
    return not any(ord(each) < 32 or 127 <= ord(each) < 160 for each in text)


def no_constant(name: str) -> None:
    raise Finding(f"{name} in JSON")
