"""The text formats of interaction logs: recognises them, and splits their lines into rows (columns.py converts those).

MovieLens `u.data` and `ratings.dat`, delimited text (CSV and similar) and JSON Lines. Each line is read alone, so a
broken one does not affect its neighbours.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from relaygr_stream.errors import InputError
from relaygr_stream.wire.versions import NOT_DECODED
from relaygr_stream.workload.columns import ColumnMap, Row
from relaygr_stream.workload.log_features import FeatureReader
from relaygr_stream.workload.logfile import MAX_LINE_BYTES, BrokenLine, TextLog
from relaygr_stream.workload.values import BadValue, is_time

Format = Literal["u.data", "ratings.dat", "csv", "jsonl", "parquet"]
FORMATS: Final[tuple[Format, ...]] = ("u.data", "ratings.dat", "csv", "jsonl", "parquet")

#: Usual names of columns in public logs, in lower case, the likelier first.
ALIASES: Final = {
    "user": ("user", "user_id", "userid", "uid", "visitorid", "visitor_id"),
    "item": ("item", "item_id", "itemid", "iid", "movieid", "movie_id", "product_id", "productid", "sku", "video_id"),
    "action": ("action", "rating", "event_type", "event", "type", "behavior", "behaviour", "behavior_type"),
    "time": ("time", "timestamp", "ts", "time_ms", "event_time", "datetime", "date"),
}
#: Columns of a file without a header, in order (as in all MovieLens files).
POSITIONS: Final = {3: ("user", "item", "time"), 4: ("user", "item", "action", "time")}

_UDATA_LINE: Final = re.compile(r"\d+\t\d+\t[\d.]+\t\d+\s*$")
_DAT_LINE: Final = re.compile(r"[^:]+::[^:]+::[\d.]+::\d+\s*$")
_DELIMITERS: Final = ",\t;|"
_NAMES: Final[tuple[tuple[str, Format], ...]] = (
    (r"u\d?[ab]?\.(data|base|test)$", "u.data"),
    (r"ratings\.dat$", "ratings.dat"),
    (r"\.(csv|tsv)$", "csv"),
    (r"\.(jsonl|ndjson|json)$", "jsonl"),
)
SNIFF_LINES: Final = 50
#: Floats from here on stand for several integers each.
MAX_EXACT: Final = 2**53
csv.field_size_limit(MAX_LINE_BYTES)  # of the whole process: a line's own bound holds for its fields


def recognise(path: Path, start: bytes) -> Format | None:
    """The format of a text file: by most of its first lines, otherwise by its name. start: its first bytes."""
    lines = [line for line in start.decode(errors="replace").splitlines()[:SNIFF_LINES] if line.strip()]
    votes: dict[Format, int] = {
        "u.data": sum(bool(_UDATA_LINE.match(line)) for line in lines),
        "ratings.dat": sum(bool(_DAT_LINE.match(line)) for line in lines),
        "jsonl": sum(line.lstrip().startswith("{") for line in lines),
    }
    best = max(votes, key=lambda name: votes[name])
    if 2 * votes[best] > len(lines):
        return best
    name = path.name.lower().removesuffix(".gz").removesuffix(".xz")
    for pattern, named in _NAMES:
        if re.search(pattern, name):
            return named
    delimited = sum(any(line.count(sign) >= 2 for sign in _DELIMITERS) for line in lines)
    return "csv" if 2 * delimited > len(lines) else None


def read_fields(log: TextLog, separator: str) -> Iterator[Row | BrokenLine]:
    """Rows of a MovieLens file: exactly user, item, rating and time, between the given separators."""
    shown = {"\t": "tabs", "::": "`::`"}[separator]

    def read(line: int, text: str) -> Row | BrokenLine:
        parts = text.split(separator)
        if len(parts) != 4:
            return BrokenLine(line, f"{len(parts)} fields between {shown}; expected user, item, rating, time")
        return line, parts[0].strip(), parts[1].strip(), parts[2].strip(), parts[3].strip(), ()

    return _rows(log, read)


#: The columns of a line, and its features: user, item, action, time.
Taker = Callable[[Sequence[str]], tuple[str, str, str | None, str, Sequence[str]]]


def read_delimited(
    log: TextLog, columns: ColumnMap | None, start: bytes, features: FeatureReader
) -> Iterator[Row | BrokenLine]:
    """Rows of delimited text. start: the file's first bytes, which determine the delimiter and the number of columns.

    The first line with that number of columns is the header if it looks like one. A quoted field may contain the
    delimiter but no line break. Raises InputError if the columns cannot be found.
    """
    delimiter, width = _shape(start)
    take: Taker | None = None

    def read(line: int, text: str) -> Row | BrokenLine | None:
        nonlocal take
        try:
            parts = _split(text, delimiter)
        except csv.Error as error:
            return BrokenLine(line, f"bad quotes: {error}")
        if len(parts) != width:
            return BrokenLine(line, f"{len(parts)} columns; most of the first lines have {width}")
        if take is None:
            names = [part.strip() for part in parts]
            header = _from_header(names, columns, log.path)
            positions = _from_position(names, columns, log.path) if header is None else header
            wanted = features.wanted(names if header is not None else [], log.path)
            take = _taker(positions, [names.index(name) for name in wanted])
            if header is not None:
                return None
        return line, *take(parts)

    return _rows(log, read)


def read_json_lines(log: TextLog, columns: ColumnMap | None, features: FeatureReader) -> Iterator[Row | BrokenLine]:
    """Rows of JSON Lines, one object a line. Without `columns`, the first object with all usual names defines them."""
    decode = msgspec.json.Decoder().decode
    names = None if columns is None else _asked(columns)

    def read(line: int, text: str) -> Row | BrokenLine:
        nonlocal names
        try:
            record = decode(text)
        except NOT_DECODED as error:
            return BrokenLine(line, f"not JSON: {error}")
        if not isinstance(record, dict):
            return BrokenLine(line, f"a JSON {type(record).__name__}; expected one object a line")
        names = names or usual_names(list(record))
        if names is None:
            return BrokenLine(
                line, f"no user, item and time among the names {_listed(record)}; say which with --columns"
            )
        return row_of(line, record, names, features)

    return _rows(log, read)


def _rows(log: TextLog, read: Callable[[int, str], Row | BrokenLine | None]) -> Iterator[Row | BrokenLine]:
    """The rows that `read` returns for the lines that are not blank; it returns None for a header."""
    for numbered in log:
        if isinstance(numbered, BrokenLine):
            yield numbered
        elif numbered[1].strip() and (row := read(*numbered)) is not None:
            yield row


def row_of(line: int, record: dict[str, Any], names: dict[str, str], features: FeatureReader) -> Row | BrokenLine:
    """The row of a record of typed values (JSON, Parquet)."""
    texts: dict[str, str] = {}
    for role, name in names.items():
        if record.get(name) is None:
            return BrokenLine(line, f"no {role}: `{name}` is missing or null")
        text = _text(record[name])
        if text is None:
            return BrokenLine(line, f"{role} `{name}` is a {type(record[name]).__name__}; expected text or a number")
        texts[role] = text
    try:
        cells = features.cells(record)
    except BadValue as reason:
        return BrokenLine(line, str(reason))
    return line, texts["user"], texts["item"], texts.get("action"), texts["time"], cells


def usual_names(present: Sequence[str]) -> dict[str, str] | None:
    """The columns user, item, time and, if present, action, by the usual names; None if one is missing."""
    by_lower = {name.strip().lower(): name for name in reversed(present)}
    found = {
        role: by_lower[next(alias for alias in aliases if alias in by_lower)]
        for role, aliases in ALIASES.items()
        if any(alias in by_lower for alias in aliases)
    }
    return found if {"user", "item", "time"} <= found.keys() else None


def named_columns(present: Sequence[str], columns: ColumnMap | None, path: Path) -> dict[str, str]:
    """The column of each role among the present names. Raises InputError if one is missing."""
    if columns is None:
        found = usual_names(present)
        if found is None:
            raise InputError(
                f"{path}: no user, item and time among the columns {_listed(present)}; "
                "say which is which with --columns user=…,item=…,action=…,time=…"
            )
        return found
    for role, name in _asked(columns).items():
        if name not in present:
            raise InputError(f"{path}: no column `{name}` for {role}; there are {_listed(present)}")
    return _asked(columns)


def _split(text: str, delimiter: str) -> list[str]:
    """A line's fields. Raises csv.Error if quotes do not match."""
    return next(csv.reader([text], delimiter=delimiter, strict=True)) if '"' in text else text.split(delimiter)


