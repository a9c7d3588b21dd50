"""Converts the text of a log's columns to numbers: users, items, actions, times.

Whether a column holds numbers or names is decided once per file, from its first rows, so that a single broken line
cannot change the meaning of all others.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from relaygr_stream.errors import InputError
from relaygr_stream.lab.workload.log_features import FeatureReader
from relaygr_stream.lab.workload.logfile import BrokenLine
from relaygr_stream.lab.workload.values import FIRST_MILLISECONDS, BadValue, TimeUnit, is_number, parse_time, short
from relaygr_stream.wire.behaviours import ITEM_DTYPE

IdKind = Literal["auto", "number", "name"]

#: Rows seen before a column's kind is decided, and the share of them that must agree on "number".
SAMPLE_ROWS: Final = 200
NUMBER_SHARE: Final = 0.9
MAX_USER_CHARS: Final = 256  # the bound of an id on the wire
MAX_ITEM: Final = int(np.iinfo(ITEM_DTYPE).max)
MAX_ACTION: Final = 255
BROKEN_SHOWN: Final = 5


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


class ColumnReader:
    """Collects rows into arrays; broken rows are counted.

    Memory: 18 bytes a row and its features, plus one dictionary entry for each distinct user, item and action.
    """

    def __init__(
        self,
        item_ids: IdKind = "auto",
        actions: IdKind = "auto",
        time_unit: TimeUnit = "auto",
        features: FeatureReader | None = None,
    ) -> None:
        self.features = features or FeatureReader()
        self.users: dict[str, int] = {}
        self.item_names: list[str] = []  # of ids 1, 2, …, in order of first appearance; empty: ids are the numbers
        self.action_names: list[str] = []
        self.halves = False  # some actions have halves, so all are doubled; known when finished
        self.broken: list[BrokenLine] = []  # the first BROKEN_SHOWN of them
        self.broken_count = 0
        self.item_ids, self.actions, self.time_unit = item_ids, actions, time_unit
        self._pending: list[Row] | None = []
        self._items: dict[str, int] = {}
        self._doubled: dict[str | None, int] = {None: 0}  # actions × 2, so that half stars are integers
        self._user_column, self._item_column = array("I"), array("I")
        self._action_column, self._time_column = array("H"), array("q")

    def __len__(self) -> int:
        return len(self._time_column)

    def add(self, row: Row) -> None:
        """Add a row, or count it as broken."""
        if self._pending is not None:
            self._pending.append(row)
            if len(self._pending) >= SAMPLE_ROWS:
                self._decide()
            return
        line, user_text, item_text, action_text, time_text, cells = row
        try:
            time = parse_time(time_text, self.time_unit)
            user = self.users.get(user_text)
            if user is None:
                _check_user(user_text)
            item = self._items.get(item_text)
            if item is None:
                item = self._new_item(item_text)
            action = self._doubled.get(action_text)
            if action is None:
                action = self._new_action(action_text or "")
            numbers = self.features.parse(cells) if cells else None
        except BadValue as reason:
            self.add_broken(BrokenLine(line, str(reason)))
            return
        if user is None:  # last, so that a broken line does not add a user without interactions
            user = self.users[user_text] = len(self.users)
        self._user_column.append(user)
        self._item_column.append(item)
        self._action_column.append(action)
        self._time_column.append(time)
        if numbers is not None:
            self.features.add(numbers)

    def add_broken(self, line: BrokenLine) -> None:
        """Count a line that could not be split into a row."""
        self.broken_count += 1
        if len(self.broken) < BROKEN_SHOWN or line.line < self.broken[-1].line:
            insort(self.broken, line, key=lambda broken: broken.line)  # sorted, since rows of the sample are read late
            del self.broken[BROKEN_SHOWN:]

    def finish(
        self, path: Path
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32], npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Columns user (index into `users`), item, action and time in ms, in the order of the file."""
        if self._pending is not None:
            self._decide()
        doubled: npt.NDArray[np.uint16] = np.asarray(self._action_column, np.uint16)
        self.halves = bool(np.any(doubled & 1))
        if self.halves:
            if int(doubled.max()) > MAX_ACTION:
                raise InputError(
                    f"{path}: the actions mix half steps and values above {MAX_ACTION / 2:g}; map them to 0…255"
                )
        else:
            doubled = doubled // np.uint16(2)
        return (
            np.asarray(self._user_column, np.uint32),
            np.asarray(self._item_column, np.uint32),
            doubled.astype(np.uint8),
            np.asarray(self._time_column, np.int64),
        )

    def _decide(self) -> None:
        rows, self._pending = self._pending or [], None
        if self.item_ids == "auto":
            self.item_ids = "number" if _mostly(_is_item_number, [row[2] for row in rows]) else "name"
        if self.actions == "auto":
            given = [row[3] for row in rows if row[3] is not None]
            self.actions = "number" if _mostly(is_number, given) else "name"
        if self.time_unit == "auto":
            self.time_unit = guess_time_unit([row[4] for row in rows])
        for row in rows:
            self.add(row)

    def _new_item(self, text: str) -> int:
        if self.item_ids == "number":
            if not _is_item_number(text):
                raise BadValue(f"item {short(text)} is not an integer within 0…{MAX_ITEM}, as those of the first rows")
            code = int(text)
        else:
            if not text:
                raise BadValue("the item is empty")
            self.item_names.append(text)
            code = len(self.item_names)
        self._items[text] = code
        return code

    def _new_action(self, text: str) -> int:
        if self.actions == "number":
            code = _doubled_number(text)
        else:
            if not text:
                raise BadValue("the action is empty")
            if len(self.action_names) == MAX_ACTION:
                raise BadValue(f"action {short(text)} would be the {MAX_ACTION + 1}th distinct one; {MAX_ACTION} fit")
            self.action_names.append(text)
            code = 2 * len(self.action_names)
        self._doubled[text] = code
        return code


def guess_time_unit(sample: Sequence[str]) -> TimeUnit:
    """ISO 8601 text, or seconds or milliseconds by the magnitude of most numbers."""
    if not _mostly(is_number, sample):
        return "iso"
    numbers = sorted(float(text) for text in sample if is_number(text))
    return "ms" if numbers and numbers[len(numbers) // 2] >= FIRST_MILLISECONDS else "s"


def _check_user(text: str) -> None:
    if not text or len(text) > MAX_USER_CHARS:
        raise BadValue(f"the user id has {len(text)} characters; 1 to {MAX_USER_CHARS} are allowed")


def _doubled_number(text: str) -> int:
    if is_number(text):
        doubled = 2 * float(text)
        if doubled == int(doubled) and 0 <= doubled <= 2 * MAX_ACTION:
            return int(doubled)
    raise BadValue(f"action {short(text)} is not a number within 0…{MAX_ACTION} in steps of 1 or ½")


def _is_item_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= MAX_ITEM


def _mostly(test: Callable[[str], bool], sample: Sequence[str]) -> bool:
    return sum(map(test, sample)) >= NUMBER_SHARE * len(sample)
