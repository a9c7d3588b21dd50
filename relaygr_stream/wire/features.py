"""Feature columns beside items, actions and times: the schema that a model declares, and the columns in messages.

    table       columns of             rows             depends on it
    user        the user               1                prefix KV and scores
    behaviour   each behaviour         n                prefix KV and scores
    candidate   each candidate, and    m                scores only
                candidate × user

In a message, a table is a map of NAME:DTYPE to rows × width little-endian values, row-major. The worker keeps the
values of user and behaviours beside the tokens, as 64-bit words that are compared, cut and copied with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from relaygr_stream.errors import ConfigError, DecodeError
from relaygr_stream.settings.inputs import read_text

Dtype = Literal["int32", "int64", "float32"]
Of = Literal["user", "behaviour", "candidate", "cross"]
Table = Literal["user", "behaviour", "candidate"]

#: Most columns of a table in a message: far above any schema, and little memory for a hostile message.
MAX_COLUMNS: Final = 1024
#: Longest key of a column in a message: a name of 64 characters, a colon, a dtype.
MAX_KEY: Final = 72

#: What to do about a request without any of the columns that the model reads, in a worker's error.
NONE_CAME: Final = (
    "no features came, and the model reads some; name its config.json with --features (relaygr replay, relaygr history "
    "import), or give its schema to RelayClient(…, features=…)"
)

Key = Annotated[str, Meta(min_length=1, max_length=MAX_KEY)]
#: A table in a message: NAME:DTYPE → packed values.
Columns = Annotated[dict[Key, bytes], Meta(max_length=MAX_COLUMNS)]
ColumnsInPlace = Annotated[dict[Key, memoryview], Meta(max_length=MAX_COLUMNS)]


class FeatureTables(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message's features other than the behaviours' own. schema: the digest of the sender's schema; "": unstated."""

    schema: Annotated[str, Meta(max_length=64)] = ""
    user: Columns = {}  # one row
    candidate: Columns = {}  # of candidates and of candidate × user: m rows

    def nbytes(self) -> int:
        """Bytes of the columns' keys and values."""
        return nbytes(self.user) + nbytes(self.candidate)


#: A table on the host: name → (rows, width), read-only.
Values = Mapping[str, npt.NDArray[Any]]
Words = npt.NDArray[np.int64]


class FeatureColumn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One feature. of: the user, each behaviour, each candidate, or candidate × user ("cross"). width: values a row.

    int32 and int64 are categories, float32 are numbers. rows: rows of a category's table in the built-in model; other
    models ignore it, and it is no part of the schema's digest.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}\Z")]
    of: Of
    dtype: Dtype
    width: Annotated[int, Meta(ge=1, le=4096)] = 1
    rows: Annotated[int, Meta(ge=0)] = 0

    @property
    def key(self) -> str:
        """Its key in messages."""
        return f"{self.name}:{self.dtype}"

    @property
    def table(self) -> Table:
        """The table that it is sent in."""
        return "candidate" if self.of == "cross" else self.of

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * np.dtype(self.dtype).itemsize


