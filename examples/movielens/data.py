"""Reads interactions from a file: MovieLens `ratings.dat` and `u.data`, SASRec's `user item` lines, any CSV.

Histories are arrays in the order of time. Item ids become 0 … items - 1; `Histories.names` has the file's own ids.
"""

from __future__ import annotations

import csv
import gzip
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt

from relaygr_stream.settings.inputs import check_regular
from relaygr_stream.workload.values import parse_time, unit_by_size

Ints = npt.NDArray[np.int64]

#: Test and validation take the last two behaviours; two more give training one transition.
MIN_HISTORY: Final = 4


class DataError(Exception):
    """A file that cannot be read as interactions: which line, what was found, what is expected."""


class Interaction(NamedTuple):
    """One line. action: twice the rating where the file has one, else 0. time_ms: 0 where the file has none."""

    user: str
    item: str
    action: int
    time_ms: int


@dataclass(frozen=True)
class History:
    """A user's behaviours, oldest first: dense item ids, action types, times in milliseconds; three arrays (n,)."""

    user: str
    items: Ints
    actions: Ints
    times: Ints

    def __len__(self) -> int:
        return len(self.items)

    def slice(self, start: int, stop: int) -> History:
        """Behaviours start:stop, as views."""
        return History(self.user, self.items[start:stop], self.actions[start:stop], self.times[start:stop])

    def gaps(self) -> Ints:
        """Milliseconds since the behaviour before, (n,); 0 for the first. As `Tokens.of` makes them."""
        return np.diff(self.times, prepend=self.times[:1])


@dataclass(frozen=True)
class Histories:
    """All users with at least MIN_HISTORY behaviours. names[i]: the id that the file has for item i."""

    users: list[History]
    names: list[str]
    has_times: bool

    @property
    def interactions(self) -> int:
        """Behaviours of all users."""
        return sum(len(user) for user in self.users)


def read_histories(file: str | Path) -> Histories:
    """The histories in `file`, users in the order of their first line.

    By the first line: `u::i::rating::seconds` (ratings.dat), tabs `u i rating seconds` (u.data), `u i` (SASRec: in the
    order of time, without times), or a CSV whose header names user, item and time. Plain, .gz or .xz. Behaviours of
    equal time keep the file's order. Raises DataError.
    """
    path = Path(file)
    by_user: dict[str, list[Interaction]] = {}
    try:
        check_regular(path)
        with _open(path) as text:
            for one in _interactions(path, text):
                by_user.setdefault(one.user, []).append(one)
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    kept = {user: sorted(lines, key=lambda one: one.time_ms) for user, lines in by_user.items()}
    kept = {user: lines for user, lines in kept.items() if len(lines) >= MIN_HISTORY}
    if not kept:
        raise DataError(f"{path}: no user has {MIN_HISTORY} behaviours or more ({len(by_user)} users)")
    halves = any(one.action & 1 for lines in kept.values() for one in lines)  # else all are whole, and not doubled
    names = sorted({one.item for lines in kept.values() for one in lines}, key=_as_number)
    ids = {name: index for index, name in enumerate(names)}
    users = [
        History(
            user,
            np.array([ids[one.item] for one in lines], np.int64),
            np.array([one.action if halves else one.action // 2 for one in lines], np.int64),
            np.array([one.time_ms for one in lines], np.int64),
        )
        for user, lines in kept.items()
    ]
    return Histories(users, names, any(user.times.any() for user in users))


def _as_number(name: str) -> tuple[int, str]:
    return (int(name), f"{len(name):3}") if name.isascii() and name.isdigit() and len(name) < 19 else (2**63, name)


def _open(path: Path) -> TextIO:
    encoding = "utf-8-sig"  # spreadsheets write a byte order mark
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding=encoding)
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding=encoding)
    return path.open(encoding=encoding, newline="")


def _interactions(path: Path, text: TextIO) -> Iterator[Interaction]:
    lines = ((number, line.strip()) for number, line in enumerate(text, 1))
    numbered = ((number, line) for number, line in lines if line)
    first = next(numbered, None)
    if first is None:
        raise DataError(f"{path}: holds no lines")
    head = first[1]
    if "::" in head or "\t" in head:
        yield from _ratings(path, _chain(first, numbered), "::" if "::" in head else "\t")
    elif "," in head:
        yield from _csv(path, head, numbered)
    elif len(head.split()) == 2:
        for number, line in _chain(first, numbered):
            fields = line.split()
            if len(fields) != 2:
                raise _bad(path, number, line, "user item")
            yield Interaction(fields[0], fields[1], 0, 0)
    else:
        raise _bad(
            path, first[0], head, "user::item::rating::seconds, the same with tabs, `user item`, or a CSV with a header"
        )


def _ratings(path: Path, lines: Iterator[tuple[int, str]], separator: str) -> Iterator[Interaction]:
    for number, line in lines:
        fields = line.split(separator)
        try:
            user, item, rating, time = fields
            yield Interaction(user, item, _doubled(rating), _time_ms(time))
        except ValueError:
            raise _bad(path, number, line, f"user{separator}item{separator}rating{separator}seconds") from None


def _csv(path: Path, head: str, rest: Iterator[tuple[int, str]]) -> Iterator[Interaction]:
    header = [name.strip().lower() for name in next(csv.reader([head]))]
    columns = []
    for wanted in (("user", "user_id", "userid"), ("item", "item_id", "itemid", "movieid"), ("time", "timestamp")):
        found = next((header.index(name) for name in wanted if name in header), None)
        if found is None:
            raise DataError(f"{path}: the header {head!r} has no column `{wanted[0]}` (or {', '.join(wanted[1:])})")
        columns.append(found)
    rating = header.index("rating") if "rating" in header else None
    for number, line in rest:
        try:
            fields = next(csv.reader([line]))
            user, item, time = (fields[column].strip() for column in columns)
            yield Interaction(user, item, 0 if rating is None else _doubled(fields[rating]), _time_ms(time))
        except (ValueError, IndexError, csv.Error):
            raise _bad(path, number, line, f"{len(header)} columns with a time in seconds or milliseconds") from None


def _time_ms(text: str) -> int:
    return parse_time(text.strip(), unit_by_size(float(text)))


def _doubled(text: str) -> int:
    """Twice a rating of whole or half stars, as `relaygr replay` reads it: served rows are those of training."""
    doubled = 2 * float(text)
    if doubled != int(doubled) or not 0 <= doubled <= 255:
        raise ValueError(text)
    return int(doubled)


def _chain(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _bad(path: Path, number: int, line: str, expected: str) -> DataError:
    return DataError(f"{path}, line {number}: found {line[:80]!r}, expected {expected}")
