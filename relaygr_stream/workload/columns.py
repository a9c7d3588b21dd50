"""Converts the text of a log's columns to numbers: users, items, actions, times.

Whether a column holds numbers or names is decided once per file, from all of its rows: a file that is sorted by item
begins with what its end is not. A single broken line cannot change the meaning of all others.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from relaygr_stream.errors import InputError
from relaygr_stream.wire.behaviours import ITEM_DTYPE, MAX_ITEM
from relaygr_stream.workload.log_features import FeatureReader
from relaygr_stream.workload.logfile import BrokenLine
from relaygr_stream.workload.values import (
    LATEST_MS,
    BadValue,
    TimeUnit,
    Unit,
    find_time_unit,
    is_number,
    parse_time,
    short,
)

IdKind = Literal["auto", "number", "name"]

#: Rows seen before the unit of times is decided.
SAMPLE_ROWS: Final = 200
#: Share of a column's rows that must agree on "number".
NUMBER_SHARE: Final = 0.9
MAX_USER_CHARS: Final = 256  # the bound of an id on the wire
MAX_ACTION: Final = 255
BROKEN_SHOWN: Final = 5
#: A file of which a larger share is broken is read by the wrong rule. Fewer lines than are shown do not count.
MAX_BROKEN_SHARE: Final = 0.1
#: Rows after which a file that is mostly broken is not read to its end.
EARLY_ROWS: Final = 1 << 16


@dataclass(frozen=True)
class ColumnMap:
    """The column of each role: a header's name, or a column's number from 1. None: found by the usual names."""

    user: str | None = None
    item: str | None = None
    action: str | None = None
    time: str | None = None

    @classmethod
    def parse(cls, text: str) -> ColumnMap:
        """Read `user=uid,item=sku,action=type,time=ts`; raises InputError."""
        known = [field.name for field in fields(cls)]
        given: dict[str, str] = {}
        for part in text.split(","):
            name, separator, column = (piece.strip() for piece in part.partition("="))
            if not separator or not column or name not in known or name in given:
                raise InputError(
                    f"columns {text!r}: {part.strip()!r} is not one of user=…, item=…, action=…, time=…, each once"
                )
            given[name] = column
        missing = [name for name in ("user", "item", "time") if name not in given]
        if missing:
            raise InputError(f"columns {text!r}: {' and '.join(missing)} missing; only action may be left out")
        return cls(**given)


#: One line's columns as text: (line number, user, item, action or None, time), and the values of its features, as text
#: or as the file's format has them. A bare tuple: there are millions.
Row = tuple[int, str, str, str | None, str, Sequence[Any]]


@dataclass(frozen=True)
class Columns:
    """The usable rows of a log, in the order of the file; the arrays are (n,)."""

    users: tuple[str, ...]
    user: npt.NDArray[np.uint32]  # index into `users`
    items: npt.NDArray[Any]  # uint32, or int64 where one is beyond
    actions: npt.NDArray[np.uint8]
    times: npt.NDArray[np.int64]  # ms
    features: dict[str, npt.NDArray[Any]]
    item_names: tuple[str, ...]  # of ids 1, 2, …, in order of first appearance; empty: ids are the numbers
    action_names: tuple[str, ...]
    halves: bool  # some actions have halves, so all are doubled
    time_unit: Unit


class ColumnReader:
    """Collects rows into arrays; broken rows are counted.

    Memory: 24 bytes a row and its features, plus one dictionary entry for each distinct user, item and action.
    """

    def __init__(
        self,
        path: Path,
        item_ids: IdKind = "auto",
        actions: IdKind = "auto",
        time_unit: TimeUnit = "auto",
        features: FeatureReader | None = None,
        *,
        plausible: bool = True,
    ) -> None:
        self.path = path
        self.features = features or FeatureReader()
        self.broken: list[BrokenLine] = []  # the first BROKEN_SHOWN of them
        self.broken_count = 0
        self._item_ids, self._actions = item_ids, actions
        self._plausible = plausible  # whether times must be dates
        self._unit: Unit = "s" if time_unit == "auto" else time_unit
        self._within = (0, LATEST_MS)
        self._pending: list[Row] | None = [] if time_unit == "auto" else None
        self._user_codes: dict[str, int] = {}
        self._item_codes: dict[str, int] = {}
        self._action_codes: dict[str | None, int] = {None: 0}
        self._user, self._item, self._action = array("I"), array("I"), array("I")
        self._line, self._time = array("I"), array("q")

    def add(self, row: Row) -> None:
        """Add a row, or count it as broken."""
        if self._pending is not None:
            self._pending.append(row)
            if len(self._pending) >= SAMPLE_ROWS:
                self._decide_unit()
            return
        line, user_text, item, action, time_text, cells = row
        try:
            time = parse_time(time_text, self._unit, self._within)
            if user_text not in self._user_codes:
                _check_user(user_text)
            numbers = self.features.parse(cells) if cells else None
        except BadValue as reason:
            self.add_broken(BrokenLine(line, str(reason)))
            return
        self._user.append(self._user_codes.setdefault(user_text, len(self._user_codes)))
        self._item.append(self._item_codes.setdefault(item, len(self._item_codes)))
        self._action.append(self._action_codes.setdefault(action, len(self._action_codes)))
        self._line.append(line)
        self._time.append(time)
        if numbers is not None:
            self.features.add(numbers)

    def add_broken(self, line: BrokenLine) -> None:
        """Count a line that could not be split into a row. Raises InputError where most are broken."""
        self.broken_count += 1
        if len(self.broken) < BROKEN_SHOWN or line.line < self.broken[-1].line:
            insort(self.broken, line, key=lambda broken: broken.line)  # sorted, since rows of the sample are read late
            del self.broken[BROKEN_SHOWN:]
        if self.broken_count % EARLY_ROWS == 0 and self.broken_count > len(self._line):
            self._refuse(self.broken_count + len(self._line))

    def finish(self) -> Columns:
        """All usable rows. Raises InputError if more than MAX_BROKEN_SHARE are broken, or times are no dates."""
        if self._pending is not None:
            self._decide_unit()
        item_column, action_column = np.asarray(self._item, np.uint32), np.asarray(self._action, np.uint32)
        items, bad_items, item_names = self._read_items(item_column)
        doubled, bad_actions, action_names = self._read_actions(action_column)
        reasons = (bad_items, item_column), (bad_actions, action_column)
        keep = ~np.any([np.isin(column, list(bad)) for bad, column in reasons], axis=0)
        for row in np.flatnonzero(~keep)[:BROKEN_SHOWN].tolist():
            reason = bad_items.get(int(item_column[row])) or bad_actions[int(action_column[row])]
            self.add_broken(BrokenLine(self._line[row], reason))
            self.broken_count -= 1
        self.broken_count += int(np.count_nonzero(~keep))
        rows = self.broken_count + int(np.count_nonzero(keep))
        if keep.any() and self.broken_count > max(BROKEN_SHOWN, MAX_BROKEN_SHARE * rows):
            self._refuse(rows)
        present, user = np.unique(np.asarray(self._user, np.uint32)[keep], return_inverse=True)
        names = list(self._user_codes)
        actions, halves = self._undoubled(doubled[action_column][keep])
        return Columns(
            users=tuple(names[code] for code in present.tolist()),
            user=user.astype(np.uint32),
            items=items[item_column][keep],
            actions=actions,
            times=np.asarray(self._time, np.int64)[keep],
            features={name: values[keep] for name, values in self.features.finish().items()},
            item_names=item_names,
            action_names=action_names,
            halves=halves,
            time_unit=self._unit,
        )

    def _decide_unit(self) -> None:
        rows, self._pending = self._pending or [], None
        found = find_time_unit([row[4] for row in rows])
        if found is not None:
            self._unit, self._within = found
        elif self._plausible:
            raise InputError(
                f"{self.path}: times such as {short(rows[0][4])} are no plausible dates in seconds, milliseconds, "
                f"microseconds, nanoseconds or days since 1970; say what they are with --time-unit"
            )
        for row in rows:
            self.add(row)

    def _read_items(self, column: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[Any], dict[int, str], tuple[str, ...]]:
        """Each distinct text's id, the reasons of those without one, and the names of ids 1, 2, …"""
        texts, kind = list(self._item_codes), self._item_ids
        if kind == "auto":
            numbers = np.fromiter(map(_is_item_number, texts), np.bool_, len(texts))
            padded = any(len(text) > 1 and text[0] == "0" and text.isdigit() for text in texts)  # 7, 07: two items
            kind = "name" if padded or (len(column) and np.mean(numbers[column]) < NUMBER_SHARE) else "number"
        ids, bad, names = np.zeros(len(texts), np.int64), dict[int, str](), list[str]()
        for code, text in enumerate(texts):
            if kind == "name" and text:
                names.append(text)
                ids[code] = len(names)
            elif kind == "number" and _is_item_number(text):
                ids[code] = int(text)
            elif kind == "name":
                bad[code] = "the item is empty"
            else:
                bad[code] = f"item {short(text)} is not an integer within 0…{MAX_ITEM}; --item-ids name takes any text"
        return narrowed(ids), bad, tuple(names)

    def _read_actions(
        self, column: npt.NDArray[np.uint32]
    ) -> tuple[npt.NDArray[np.uint16], dict[int, str], tuple[str, ...]]:
        """As `_read_items`; numbers are doubled, so that half stars are integers. Without an action: 0."""
        texts = [text or "" for text in self._action_codes]
        kind = self._actions
        if kind == "auto":
            numbers = np.fromiter(map(is_number, texts), np.bool_, len(texts))
            given = column[column > 0]  # code 0: the row has none
            kind = "name" if len(given) and np.mean(numbers[given]) < NUMBER_SHARE else "number"
        doubled, bad, names = np.zeros(len(texts), np.uint16), dict[int, str](), list[str]()
        for code, text in enumerate(texts[1:], 1):
            try:
                doubled[code] = _doubled_number(text) if kind == "number" else 2 * _named(text, names)
            except BadValue as reason:
                bad[code] = str(reason)
        return doubled, bad, tuple(names)

    def _undoubled(self, doubled: npt.NDArray[np.uint16]) -> tuple[npt.NDArray[np.uint8], bool]:
        halves = bool(np.any(doubled & 1))
        if not halves:
            return (doubled // np.uint16(2)).astype(np.uint8), False
        if int(doubled.max()) > MAX_ACTION:
            raise InputError(
                f"{self.path}: the actions mix half steps and values above {MAX_ACTION / 2:g}; map them to 0…255"
            )
        return doubled.astype(np.uint8), True

    def _refuse(self, rows: int) -> NoReturn:
        first = self.broken[0]
        raise InputError(
            f"{self.path}: {self.broken_count} of {rows} lines cannot be read, and at most {MAX_BROKEN_SHARE:.0%} are "
            f"skipped; the first is line {first.line}: {first.reason}. Mend the file, or say how to read it: "
            f"--item-ids name, --time-unit, --columns, --format"
        )


def _check_user(text: str) -> None:
    if not text or len(text) > MAX_USER_CHARS:
        raise BadValue(f"the user id has {len(text)} characters; 1 to {MAX_USER_CHARS} are allowed")


def _doubled_number(text: str) -> int:
    if is_number(text):
        doubled = 2 * float(text)
        if doubled == int(doubled) and 0 <= doubled <= 2 * MAX_ACTION:
            return int(doubled)
    raise BadValue(f"action {short(text)} is not a number within 0…{MAX_ACTION} in steps of 1 or ½")


def _named(text: str, names: list[str]) -> int:
    """The number of a new name, which is added to `names`. Raises BadValue."""
    if not text:
        raise BadValue("the action is empty")
    if len(names) == MAX_ACTION:
        raise BadValue(f"action {short(text)} would be the {MAX_ACTION + 1}th distinct one; {MAX_ACTION} fit")
    names.append(text)
    return len(names)


def _is_item_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(MAX_ITEM)) and int(text) <= MAX_ITEM


def narrowed(ids: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Item ids as uint32, unless one is beyond; -1, of what is left out, is any id."""
    return ids.astype(ITEM_DTYPE) if int(ids.max(initial=0)) <= np.iinfo(ITEM_DTYPE).max else ids
