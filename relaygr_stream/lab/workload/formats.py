"""The text formats of interaction logs: how each is recognised, and how its lines become rows.

MovieLens `u.data` and `ratings.dat`, delimited text (CSV and its kin) and JSON Lines. Each line stands alone: a broken
one cannot damage its neighbours. Knows nothing of what the columns' text means; columns.py does.
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
from relaygr_stream.lab.workload.columns import ColumnMap, Row, is_time
from relaygr_stream.lab.workload.logfile import BrokenLine, TextLog

Format = Literal["u.data", "ratings.dat", "csv", "jsonl", "parquet"]
FORMATS: Final[tuple[Format, ...]] = ("u.data", "ratings.dat", "csv", "jsonl", "parquet")

#: The usual names of columns in public logs, lower case, the likelier first.
ALIASES: Final = {
    "user": ("user", "user_id", "userid", "uid", "visitorid", "visitor_id"),
    "item": ("item", "item_id", "itemid", "iid", "movieid", "movie_id", "product_id", "productid", "sku", "video_id"),
    "action": ("action", "rating", "event_type", "event", "type", "behavior", "behaviour", "behavior_type"),
    "time": ("time", "timestamp", "ts", "time_ms", "event_time", "datetime", "date"),
}
#: A file without a header has these columns, in this order (as all MovieLens files).
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


def recognise(path: Path, start: bytes) -> Format | None:
    """The format of a text file that starts so: what most of its first lines look like, else what its name says."""
    lines = [line for line in start.decode(errors="replace").splitlines()[:SNIFF_LINES] if line.strip()]
    votes: dict[Format, int] = {
        "u.data": sum(bool(_UDATA_LINE.match(line)) for line in lines),
        "ratings.dat": sum(bool(_DAT_LINE.match(line)) for line in lines),
        "jsonl": sum(line.lstrip().startswith("{") for line in lines),
    }
    best = max(votes, key=lambda name: votes[name])
    if 2 * votes[best] > len(lines):
        return best
    name = path.name.lower().removesuffix(".gz")
    for pattern, named in _NAMES:
        if re.search(pattern, name):
            return named
    delimited = sum(any(line.count(sign) >= 2 for sign in _DELIMITERS) for line in lines)
    return "csv" if 2 * delimited > len(lines) else None


def read_fields(log: TextLog, separator: str) -> Iterator[Row | BrokenLine]:
    """Rows of a MovieLens file: exactly user, item, rating and time, between the given separators."""
    shown = {"\t": "tabs", "::": "`::`"}[separator]
    for numbered in log:
        if isinstance(numbered, BrokenLine):
            yield numbered
            continue
        line, text = numbered
        parts = text.split(separator)
        if len(parts) == 4:
            yield line, parts[0].strip(), parts[1].strip(), parts[2].strip(), parts[3].strip()
        elif text.strip():
            yield BrokenLine(line, f"{len(parts)} fields between {shown}; expected user, item, rating, time")


def read_delimited(log: TextLog, columns: ColumnMap | None, start: bytes) -> Iterator[Row | BrokenLine]:
    """Rows of CSV and its kin. start: how the file begins, to tell delimiter and number of columns by most lines.

    The first line of that many columns is the header if it looks like one. A quoted field may hold the delimiter but
    not a line break. Raises InputError where the columns cannot be found.
    """
    delimiter, width = _shape(start)
    take: Callable[[Sequence[str]], tuple[str, str, str | None, str]] | None = None
    for numbered in log:
        if isinstance(numbered, BrokenLine):
            yield numbered
            continue
        line, text = numbered
        if not text.strip():
            continue
        try:
            parts = _split(text, delimiter)
        except csv.Error as error:
            yield BrokenLine(line, f"bad quotes: {error}")
            continue
        if len(parts) != width:
            yield BrokenLine(line, f"{len(parts)} columns; most of the first lines have {width}")
            continue
        if take is None:
            names = [part.strip() for part in parts]
            header = _from_header(names, columns, log.path)
            take = _taker(_from_position(names, columns, log.path) if header is None else header)
            if header is not None:
                continue
        yield line, *take(parts)


def read_json_lines(log: TextLog, columns: ColumnMap | None) -> Iterator[Row | BrokenLine]:
    """Rows of JSON Lines: one object a line; without a mapping, the first object with all usual names decides."""
    decode = msgspec.json.Decoder().decode
    names = None if columns is None else _asked(columns)
    for numbered in log:
        if isinstance(numbered, BrokenLine):
            yield numbered
            continue
        line, text = numbered
        if not text.strip():
            continue
        try:
            record = decode(text)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            yield BrokenLine(line, f"not JSON: {error}")
            continue
        if not isinstance(record, dict):
            yield BrokenLine(line, f"a JSON {type(record).__name__}; expected one object a line")
            continue
        found = names or usual_names(list(record))
        if found is None:
            yield BrokenLine(
                line, f"no user, item and time among the names {_listed(record)}; say which with --columns"
            )
            continue
        names = found
        yield row_of(line, record, names)


def row_of(line: int, record: dict[str, Any], names: dict[str, str]) -> Row | BrokenLine:
    """One row from a record of typed values (JSON, Parquet)."""
    texts: dict[str, str] = {}
    for role, name in names.items():
        if record.get(name) is None:
            return BrokenLine(line, f"no {role}: `{name}` is missing or null")
        text = _text(record[name])
        if text is None:
            return BrokenLine(line, f"{role} `{name}` is a {type(record[name]).__name__}; expected text or a number")
        texts[role] = text
    return line, texts["user"], texts["item"], texts.get("action"), texts["time"]


def usual_names(present: Sequence[str]) -> dict[str, str] | None:
    """Which of the present names are user, item, time and (if there is one) action, by the usual names."""
    by_lower = {name.strip().lower(): name for name in reversed(present)}
    found = {
        role: by_lower[next(alias for alias in aliases if alias in by_lower)]
        for role, aliases in ALIASES.items()
        if any(alias in by_lower for alias in aliases)
    }
    return found if {"user", "item", "time"} <= found.keys() else None


def named_columns(present: Sequence[str], columns: ColumnMap | None, path: Path) -> dict[str, str]:
    """The column of each role among the present names; raises InputError where one is missing."""
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
    """A line's fields; raises csv.Error where quotes do not match."""
    return next(csv.reader([text], delimiter=delimiter, strict=True)) if '"' in text else text.split(delimiter)


def _shape(start: bytes) -> tuple[str, int]:
    """The delimiter and the number of columns that most of the first lines agree on."""
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
    """Positions by the header's names; None if the line is no header but data."""
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


def _taker(positions: dict[str, int]) -> Callable[[Sequence[str]], tuple[str, str, str | None, str]]:
    user, item, time = positions["user"], positions["item"], positions["time"]
    action = positions.get("action")

    def take(parts: Sequence[str]) -> tuple[str, str, str | None, str]:
        chosen = None if action is None else parts[action].strip()
        return parts[user].strip(), parts[item].strip(), chosen, parts[time].strip()

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
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, int):
        return str(value)
    return None


def _listed(names: Sequence[str] | dict[str, Any]) -> str:
    shown = [f"`{name[:40]}`" for name in list(names)[:12]]
    return ", ".join(shown) + (", …" if len(names) > len(shown) else "")


def _quoted(names: list[str]) -> str:
    return json.dumps(",".join(names)[:80], ensure_ascii=False)
