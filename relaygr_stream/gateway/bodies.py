"""Decodes the bodies of requests: arrays are counted before they are converted, and kept as packed bytes alone.

A list of numbers takes up to eight times its bytes as Python objects. So the first pass leaves arrays and feature
columns as they came; each is counted against the relay's limits, and converted by itself.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Raw, UnsetType

from relaygr_stream.errors import Rejected
from relaygr_stream.gateway.messages import JSON, MSGPACK, Announce, Format, History, Rank
from relaygr_stream.settings.schema import Relay
from relaygr_stream.wire.behaviours import ACTION_DTYPE, TIME_DTYPE, pack, pack_ids
from relaygr_stream.wire.features import MAX_COLUMNS, Columns, FeatureTables

B = TypeVar("B", Announce, Rank)
_ABSENT: Final = Raw(b"")
#: Of the arrays that are no item ids.
_DTYPES: Final[dict[str, np.dtype[Any]]] = {"actions": ACTION_DTYPE, "times": TIME_DTYPE}
#: Most bytes of a behaviour in JSON, its numbers followed by a comma and a blank: 21 of the item, 5, 22 of the time.
_BEHAVIOUR_BYTES: Final = 48
_CANDIDATE_BYTES: Final = 21
#: Of names, ids and a reference.
_FIELDS_BYTES: Final = 64 << 10


def longest_body(relay: Relay) -> int:
    """Bytes of the longest request in JSON, with as much again for packed features."""
    behaviours = relay.max_prefix_tokens + relay.max_suffix_tokens
    return 2 * (_BEHAVIOUR_BYTES * behaviours + _CANDIDATE_BYTES * relay.max_candidates) + _FIELDS_BYTES


class _History(History, frozen=True, forbid_unknown_fields=True):
    """A History before its arrays are converted."""

    items: Raw = _ABSENT
    actions: Raw = _ABSENT
    times: Raw = _ABSENT
    columns: Raw | UnsetType = UNSET  # type: ignore[assignment]


class _Announce(Announce, frozen=True, kw_only=True, forbid_unknown_fields=True):
    history: _History | UnsetType = UNSET
    columns: Raw | UnsetType = UNSET  # type: ignore[assignment]


class _Rank(Rank, frozen=True, kw_only=True, forbid_unknown_fields=True):
    candidates: Raw
    history: _History | UnsetType = UNSET
    suffix: _History | UnsetType = UNSET
    columns: Raw | UnsetType = UNSET  # type: ignore[assignment]


class _Reader:
    """Decodes one form of bodies."""

    def __init__(self, form: Format) -> None:
        self._json: Final = form is JSON
        decoder = form.codec.Decoder
        self.raw: Final = {Announce: decoder(_Announce).decode, Rank: decoder(_Rank).decode}
        self._packed: Final = decoder(bytes | list[int | float | str | bool | None]).decode
        self._columns: Final = decoder(Columns).decode
        self._tables: Final = decoder(FeatureTables).decode

    def history(self, name: str, raw: _History, limit: str, relay: Relay, item_bytes: int) -> History:
        """A history's arrays, packed. item_bytes: of an item id that comes packed."""
        parts = {"items": raw.items, "actions": raw.actions, "times": raw.times}
        listed = {part: self._count(array) for part, array in parts.items()}
        _bound(relay, limit, max(listed.values()))  # first: converting a history that is too long would be in vain
        arrays: dict[str, Any] = {
            part: self._array(f"{name}.{part}", f"{name}: {part}", parts[part], _DTYPES.get(part)) for part in parts
        }
        _bound(relay, limit, len(arrays["actions"]))
        if not listed["items"] and len(arrays["items"]) != item_bytes * len(arrays["actions"]):
            count = f"{len(arrays['actions'])} actions"
            raise Rejected(
                f"{name}: items, actions and times must be parallel arrays; {len(arrays['items'])} bytes of items "
                f"({item_bytes} each: item_bytes) for {count}"
            )
        if raw.columns is UNSET:
            return History(**arrays)
        return History(**arrays, columns=self._features(f"{name}.columns", raw.columns, self._columns, MAX_COLUMNS))

    def candidates(self, raw: Raw, stated: int, relay: Relay) -> dict[str, Any]:
        """The candidates, packed, and the bytes of each; stated: those of a packed one."""
        count = self._count(raw)
        _bound(relay, "candidates", count)
        packed = self._array("candidates", "candidates: item ids", raw)
        size = len(packed) // count if count and packed else stated
        _bound(relay, "candidates", len(packed) // size)
        if len(packed) % size:
            raise Rejected(f"candidates must be m ≥ 1 item ids of {size} bytes (item_bytes); got {len(packed)} bytes")
        return {"candidates": packed, "item_bytes": size}

    def tables(self, raw: Raw) -> FeatureTables:
        """The features of user and candidates."""
        tables: FeatureTables = self._features("columns", raw, self._tables, 2 * MAX_COLUMNS)
        return tables

    def _count(self, raw: Raw) -> int:
        """Elements of a list, without a look at them; 0: not a list."""
        data = memoryview(raw)
        kind = data[0] if data else 0
        if self._json:
            return bytes(data).count(b",") + 1 if kind == ord("[") else 0
        if kind in (0xDC, 0xDD):  # MessagePack: array 16, array 32
            return int.from_bytes(data[1 : 3 if kind == 0xDC else 5], "big")
        return kind & 0x0F if kind & 0xF0 == 0x90 else 0

    def _array(self, place: str, name: str, raw: Raw, dtype: np.dtype[Any] | None = None) -> bytes:
        """A part as it travels. dtype: None: item ids."""
        if raw is _ABSENT:
            return b""
        values: bytes | list[Any] = _at(place, self._packed, raw)
        try:
            if isinstance(values, bytes):
                return values
            return pack_ids(values, name) if dtype is None else pack(values, dtype, name)
        except ValueError as error:
            raise Rejected(f"{error} of `$.{place}`") from error

    def _features(self, place: str, raw: Raw, decode: Any, most: int) -> Any:
        if self._json and bytes(raw).count(b",") > most + 2:  # MessagePack states its counts before the columns
            raise Rejected(f"{place}: more than {MAX_COLUMNS} columns a table")
        return _at(place, decode, raw)


_READERS: Final = {form: _Reader(form) for form in (JSON, MSGPACK)}


def decoded(data: bytes | bytearray, form: Format, kind: type[B], relay: Relay) -> B:
    """The body, its arrays packed. Raises NOT_DECODED; Rejected beyond the relay's limits and the arrays' types."""
    reader = _READERS[form]
    raw = reader.raw[kind](data)
    changed: dict[str, Any] = {}
    if raw.history is not UNSET:
        changed["history"] = reader.history("history", raw.history, "prefix", relay, raw.item_bytes)
    if isinstance(raw, _Rank):
        if raw.suffix is not UNSET:
            changed["suffix"] = reader.history("suffix", raw.suffix, "suffix", relay, raw.item_bytes)
        changed |= reader.candidates(raw.candidates, raw.item_bytes, relay)
    if raw.columns is not UNSET:
        changed["columns"] = reader.tables(raw.columns)
    same = {name: getattr(raw, name) for name in kind.__struct_fields__ if name not in changed}
    return kind(**same, **changed)


def _bound(relay: Relay, limit: str, count: int) -> None:
    """Raise Rejected for more than the relay takes."""
    if beyond := relay.beyond(**{limit: count}):
        raise Rejected(beyond)


def _at(place: str, decode: Any, raw: Raw) -> Any:
    """Decode a part of the body; errors name its place in the whole."""
    try:
        return decode(raw)
    except msgspec.ValidationError as error:
        text = str(error)
        raise msgspec.ValidationError(
            text.replace("`$", f"`$.{place}") if "`$" in text else f"{text} - at `$.{place}`"
        ) from error