class FeatureSchema:
    """The columns that a model reads. Two schemas with the same columns are the same, in whatever order they are given.

    digest: 16 hexadecimal digits of all columns' tables, names, types and widths; "" for no columns. words: 64-bit
    words of a token's features. context_tokens: 1 if there are user features: they take a sequence's first token.

    Raises ValueError for a name that stands there twice.
    """

    columns: tuple[FeatureColumn, ...]
    digest: str
    words: int
    context_tokens: int

    def __init__(self, columns: Iterable[FeatureColumn] = ()) -> None:
        # int64 first, so that they begin at whole words.
        self.columns = tuple(sorted(columns, key=lambda one: (one.dtype != "int64", one.name)))
        self._named = {one.name: one for one in self.columns}
        if len(self._named) < len(self.columns):
            twice = next(one.name for one in self.columns if self._named[one.name] is not one)
            raise ValueError(f"the column {twice!r} stands there twice; names are unique over all tables")
        self._tables = {table: [one for one in self.columns if one.table == table] for table in get_args(Table)}
        self.digest = self._digest() if self.columns else ""
        self.context_tokens = int(bool(self._tables["user"]))
        self.words = max(-(-sum(map(_halves, self._tables[table])) // 2) for table in ("user", "behaviour"))

    @classmethod
    def read(cls, file: str | Path) -> FeatureSchema:
        """The schema in a JSON object's list `features`, such as a checkpoint's config.json. Raises ConfigError."""
        try:
            found = msgspec.json.decode(read_text(file), type=_File)
            return cls(found.features)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise ConfigError(f"{file}: {error}") from error

    def __bool__(self) -> bool:
        return bool(self.columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FeatureSchema) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def table(self, table: Table) -> Sequence[FeatureColumn]:
        """The columns of one table."""
        return self._tables[table]

    def _digest(self) -> str:
        facts = sorted([one.of, one.name, one.dtype, one.width] for one in self.columns)
        return hashlib.blake2b(msgspec.json.encode(facts), digest_size=8).hexdigest()

    # ---- a sender: from arrays to messages ----

    def pack(self, values: Mapping[str, npt.ArrayLike], rows: Mapping[Table, int]) -> dict[Table, dict[str, bytes]]:
        """The tables in `rows`, packed. values: name → (rows, width), or (rows,) for width 1; of the user without rows.

        A table without rows needs no values. Raises ValueError, naming the column, for one that is missing or unknown,
        or has another type or shape, or numbers that are not finite.
        """
        for name in values:
            if name not in self._named:
                raise ValueError(f"column {name!r} is unknown; the schema has {self._listed(rows)}")
            if self._named[name].table not in rows:
                raise ValueError(f"column {name!r} is of {self._named[name].of}; this takes {self._listed(rows)}")
        return {
            table: {
                one.key: _packed(one, values.get(one.name), count)
                for one in self._tables[table]
                if count or one.name in values
            }
            for table, count in rows.items()
        }

    def _listed(self, tables: Iterable[Table]) -> str:
        names = [one.name for table in tables for one in self._tables[table]]
        return ", ".join(names) if names else "no column there"

    # ---- a receiver: checks ----

    def check(self, table: Table, rows: int, columns: Mapping[str, bytes]) -> None:
        """Raise DecodeError, naming the column, unless `columns` are exactly this table's, with this many rows.

        A table without rows may be left out. Numbers must be finite.
        """
        known = 0
        for one in self._tables[table]:
            data = columns.get(one.key)
            if data is None:
                if rows:
                    raise DecodeError("invalid", self._why_missing(one, columns))
                continue
            known += 1
            if len(data) != rows * one.row_bytes:
                what = f"{rows} × {one.width} {one.dtype} ({one.of}) are {rows * one.row_bytes} bytes"
                raise DecodeError("invalid", f"column {one.name!r} has {len(data)} bytes; {what}")
            if one.dtype == "float32" and not np.isfinite(np.frombuffer(data, "<f4")).all():
                raise DecodeError("invalid", f"column {one.name!r} has a number that is not finite")
        if known < len(columns):
            keys = {one.key for one in self._tables[table]}
            key = next(key for key in columns if key not in keys)
            raise DecodeError("invalid", f"column {key!r} ({table}) is unknown: {self._said(table)}")

    def check_digest(self, stated: str) -> None:
        """Raise DecodeError if a sender states another schema; "" states none. The columns were checked before."""
        if stated and stated != self.digest:
            raise DecodeError(
                "invalid",
                f"the sender's feature schema is {stated[:MAX_KEY]!r}, this model's {self.digest!r}; "
                f"they differ in columns that this message does not have",
            )

    def _why_missing(self, wanted: FeatureColumn, columns: Mapping[str, bytes]) -> str:
        for key in columns:
            name, _, dtype = key.rpartition(":")
            if name == wanted.name:
                return f"column {wanted.name!r} is {dtype!r}, the model reads {wanted.dtype} ({wanted.of})"
        missing = f"column {wanted.name!r} ({wanted.of}, {wanted.dtype}, width {wanted.width}) is missing"
        return missing if columns else f"{missing}: {NONE_CAME}"

    def _said(self, table: Table) -> str:
        columns = self._tables[table]
        listed = ", ".join(one.key for one in columns[:8]) + (", …" if len(columns) > 8 else "")
        return f"the model reads {listed}" if columns else "the model reads none there"

    # ---- a receiver: values ----

    def values(self, table: Table, columns: Mapping[str, bytes]) -> dict[str, npt.NDArray[Any]]:
        """The table's values, name → (rows, width), as views of checked columns."""
        return {
            one.name: np.frombuffer(columns[one.key], np.dtype(one.dtype).newbyteorder("<")).reshape(-1, one.width)
            for one in self._tables[table]
            if one.key in columns
        }

    def zeros(self, table: Table, rows: int) -> dict[str, npt.NDArray[Any]]:
        """Zeros in the form of `values`."""
        return {one.name: np.zeros((rows, one.width), one.dtype) for one in self._tables[table]}

    def to_words(self, table: Literal["user", "behaviour"], columns: Mapping[str, bytes], words: Words) -> None:
        """Write checked columns to `words` (self.words, rows), which are zero."""
        halves, at = words.view("<i4"), 0
        for name, values in self.values(table, columns).items():
            size = _halves(self._named[name]) // values.shape[1]
            for column in values.T:
                if size == 2:
                    words[at // 2] = column
                else:
                    halves[at // 2, at % 2 :: 2] = column.view("<i4") if column.dtype.kind == "f" else column
                at += size

    def from_words(self, table: Literal["user", "behaviour"], words: Words) -> dict[str, npt.NDArray[Any]]:
        """The table's values, name → (rows, width), from what `to_words` wrote."""
        halves, at = words.view("<i4"), 0
        found: dict[str, npt.NDArray[Any]] = {}
        for one in self._tables[table]:
            values = np.empty((words.shape[1], one.width), one.dtype)
            bits = values.view("<i4") if one.dtype == "float32" else values
            size = _halves(one) // one.width
            for index in range(one.width):
                bits[:, index] = words[at // 2] if size == 2 else halves[at // 2, at % 2 :: 2]
                at += size
            found[one.name] = values
        return found


class _File(msgspec.Struct):
    features: tuple[FeatureColumn, ...]


def nbytes(columns: Mapping[str, bytes]) -> int:
    """Bytes of a table's keys and values."""
    return sum(len(key) + len(data) for key, data in columns.items())


def check_rows(columns: Mapping[str, bytes], rows: int, error: type[Exception]) -> None:
    """Raise `error`, naming the column, if one has no whole number of bytes for each of the rows."""
    for key, data in columns.items():
        if len(data) % rows if rows else len(data):
            raise error(f"column {key!r} has {len(data)} bytes for {rows} rows")


def _halves(column: FeatureColumn) -> int:
    """32-bit halves of words that a row takes."""
    return column.row_bytes // 4


def _packed(column: FeatureColumn, values: npt.ArrayLike | None, rows: int) -> bytes:
    what = f"column {column.name!r} ({column.of}, {column.dtype}, width {column.width})"
    if values is None:
        raise ValueError(f"{what} is missing")
    array, dtype = np.asarray(values), np.dtype(column.dtype)
    if column.of == "user":
        array = array[None] if array.shape in ((), (column.width,)) else array
    if array.ndim == 1 and column.width == 1:
        array = array[:, None]
    if array.shape != (rows, column.width):
        raise ValueError(f"{what} has shape {array.shape}, expected ({rows}, {column.width})")
    if dtype.kind == "i":
        _check_integers(array, np.iinfo(dtype), what)
    elif array.dtype.kind not in "fiu":
        raise ValueError(f"{what} must be numbers, got {array.dtype}")
    with np.errstate(over="ignore"):
        array = array.astype(dtype.newbyteorder("<"))
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{what} has a number that is not finite, or not in float32")
    return array.tobytes()


def _check_integers(array: npt.NDArray[Any], limits: Any, what: str) -> None:
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{what} must be integers, got {array.dtype}")
    if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        raise ValueError(f"{what} must be within {limits.min}…{limits.max}, got {array.min()}…{array.max()}")


#: Of a model that reads items, actions and times alone.
NO_FEATURES: Final = FeatureSchema()
#: Of a message without features.
NO_TABLES: Final = FeatureTables()
