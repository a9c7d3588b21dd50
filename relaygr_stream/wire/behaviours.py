"""A user's behaviours and item ids as little-endian bytes, their form in messages."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from relaygr_stream.wire import features
from relaygr_stream.wire.features import Columns, ColumnsInPlace

ITEM_DTYPE: Final = np.dtype("<u4")
#: Of item ids of which one is beyond ITEM_DTYPE: not negative.
WIDE_ITEM_DTYPE: Final = np.dtype("<i8")
MAX_ITEM: Final = 2**63 - 1
#: The schema version of messages with wide item ids.
WIDE_VERSION: Final = 4
ACTION_DTYPE: Final = np.dtype("u1")
TIME_DTYPE: Final = np.dtype("<i8")  # Unix time in milliseconds
#: Beyond this (some 146 million years) the difference of two times does not fit an int64.
MAX_TIME_MS: Final = 1 << 62
#: Characters of a value that an error quotes.
MAX_SHOWN: Final = 40


class Behaviours(msgspec.Struct, frozen=True, forbid_unknown_fields=False, dict=True):
    """A user's behaviours, oldest first: parallel arrays of the same length n, as little-endian bytes."""

    items: bytes = b""  # n × uint32: item ids; n × int64 where one is beyond
    actions: bytes = b""  # n × uint8: action types
    times: bytes = b""  # n × int64: Unix time in milliseconds, non-decreasing
    columns: Columns | msgspec.UnsetType = msgspec.UNSET  # the behaviours' features (features.py), n rows each

    @classmethod
    def from_arrays(cls, items: npt.ArrayLike, actions: npt.ArrayLike, times: npt.ArrayLike) -> Behaviours:
        """Pack three arrays of one length n. Raises ValueError for other lengths, or values outside their wire type."""
        packed = [
            pack_ids(items, "items"),
            pack(actions, ACTION_DTYPE, "actions"),
            pack(times, TIME_DTYPE, "times"),
        ]
        made = cls(packed[0], packed[1], packed[2]).checked(ValueError)
        if (count := len(items)) != len(made):  # type: ignore[arg-type] # it has one dimension
            raise ValueError(
                f"items, actions and times must be parallel arrays; got {count} items, {len(made)} actions"
            )
        return made

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def wide(self) -> bool:
        """Whether the item ids are int64: at least one is beyond uint32, or the sender did not look."""
        return len(self.items) == WIDE_ITEM_DTYPE.itemsize * len(self.actions) > 0

    @property
    def table(self) -> dict[str, bytes]:
        """The behaviours' features; empty if there are none."""
        return self.columns or {}

    def parts(self) -> tuple[bytes, ...]:
        """All arrays, packed."""
        return (self.items, self.actions, self.times, *self.table.values())

    def nbytes(self) -> int:
        """Bytes of the arrays."""
        plain = len(self.items) + len(self.actions) + len(self.times)
        return plain + features.nbytes(self.columns) if self.columns else plain

    def arrays(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Read-only views (items, actions, times), each of length n; items are uint32, or int64 if they are wide."""
        return (
            np.frombuffer(self.items, ITEM_DTYPE if len(self.items) == 4 * len(self.actions) else WIDE_ITEM_DTYPE),
            np.frombuffer(self.actions, ACTION_DTYPE),
            np.frombuffer(self.times, TIME_DTYPE),
        )

    def slice(self, start: int, stop: int) -> Behaviours:
        """The behaviours start:stop, copied; their item ids are wide only if one of them needs it."""
        columns = self.columns
        if columns:
            sizes = {key: len(data) // max(1, len(self)) for key, data in columns.items()}
            columns = {key: data[start * sizes[key] : stop * sizes[key]] for key, data in columns.items()}
        size = WIDE_ITEM_DTYPE.itemsize if self.wide else ITEM_DTYPE.itemsize
        items = self.items[start * size : stop * size]
        if size > ITEM_DTYPE.itemsize and not ((ids := np.frombuffer(items, WIDE_ITEM_DTYPE)) >> 32).any():
            items = ids.astype(ITEM_DTYPE).tobytes()
        return Behaviours(items, self.actions[start:stop], self.times[start * 8 : stop * 8], columns)

    def checked(self, error: type[Exception]) -> Behaviours:
        """Returns self if the arrays have one length, and the times do not decrease and are within MAX_TIME_MS;
        otherwise raises `error`.

        Whether the columns are those of a model is not known here.
        """
        if "_checked" in self.__dict__:  # a client's request has the history of its event
            return self
        n = len(self.actions)
        sizes = (n * ITEM_DTYPE.itemsize, n * WIDE_ITEM_DTYPE.itemsize)
        if len(self.items) not in sizes or len(self.times) != n * TIME_DTYPE.itemsize:
            raise error(
                f"items, actions and times must be parallel arrays of uint32 (or all int64), uint8 and int64, of one "
                f"length; got {rows_of(self.items, ITEM_DTYPE, 'items')}, "
                f"{rows_of(self.actions, ACTION_DTYPE, 'actions')} and {rows_of(self.times, TIME_DTYPE, 'times')}"
            )
        if self.columns:
            features.check_rows(self.columns, n, error)
        if len(self.items) > 4 * n:
            check_wide(self.items, "items", error)
        times = np.frombuffer(self.times, TIME_DTYPE)
        if n > 1 and (times[1:] < times[:-1]).any():  # the method, since np.any takes a microsecond more per event
            at = int(np.argmax(times[1:] < times[:-1])) + 1
            raise error(f"times must not go back; behaviour {at} is at {times[at]} after {times[at - 1]}")
        if n and not -MAX_TIME_MS < times[0] <= times[-1] < MAX_TIME_MS:
            first, last = times[0], times[-1]
            raise error(f"times must be Unix milliseconds; the behaviours are from {first} to {last}")
        self.__dict__["_checked"] = True
        return self


class BehavioursInPlace(Behaviours, frozen=True, forbid_unknown_fields=False):
    """Behaviours that are views into the message; they keep it in memory."""

    items: memoryview = memoryview(b"")  # type: ignore[assignment]
    actions: memoryview = memoryview(b"")  # type: ignore[assignment]
    times: memoryview = memoryview(b"")  # type: ignore[assignment]
    columns: ColumnsInPlace | msgspec.UnsetType = msgspec.UNSET  # type: ignore[assignment]


def rows_of(packed: bytes, dtype: np.dtype[Any], what: str) -> str:
    """How many values a packed array has, as text; its bytes where they are no whole number of values."""
    rows, rest = divmod(len(packed), dtype.itemsize)
    return f"{len(packed)} bytes of {what} ({dtype.itemsize} each)" if rest else f"{rows} {what}"


def check_wide(packed: bytes, name: str, error: type[Exception]) -> None:
    """Raise `error`, naming `name`, if a wide item id is negative."""
    ids = np.frombuffer(packed, WIDE_ITEM_DTYPE)
    if (ids < 0).any():
        at = int(np.argmax(ids < 0))
        raise error(f"{name} must be within 0…{MAX_ITEM}, got {ids[at]} at position {at}")


def pack(values: npt.ArrayLike, dtype: np.dtype[Any], name: str) -> bytes:
    """Integers as little-endian bytes of this dtype. Raises ValueError, naming `name`, value and limits, for a value
    that is none, or does not fit."""
    limits = np.iinfo(dtype)
    return _integers(values, name, int(limits.min), int(limits.max)).astype(dtype).tobytes()


def pack_ids(values: npt.ArrayLike, name: str, *, wide: bool = False) -> bytes:
    """Item ids within 0…MAX_ITEM, packed as uint32, or all as int64 where one is larger, or if `wide`. Raises as
    `pack`."""
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.size and not wide:  # the common cases: each fits
        if values.dtype == ITEM_DTYPE:
            return values.tobytes()
        if values.dtype == WIDE_ITEM_DTYPE and not (values >> 32).any():
            return values.astype(ITEM_DTYPE).tobytes()
    array = _integers(values, name, 0, MAX_ITEM)
    wide = wide or bool(array.size and array.max() > np.iinfo(ITEM_DTYPE).max)
    return array.astype(WIDE_ITEM_DTYPE if wide else ITEM_DTYPE).tobytes()


def pack_items(values: npt.ArrayLike) -> bytes:
    """Item ids as uint32 little-endian bytes. Raises ValueError if a value does not fit; `candidate_fields`
    (wire/messages.py) takes larger ids."""
    return pack(values, ITEM_DTYPE, "item ids")


def _integers(values: npt.ArrayLike, name: str, least: int, most: int) -> npt.NDArray[Any]:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:  # lists of unequal lengths
        raise ValueError(f"{name} must be one-dimensional: {error}") from error
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    listed = values if isinstance(values, list | tuple) else None
    # numpy makes 1 of True, and floats of integers that no type of its own holds.
    kinds = {array.dtype.type} if listed is None else set(map(type, listed))
    if not array.size or (
        array.dtype.kind in "iu"
        and all(map(_is_integer, kinds))
        and least <= int(array.min())
        and int(array.max()) <= most
    ):
        return array
    for at, value in enumerate(array.tolist() if listed is None else listed):
        if not _is_integer(type(value)):
            raise ValueError(f"{name} must be integers within {least}…{most}, got {_short(value)} at position {at}")
        if not least <= value <= most:
            raise ValueError(f"{name} must be within {least}…{most}, got {_short(value)} at position {at}")
    raise ValueError(f"{name} must be integers within {least}…{most}, got {array.dtype}")


def _is_integer(kind: type) -> bool:
    return issubclass(kind, int | np.integer) and kind is not bool


def _short(value: Any) -> str:
    if not isinstance(value, int) or abs(value) < 1 << 64:
        return repr(value)[:MAX_SHOWN]
    return f"{'-' * (value < 0)}2**{abs(value).bit_length() - 1}"
