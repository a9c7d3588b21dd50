"""A user's behaviours and item ids as little-endian bytes, their form in messages."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from relaygr_stream.errors import DecodeError
from relaygr_stream.wire import features
from relaygr_stream.wire.features import Columns, ColumnsInPlace

ITEM_DTYPE: Final = np.dtype("<u4")
ACTION_DTYPE: Final = np.dtype("u1")
TIME_DTYPE: Final = np.dtype("<i8")  # Unix time in milliseconds
#: Beyond this (some 146 million years) the difference of two times does not fit an int64.
MAX_TIME_MS: Final = 1 << 62


class Behaviours(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """A user's behaviours, oldest first: parallel arrays of the same length n, as little-endian bytes."""

    items: bytes = b""  # n × uint32: item ids
    actions: bytes = b""  # n × uint8: action types
    times: bytes = b""  # n × int64: Unix time in milliseconds, non-decreasing
    columns: Columns | msgspec.UnsetType = msgspec.UNSET  # the behaviours' features (features.py), n rows each

    @classmethod
    def of(cls, items: npt.ArrayLike, actions: npt.ArrayLike, times: npt.ArrayLike) -> Behaviours:
        """Pack three arrays of one length n. Raises ValueError for other lengths, or values outside their wire type."""
        packed = [
            pack(items, ITEM_DTYPE, "items"),
            pack(actions, ACTION_DTYPE, "actions"),
            pack(times, TIME_DTYPE, "times"),
        ]
        return cls(packed[0], packed[1], packed[2]).checked(ValueError)

    def __len__(self) -> int:
        return len(self.items) // ITEM_DTYPE.itemsize

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

    def arrays(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Read-only views (items, actions, times), each of length n."""
        return (
            np.frombuffer(self.items, ITEM_DTYPE),
            np.frombuffer(self.actions, ACTION_DTYPE),
            np.frombuffer(self.times, TIME_DTYPE),
        )

    def slice(self, start: int, stop: int) -> Behaviours:
        """The behaviours start:stop, copied."""
        columns = self.columns
        if columns:
            sizes = {key: len(data) // max(1, len(self)) for key, data in columns.items()}
            columns = {key: data[start * sizes[key] : stop * sizes[key]] for key, data in columns.items()}
        return Behaviours(
            self.items[start * 4 : stop * 4], self.actions[start:stop], self.times[start * 8 : stop * 8], columns
        )

    def checked(self, error: type[Exception]) -> Behaviours:
        """Returns self if the arrays have one length and the times do not decrease; otherwise raises `error`.

        Whether the columns are those of a model is not known here.
        """
        n, rest = divmod(len(self.items), ITEM_DTYPE.itemsize)
        if rest or len(self.actions) != n or len(self.times) != n * TIME_DTYPE.itemsize:
            raise error(
                f"items, actions and times must be parallel arrays of uint32, uint8 and int64, of one length; got "
                f"{rows_of(self.items, ITEM_DTYPE, 'items')}, {rows_of(self.actions, ACTION_DTYPE, 'actions')} and "
                f"{rows_of(self.times, TIME_DTYPE, 'times')}"
            )
        if self.columns:
            features.check_rows(self.columns, n, error)
        times = np.frombuffer(self.times, TIME_DTYPE)
        if n > 1 and (times[1:] < times[:-1]).any():  # the method, since np.any takes a microsecond more per event
            at = int(np.argmax(times[1:] < times[:-1])) + 1
            raise error(f"times must not go back; behaviour {at} is at {times[at]} after {times[at - 1]}")
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


def check_times(behaviours: Behaviours, what: str) -> None:
    """Raise DecodeError if gaps between behaviours may not fit an int64; call it before computing gaps.

    Times do not decrease, so checking the first and the last is enough. what: names the behaviours in the error.
    """
    for raw in (behaviours.times[:8], behaviours.times[-8:]):
        at = int.from_bytes(raw, "little", signed=True)
        if abs(at) >= MAX_TIME_MS:
            raise DecodeError("invalid", f"the {what} has a behaviour at {at} ms; times are Unix milliseconds")


def pack(values: npt.ArrayLike, dtype: np.dtype[Any], name: str) -> bytes:
    """Integers as little-endian bytes of this dtype. Raises ValueError, naming `name`, if a value does not fit."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    limits = np.iinfo(dtype)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        if not (isinstance(values, list) and all(type(each) is int for each in values)):
            raise ValueError(f"{name} must be integers, got {array.dtype}")
        least, most = min(values), max(values)  # beyond every type of numpy
    elif array.size:
        least, most = int(array.min()), int(array.max())
    else:
        least = most = 0
    if least < limits.min or most > limits.max:
        raise ValueError(f"{name} must be within {limits.min}…{limits.max}, got {_short(least)}…{_short(most)}")
    return array.astype(dtype).tobytes()


def _short(number: int) -> str:
    return str(number) if abs(number) < 1 << 64 else f"{'-' * (number < 0)}2**{abs(number).bit_length() - 1}"


def pack_items(values: npt.ArrayLike) -> bytes:
    """Item ids as uint32 little-endian bytes. Raises ValueError if a value does not fit."""
    return pack(values, ITEM_DTYPE, "item ids")
