"""Logs of interactions as arrays of users, items, actions and times; replay.py makes requests from them.

`read_log` reads original MovieLens files, CSV, JSON Lines and Parquet, gzipped or not. Broken lines are counted and
skipped; the first ones are kept for display.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from relaygr_stream.errors import InputError
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema, Values
from relaygr_stream.workload import logfile
from relaygr_stream.workload.columns import ColumnMap, ColumnReader, IdKind, Row
from relaygr_stream.workload.formats import FORMATS, Format, read_delimited, read_fields, read_json_lines, recognise
from relaygr_stream.workload.log_features import FeatureReader
from relaygr_stream.workload.logfile import BrokenLine, Progress, TextLog
from relaygr_stream.workload.parquet import read_parquet
from relaygr_stream.workload.values import UNIT_WORDS, TimeUnit, Unit


@dataclass(frozen=True)
class InteractionLog:
    """n interactions, sorted by user (in order of first appearance), then by time, with ties in the file's order.

    User u's interactions are offsets[u]:offsets[u + 1] of the columns.
    """

    path: Path
    format: Format
    users: tuple[str, ...]
    offsets: npt.NDArray[np.int64]  # (users + 1,)
    items: npt.NDArray[Any]  # (n,), uint32, or int64 where one is beyond
    actions: npt.NDArray[np.uint8]  # (n,)
    times: npt.NDArray[np.int64]  # (n,), Unix time in ms
    item_names: tuple[str, ...]  # names of ids 1, 2, …; empty if the log has numbers
    action_names: tuple[str, ...]  # likewise
    halves: bool  # some actions of the file have halves (4.5), so all are doubled
    lines: int  # lines (or rows) of the file: usable, broken, blank and header
    broken: tuple[BrokenLine, ...]  # the first few
    broken_count: int
    time_unit: Unit = "s"  # of the file
    repeats: int = 0  # rows that an earlier row equals in all columns
    note: str = ""  # what was left out of the file's interactions
    schema: FeatureSchema = NO_FEATURES
    features: Values = field(default_factory=dict)  # of the schema's columns: name → (n, width)

    def __len__(self) -> int:
        return len(self.items)

    def behaviours(self, start: int, stop: int) -> Behaviours:
        """The interactions in rows start:stop, which are one user's, with their features."""
        made = Behaviours.from_arrays(self.items[start:stop], self.actions[start:stop], self.times[start:stop])
        if not (columns := self.schema.table("behaviour")):
            return made
        values = {one.name: self.features[one.name][start:stop] for one in columns}
        packed = self.schema.pack(values, {"behaviour": stop - start})
        return msgspec.structs.replace(made, columns=packed["behaviour"])

    def histories(self) -> Iterator[tuple[str, Behaviours]]:
        """Each user and all of their behaviours."""
        for code, user in enumerate(self.users):
            yield user, self.behaviours(int(self.offsets[code]), int(self.offsets[code + 1]))

    def action_texts(self) -> list[str]:
        """What the file calls each action, by its number here; "" for 0, no action, and for one that it has not."""
        texts = [""] * (1 + int(self.actions.max(initial=0)))
        for number in np.unique(self.actions[self.actions > 0]).tolist():
            stars = f"{number / 2:g}" if self.halves else str(number)
            texts[number] = self.action_names[number - 1] if self.action_names else stars
        return texts

    def facts(self) -> str:
        """What was found of its times, and its repeated events, in words."""
        span = " to ".join(f"{np.datetime64(int(at), 'ms'):.10}" for at in (self.times.min(), self.times.max()))
        repeats = f"; {self.repeats} events are repeated, and kept" if self.repeats else ""
        note = f"; {self.note}" if self.note else ""
        return f"times in {UNIT_WORDS[self.time_unit]}, {span}{repeats}{note}"

    def broken_text(self) -> str:
        """The first broken lines and the count of the others, one a line; empty if there are none."""
        shown = [f"{self.path}:{line.line}: {line.reason}; skipped" for line in self.broken]
        if self.broken_count > len(shown):
            shown.append(f"{self.path}: {self.broken_count - len(shown)} more broken lines skipped")
        return "\n".join(shown)


