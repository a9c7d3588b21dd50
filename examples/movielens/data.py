"""Reads interactions from a file: all that `relaygr replay` reads, by the same reader, and SASRec's `user item` lines.

Histories are arrays in the order of time. Item ids become 0 … items - 1; `Histories.names` has the file's own ids.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr_stream.errors import InputError, RelayError
from relaygr_stream.models.item_ids import ITEMS_FILE
from relaygr_stream.settings.worker import Model
from relaygr_stream.workload.logfile import BrokenLine, TextLog, head, refuse_binary
from relaygr_stream.workload.logs import InteractionLog, read_log
from relaygr_stream.workload.rows import rows_of

Ints = npt.NDArray[np.int64]

#: Test and validation take the last two behaviours; two more give training one transition.
MIN_HISTORY: Final = 4
#: A line `user item`, between blanks.
_PAIR: Final = re.compile(r" *[^\s,;|]+ +[^\s,;|]+\s*")


class DataError(Exception):
    """A file that cannot be read as interactions: which line, what was found, what is expected."""


def exit_code(work: Callable[[], int], stopped: str = "stopped; the same command goes on") -> int:
    """What `work` returns; after a line, 1 for what it cannot take, and 130 if Ctrl-C ended it. stopped: that line."""
    try:
        return work()
    except (DataError, RelayError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        return 130


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
        """Milliseconds since the behaviour before, (n,); 0 for the first. As `Tokens.from_behaviours` makes them."""
        return np.diff(self.times, prepend=self.times[:1])


@dataclass(frozen=True)
class Histories:
    """All users with at least MIN_HISTORY behaviours. names[i]: the id that the file has for item i.

    actions[i]: what the file calls action i, "" for none; empty: nothing is known of them.
    """

    users: list[History]
    names: list[str]
    has_times: bool
    actions: tuple[str, ...] = ()

    @property
    def interactions(self) -> int:
        """Behaviours of all users."""
        return sum(len(user) for user in self.users)


def read_histories(file: str | Path) -> Histories:
    """The histories in `file`, users in the order of their first line.

    Behaviours of equal time keep the file's order; lines of `user item` (SASRec) are in the order of time, without
    times. Raises DataError, also for a single line that cannot be read: a training file has none.
    """
    path = Path(file)
    try:
        start = head(path)
        if _PAIR.fullmatch(_first_line(start)):
            refuse_binary(path, start)
            return _pairs(path)
        log = read_log(path, item_ids="name")
    except InputError as error:
        raise DataError(str(error)) from error
    if log.broken:
        first = log.broken[0]
        raise DataError(f"{path}, line {first.line}: {first.reason} ({log.broken_count} such lines in all)")
    return _of_log(log)


def check_same_rows(checkpoint: Path, data: Histories) -> None:
    """Raise DataError if the checkpoint was trained on other items or actions, or with them in other rows."""
    rows = rows_of(Model(checkpoint=str(checkpoint.resolve())))
    assert rows is not None
    if rows.items not in (None, data.names) or rows.vocab != len(data.names):
        raise DataError(
            f"{checkpoint} was trained on another file: its {rows.vocab} items ({ITEMS_FILE}) are not the "
            f"{len(data.names)} of this one"
        )
    if rows.actions not in ((), data.actions):
        ours, theirs = (", ".join(map(repr, filter(None, names))) or "none" for names in (data.actions, rows.actions))
        raise DataError(f"{checkpoint} was trained with the actions {theirs}, this file has {ours}")


def _of_log(log: InteractionLog) -> Histories:
    kept = np.repeat(np.diff(log.offsets) >= MIN_HISTORY, np.diff(log.offsets))
    if not kept.any():
        raise _too_short(log.path, len(log.users))
    names, rows = _sorted_names(log.item_names, log.items[kept].astype(np.int64) - 1)
    row_of = np.zeros(len(log.item_names), np.int64)
    row_of[rows] = np.arange(len(rows))
    trained = set(log.actions[kept].tolist())
    actions = [text if number in trained else "" for number, text in enumerate(log.action_texts())]
    while len(actions) > 1 and not actions[-1]:
        del actions[-1]
    users = [
        History(
            user,
            row_of[log.items[start:stop].astype(np.int64) - 1],
            log.actions[start:stop].astype(np.int64),
            log.times[start:stop],
        )
        for user, start, stop in zip(log.users, log.offsets[:-1].tolist(), log.offsets[1:].tolist(), strict=True)
        if stop - start >= MIN_HISTORY
    ]
    return Histories(users, names, bool(log.times[kept].any()), tuple(actions))


def _pairs(path: Path) -> Histories:
    """The histories in lines of `user item`."""
    items: dict[str, int] = {}
    by_user: dict[str, list[int]] = {}
    with TextLog(path) as text:
        for line in text:
            if isinstance(line, BrokenLine):
                raise DataError(f"{path}, line {line.line}: {line.reason}")
            number, fields = line[0], line[1].split()
            if len(fields) == 2:
                by_user.setdefault(fields[0], []).append(items.setdefault(fields[1], len(items)))
            elif fields:
                raise DataError(f"{path}, line {number}: found {line[1][:80]!r}, expected user item")
    kept = {user: np.array(found) for user, found in by_user.items() if len(found) >= MIN_HISTORY}
    if not kept:
        raise _too_short(path, len(by_user))
    names, rows = _sorted_names(tuple(items), np.concatenate(list(kept.values())))
    row_of = np.zeros(len(items), np.int64)
    row_of[rows] = np.arange(len(rows))
    nothing = {user: np.zeros(len(found), np.int64) for user, found in kept.items()}
    users = [History(user, row_of[found], nothing[user], nothing[user]) for user, found in kept.items()]
    return Histories(users, names, has_times=False, actions=("",))


def _sorted_names(names: tuple[str, ...], items: Ints) -> tuple[list[str], list[int]]:
    """The names of the items that occur, numbers in the order of numbers; and their places in `names`."""
    places = sorted(np.unique(items).tolist(), key=lambda place: _as_number(names[place]))
    return [names[place] for place in places], places


def _as_number(name: str) -> tuple[int, str]:
    return (int(name), f"{len(name):3}") if name.isascii() and name.isdigit() and len(name) < 19 else (2**63, name)


def _first_line(start: bytes) -> str:
    return next((line for line in start.decode(errors="replace").splitlines() if line.strip()), "")


def _too_short(path: Path, users: int) -> DataError:
    return DataError(f"{path}: no user has {MIN_HISTORY} behaviours or more ({users} users)")