def _shape(start: bytes) -> tuple[str, int]:
    """The delimiter and the number of columns of most of the first lines."""
    lines = [line for line in start.decode(errors="replace").splitlines()[:SNIFF_LINES] if line.strip()]
    best = (0, 0, ",")
    for delimiter in _DELIMITERS:
        widths: Counter[int] = Counter()
        for line in lines:
            with suppress(csv.Error):
                widths[len(_split(line, delimiter))] += 1
        width, agreeing = max(widths.items(), key=lambda item: (item[0] > 1, item[1], item[0]), default=(0, 0))
        best = max(best, (agreeing if width > 1 else 0, width, delimiter))
    return best[2], best[1]


def _from_header(names: list[str], columns: ColumnMap | None, path: Path) -> dict[str, int] | None:
    """Positions by the header's names; None if the line is data."""
    if columns is not None and all(map(_is_number_of_column, _asked(columns).values())):
        return _from_position(names, columns, path) if _looks_like_header(names) else None
    if columns is not None and any(name in names for name in _asked(columns).values()):
        return {role: names.index(name) for role, name in named_columns(names, columns, path).items()}
    if columns is None and _looks_like_header(names):
        return {role: names.index(name) for role, name in named_columns(names, columns, path).items()}
    return None


def _looks_like_header(names: list[str]) -> bool:
    return len(names) >= 3 and all(names) and not any(map(is_time, names))


