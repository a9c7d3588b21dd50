"""A dead letter as an operator reads it, with a value of any form.

The topic is a log: a replayed dead letter stays in it, and a marker (a later record without a value) names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from relaygr_stream.bus.dead_letter import HEADER_DIGEST
from relaygr_stream.wire.records import (
    HEADER_DETAIL,
    HEADER_ORIGIN_OFFSET,
    HEADER_ORIGIN_PARTITION,
    HEADER_ORIGIN_TOPIC,
    HEADER_REASON,
    HEADER_REPLAY_OF,
    HEADER_REPLAYS,
    HEADER_SCENARIO,
    Record,
)

_OURS: Final = frozenset(
    {HEADER_REASON, HEADER_DETAIL, HEADER_ORIGIN_TOPIC, HEADER_ORIGIN_PARTITION, HEADER_ORIGIN_OFFSET, HEADER_REPLAYS}
    | {HEADER_DIGEST, HEADER_SCENARIO}
)
#: Longest list or map that is unpacked for display. Lists nested to msgpack's own limit of 511 levels then allocate at
#: most 511 × 1,000 × 8 bytes, 4 MB.
MAX_ITEMS: Final = 1000
#: Longest text or byte string that is shown completely.
SHOWN_BYTES: Final = 64
#: Deepest nesting that is shown. A message of this protocol has 4 levels; msgpack unpacks up to 511, which at two calls
#: a level exceeds Python's recursion limit of 1,000.
SHOWN_DEPTH: Final = 32


@dataclass
class Letter:
    """One dead letter: a record of the dead-letter topic. Fields that its headers do not state are "" or -1."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes
    reason: str = ""
    detail: str = ""
    origin_topic: str = ""
    origin_partition: int = -1
    origin_offset: int = -1
    digest: str = ""  # of an original message that is not included (not kept, or too large)
    replays: int = 0  # how often the message was replayed before it became this dead letter
    headers: tuple[tuple[str, bytes], ...] = ()  # the original's own headers; a null value is empty here
    replayed: bool = False  # a marker says so
    scenario: str = ""  # that its reader served

    @property
    def address(self) -> str:
        """PARTITION:OFFSET, its name in commands and markers."""
        return f"{self.partition}:{self.offset}"


def letters_of(records: Iterable[Record]) -> list[Letter]:
    """The dead letters among records of the dead-letter topic, oldest first; markers set `replayed`."""
    letters: dict[str, Letter] = {}
    replayed: set[str] = set()
    for record in records:
        # The dead letter's own headers come first; the original may have the same names. Kafka allows null values.
        headers = {name: value or b"" for name, value in reversed(record.headers)}
        if (marker := headers.get(HEADER_REPLAY_OF)) is not None and HEADER_REASON not in headers:
            replayed.add(_text(marker))
        else:
            letter = _letter(record, headers)
            letters[letter.address] = letter
    for address in replayed & letters.keys():
        letters[address].replayed = True
    return sorted(letters.values(), key=lambda letter: (letter.timestamp_ms, letter.partition, letter.offset))


def show_value(value: bytes) -> Any:
    """The value for display: MessagePack of any schema, unpacked and with long parts cut; other bytes as hex."""
    try:
        unpacked = msgpack.unpackb(
            value, strict_map_key=False, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS, max_ext_len=MAX_ITEMS
        )
    except Exception as error:  # for hostile bytes, msgpack raises ValueError, its own errors or RecursionError
        return {"not MessagePack": str(error) or type(error).__name__, "bytes": _brief(value)}
    return _brief(unpacked)


def _letter(record: Record, headers: dict[str, bytes]) -> Letter:
    return Letter(
        partition=record.lane,
        offset=record.offset,
        timestamp_ms=record.timestamp_ms,
        key=record.key,
        value=record.value or b"",
        reason=_text(headers.get(HEADER_REASON, b"")),
        detail=_text(headers.get(HEADER_DETAIL, b"")),
        scenario=_text(headers.get(HEADER_SCENARIO, b"")),
        origin_topic=_text(headers.get(HEADER_ORIGIN_TOPIC, b"")),
        origin_partition=_number(headers.get(HEADER_ORIGIN_PARTITION), -1),
        origin_offset=_number(headers.get(HEADER_ORIGIN_OFFSET), -1),
        digest=_text(headers.get(HEADER_DIGEST, b"")),
        replays=_number(headers.get(HEADER_REPLAYS), 0),
        headers=tuple((name, value or b"") for name, value in record.headers if name not in _OURS),
    )


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _number(raw: bytes | None, default: int) -> int:
    text = _text(raw or b"")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else default


def _brief(value: Any, depth: int = 0) -> Any:
    """The value with long strings cut, bytes as hex, and keys as text, so that it can be printed as JSON."""
    if isinstance(value, dict | list | tuple):
        if depth == SHOWN_DEPTH:
            return f"… ({len(value)} more, nested)"
        if isinstance(value, dict):
            return {str(_brief(key, depth + 1)): _brief(item, depth + 1) for key, item in value.items()}
        return [_brief(item, depth + 1) for item in value]
    return _brief_leaf(value)


def _brief_leaf(value: Any) -> Any:
    if isinstance(value, bytes):
        shown = value[: SHOWN_BYTES // 2].hex(" ", 4)
        return f"{len(value)} bytes: {shown}{' …' if len(value) > SHOWN_BYTES // 2 else ''}"
    if isinstance(value, str) and len(value) > SHOWN_BYTES:
        return f"{value[:SHOWN_BYTES]}… ({len(value)} characters)"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such numbers
    return value if isinstance(value, str | int | float | bool | None) else repr(value)[:SHOWN_BYTES]