def read_log(
    path: str | Path,
    *,
    format: Format | None = None,  # noqa: A002 - the field's word
    columns: ColumnMap | None = None,
    time_unit: TimeUnit = "auto",
    item_ids: IdKind = "auto",
    progress: Progress | None = None,
    features: FeatureSchema = NO_FEATURES,
    plausible: bool = True,
) -> InteractionLog:
    """Read a log of interactions.

    format: None: recognised, by content first, then by name. columns: the columns' roles in CSV, JSON Lines and
    Parquet; with it, a file that looks like `u.data` is read as tab-separated text. item_ids: "number" keeps item ids,
    "name" numbers them from 1 in order of first appearance. progress: called from time to time with bytes read and
    bytes in all. features: columns to read besides (log_features.py). plausible: whether times must be dates, and not
    count from a start of their own. Raises InputError if the file has no usable line, or more than MAX_BROKEN_SHARE
    broken ones.
    """
    path = Path(path)
    start = logfile.head(path)
    if format is None:
        format = _recognised(path, start)  # noqa: A001
        if columns is not None and format == "u.data":
            format = "csv"  # noqa: A001
    if columns is not None and format in ("u.data", "ratings.dat"):
        raise InputError(f"{path}: {format} has fixed columns; leave --columns out, or read it with --format csv")
    if (format == "parquet") != logfile.is_parquet(start):
        is_or_not = "is a Parquet file" if logfile.is_parquet(start) else "is no Parquet file"
        raise InputError(f"{path} {is_or_not}, but --format is {format}; leave --format out to detect it")
    fixed = format in ("u.data", "ratings.dat")
    extra = FeatureReader(features)
    if fixed:
        extra.wanted([], path)
    reader = ColumnReader(path, item_ids, "number" if fixed else "auto", time_unit, extra, plausible=plausible)
    if format == "parquet":
        lines = _consume(reader, read_parquet(path, columns, progress, extra))
    else:
        logfile.refuse_binary(path, start)
        with TextLog(path, progress) as text:
            _consume(reader, _text_rows(text, format, columns, start, extra))
            lines = text.lines
    return _sorted(path, format, reader, lines, start)


def _recognised(path: Path, start: bytes) -> Format:
    if logfile.is_parquet(start):
        return "parquet"
    logfile.refuse_binary(path, start)
    found = recognise(path, start)
    if found is None:
        raise InputError(
            f"{path}: not recognised as any of {', '.join(FORMATS)}, neither by content nor by name; "
            f"its first line is {_first_line(start)}. Name the format with --format"
        )
    return found


def _text_rows(
    text: TextLog, name: Format, columns: ColumnMap | None, start: bytes, features: FeatureReader
) -> Iterator[Row | BrokenLine]:
    if name == "u.data":
        return read_fields(text, "\t")
    if name == "ratings.dat":
        return read_fields(text, "::")
    if name == "jsonl":
        return read_json_lines(text, columns, features)
    return read_delimited(text, columns, start, features)


def _consume(reader: ColumnReader, rows: Iterator[Row | BrokenLine]) -> int:
    """Add all rows to the reader; returns their number, broken ones included."""
    count = 0
    for row in rows:
        count += 1
        if isinstance(row, BrokenLine):
            reader.add_broken(row)
        else:
            reader.add(row)
    return count


_EXPECTED = {
    "u.data": "user, item, rating and Unix time in seconds between tabs",
    "ratings.dat": "user::item::rating::Unix time in seconds",
    "csv": "columns user, item, action, time between commas, tabs, semicolons or bars",
    "jsonl": "one JSON object a line, with user, item and time",
    "parquet": "columns user, item, action, time",
}


def _sorted(path: Path, name: Format, reader: ColumnReader, lines: int, start: bytes) -> InteractionLog:
    columns = reader.finish()
    users, items, times = columns.user, columns.items, columns.times
    if not len(items):
        why = f" ({reader.broken[0].reason})" if reader.broken else ""
        first = "" if name == "parquet" else f", first line {_first_line(start)}"
        raise InputError(f"{path}: no usable line{first}{why}; read as {name}, expected {_EXPECTED[name]}")
    order = np.lexsort((times, users))  # stable: ties stay as in the file
    offsets = np.zeros(len(columns.users) + 1, np.int64)
    np.cumsum(np.bincount(users, minlength=len(columns.users)), out=offsets[1:])
    return InteractionLog(
        path=path,
        format=name,
        users=columns.users,
        offsets=offsets,
        items=items[order],
        actions=columns.actions[order],
        times=times[order],
        item_names=columns.item_names,
        action_names=columns.action_names,
        halves=columns.halves,
        time_unit=columns.time_unit,
        repeats=_repeats(users[order], times[order], items[order], columns.actions[order]),
        lines=lines,
        broken=tuple(reader.broken),
        broken_count=reader.broken_count,
        schema=reader.features.schema,
        features={name: values[order] for name, values in columns.features.items()},
    )


def _repeats(*columns: npt.NDArray[Any]) -> int:
    """Rows of which there is an equal one before. columns: sorted by the first two, user and time."""
    same = (np.diff(columns[0]) == 0) & (np.diff(columns[1]) == 0)
    tied = np.concatenate([[False], same]) | np.concatenate([same, [False]])
    rows = np.stack([column[tied].astype(np.int64) for column in columns])
    return int(rows.shape[1] - np.unique(rows, axis=1).shape[1])


def _first_line(start: bytes) -> str:
    lines = start.decode(errors="replace").splitlines() or [""]
    return repr(next((line for line in lines if line.strip()), "")[:80])