def _is_number_of_column(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _from_position(names: list[str], columns: ColumnMap | None, path: Path) -> dict[str, int]:
    """Positions in a file without a header."""
    if columns is None:
        if len(names) not in POSITIONS:
            raise InputError(
                f"{path}: no header, and {len(names)} columns in the first line {_quoted(names)}; expected user, item, "
                "action, time (or user, item, time), or --columns with column numbers such as user=1,item=2,time=4"
            )
        return {role: position for position, role in enumerate(POSITIONS[len(names)])}
    positions: dict[str, int] = {}
    for role, name in _asked(columns).items():
        if not (_is_number_of_column(name) and 1 <= int(name[:9]) <= len(names)):
            raise InputError(
                f"{path}: no column `{name}` for {role}: it is neither a name in the first line {_quoted(names)} "
                f"nor a column number within 1…{len(names)}"
            )
        positions[role] = int(name) - 1
    return positions


def _taker(positions: dict[str, int], cells: Sequence[int]) -> Taker:
    user, item, time = positions["user"], positions["item"], positions["time"]
    action = positions.get("action")

    def take(parts: Sequence[str]) -> tuple[str, str, str | None, str, Sequence[str]]:
        chosen = None if action is None else parts[action].strip()
        features = [parts[cell].strip() for cell in cells] if cells else ()
        return parts[user].strip(), parts[item].strip(), chosen, parts[time].strip(), features

    return take


def _asked(columns: ColumnMap) -> dict[str, str]:
    roles = {"user": columns.user, "item": columns.item, "action": columns.action, "time": columns.time}
    return {role: name for role, name in roles.items() if name is not None}


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        exact = value.is_integer() and abs(value) < MAX_EXACT  # beyond, the file's number may have been another
        return str(int(value)) if exact else repr(value)
    if isinstance(value, int):
        return str(value)
    return None


def _listed(names: Sequence[str] | dict[str, Any]) -> str:
    shown = [f"`{name[:40]}`" for name in list(names)[:12]]
    return ", ".join(shown) + (", …" if len(names) > len(shown) else "")


def _quoted(names: list[str]) -> str:
    return json.dumps(",".join(names)[:80], ensure_ascii=False)
