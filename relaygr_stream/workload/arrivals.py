"""Logs of arrivals: when requests came and, where the log says it, by whom.

Interaction logs (MovieLens, CSV, JSON Lines, Parquet: workload/logs.py), Mooncake's traces of prompts, and delimited
text with a column of times, such as the Azure LLM inference traces. A time is all that a log must have. In traces, a
broken line is an error: they are made by programs, and an arrival left out would make the load another one. Of
interaction logs, broken lines are skipped and counted, as everywhere.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt

from relaygr_stream.errors import InputError
from relaygr_stream.workload import logfile
from relaygr_stream.workload.formats import ALIASES, usual_names
from relaygr_stream.workload.logfile import BrokenLine, TextLog
from relaygr_stream.workload.logs import read_log
from relaygr_stream.workload.values import LATEST_MS, BadValue, is_number, parse_time, short, unit_by_size

EXPECTED: Final = (
    "expected an interaction log (user, item, time), a trace of prompts (JSON Lines with `timestamp` in ms and "
    "`hash_ids`), or delimited text with a header that names a column of times"
)
#: A unit's length as a part of a second.
PER_SECOND: Final = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
#: Fewer arrivals have no rate.
LEAST_ARRIVALS: Final = 2


@dataclass(frozen=True, eq=False)
class ArrivalLog:
    """n arrivals in the order of time, which span more than 0 seconds."""

    name: str  # of the file
    times: npt.NDArray[np.float64]  # (n,), seconds
    users: npt.NDArray[np.int64] | None  # (n,), each below user_count; None: the log has no users
    skipped: int = 0  # broken lines

    @property
    def user_count(self) -> int:
        """The number of users; 0 if the log has none."""
        return 0 if self.users is None else int(self.users.max()) + 1

    @property
    def returns(self) -> float:
        """The share of requests by users who were there before; 0 if the log has no users."""
        return 0.0 if self.users is None else 1 - self.user_count / len(self.users)

    @property
    def gaps(self) -> npt.NDArray[np.float64]:
        """(n,): times between arrivals over their mean; the first follows the last one of the round before by 1."""
        gaps = np.diff(self.times)
        return np.concatenate([[1.0], gaps / gaps.mean()])

    @property
    def returning(self) -> npt.NDArray[np.bool_]:
        """(n,): whether the user was there before. Raises ValueError without users."""
        if self.users is None:
            raise ValueError(f"{self.name} has no users")
        found = np.ones(len(self.users), np.bool_)
        found[np.unique(self.users, return_index=True)[1]] = False
        return found

    def first(self, count: int) -> Self:
        """Its first `count` arrivals as a log of their own, or all."""
        users = None if self.users is None else np.unique(self.users[:count], return_inverse=True)[1]
        return replace(self, times=self.times[:count], users=users)

    def describe(self) -> str:
        """The log in words."""
        minutes = (self.times[-1] - self.times[0]) / 60
        users = "no users" if self.users is None else f"{self.user_count:,} users, {self.returns:.0%} returns"
        skipped = f", {self.skipped} broken lines skipped" if self.skipped else ""
        return f"{self.name}: {len(self.times):,} arrivals in {minutes:,.0f} min, {users}{skipped}"


def read_arrivals(path: str | Path) -> ArrivalLog:
    """Read a log of arrivals. Raises InputError: one line that names file, line and what is expected."""
    path = Path(path)
    start = logfile.head(path)
    if logfile.is_parquet(start):
        return _of_interactions(path)
    logfile.refuse_binary(path, start)
    first = next((line for line in start.decode(errors="replace").splitlines() if line.strip()), "")
    if first.lstrip().startswith("{"):
        return _of_prompts(path) if _has_prompts(first) else _of_interactions(path)
    delimiter = max(",;\t|", key=first.count)
    names = [name.strip() for name in next(csv.reader([first], delimiter=delimiter))]
    time = _named(names, "time")
    if time is not None and usual_names(names) is None:
        return _of_times(path, delimiter, names, time)
    return _of_interactions(path)


def _has_prompts(line: str) -> bool:
    try:
        record = msgspec.json.decode(line)
    except msgspec.MsgspecError:
        return True  # cut off, or broken: the reader of prompts says what
    return isinstance(record, dict) and usual_names(list(record)) is None


def _of_interactions(path: Path) -> ArrivalLog:
    try:
        log = read_log(path, plausible=False)
    except InputError as error:
        told = str(error).removesuffix(". Name the format with --format")  # which arrivals do not need
        raise InputError(f"{told}; {EXPECTED}") from error
    codes = np.repeat(np.arange(len(log.users), dtype=np.int64), np.diff(log.offsets))
    return _sorted(path, log.times / 1e3, codes, log.broken_count)


def _of_prompts(path: Path) -> ArrivalLog:
    """A trace of prompts: `hash_ids` name their blocks, and equal leading ids mean a shared prefix.

    The leading blocks that all prompts share tell nothing of users; those and the next one name the user.
    """
    times: list[float] = []
    blocks: list[tuple[Any, ...]] = []
    decode = msgspec.json.Decoder().decode
    for line, text in _lines(path):
        try:
            record = decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _bad(path, line, f"not JSON: {error}") from error
        stamp = record.get("timestamp") if isinstance(record, dict) else None
        ids = record.get("hash_ids") if isinstance(record, dict) else None
        if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not 0 <= stamp < LATEST_MS:
            raise _bad(path, line, f"`timestamp` is {short(str(stamp))}, not a number of milliseconds")
        if not isinstance(ids, list) or not ids or not all(isinstance(block, int | str) for block in ids):
            raise _bad(path, line, f"`hash_ids` is {short(str(ids))}, not a list of block ids")
        times.append(stamp / 1e3)
        blocks.append(tuple(ids))
    shared = 0
    while blocks and all(len(ids) > shared and ids[shared] == blocks[0][shared] for ids in blocks):
        shared += 1
    codes: dict[tuple[Any, ...], int] = {}
    users = [codes.setdefault(ids[: shared + 1], len(codes)) for ids in blocks]
    return _sorted(path, np.array(times, np.float64), np.array(users, np.int64))


def _of_times(path: Path, delimiter: str, names: list[str], time: int) -> ArrivalLog:
    """Delimited text whose header names a column of times and, perhaps, one of users."""
    user = _named(names, "user")
    times: list[float] = []
    codes: dict[str, int] = {}
    users: list[int] = []
    lines = _lines(path)
    next(lines)  # the header
    for line, text in lines:
        try:
            parts = next(csv.reader([text], delimiter=delimiter, strict=True))
        except csv.Error as error:
            raise _bad(path, line, f"bad quotes: {error}") from error
        if len(parts) != len(names):
            raise _bad(path, line, f"{len(parts)} columns, and the header has {len(names)}")
        stamp = parts[time].strip()
        try:
            if not is_number(stamp):
                times.append(parse_time(stamp, "iso") / 1e3)
            elif float(stamp) < 0:
                raise BadValue(f"time {short(stamp)} is negative")
            else:
                times.append(float(stamp) / PER_SECOND[unit_by_size(float(stamp))])
        except BadValue as reason:
            raise _bad(path, line, f"column `{names[time]}`: {reason}") from reason
        if user is not None:
            users.append(codes.setdefault(parts[user].strip(), len(codes)))
    return _sorted(path, np.array(times, np.float64), None if user is None else np.array(users, np.int64))


def _named(names: list[str], role: str) -> int | None:
    lower = [name.lower() for name in names]
    return next((lower.index(alias) for alias in ALIASES[role] if alias in lower), None)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with TextLog(path) as log:
        for numbered in log:
            if isinstance(numbered, BrokenLine):
                raise _bad(path, numbered.line, numbered.reason)
            if numbered[1].strip():
                yield numbered


def _bad(path: Path, line: int, reason: str) -> InputError:
    return InputError(f"{path}:{line}: {reason}; {EXPECTED}")


def _sorted(
    path: Path, times: npt.NDArray[np.float64], users: npt.NDArray[np.int64] | None, skipped: int = 0
) -> ArrivalLog:
    if len(times) < LEAST_ARRIVALS or not times.max() > times.min():
        raise InputError(f"{path}: {len(times)} arrivals within 0 s have no rate; {EXPECTED}")
    order = np.argsort(times, kind="stable")
    return ArrivalLog(path.name, spread(times[order]), None if users is None else users[order], skipped)


def spread(times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sorted times with equal ones spread evenly, in their order, over the log's tick: its least distance of two times.

    A log's clock may be coarse. Mooncake's conversation trace counts in steps of 3 s, ten requests each on average:
    taken by the letter, every request would come in a burst.
    """
    distinct, index, counts = np.unique(times, return_inverse=True, return_counts=True)
    place = np.arange(len(times)) - (np.cumsum(counts) - counts)[index]
    return np.asarray(times + np.diff(distinct).min() * place / counts[index])
