"""Single values of a log: numbers and times out of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, Literal, get_args

Unit = Literal["s", "ms", "us", "ns", "days", "iso"]
TimeUnit = Literal["auto", "s", "ms", "us", "ns", "days", "iso"]
UNITS: Final[tuple[Unit, ...]] = get_args(Unit)
#: The units as messages name them.
UNIT_WORDS: Final[dict[Unit, str]] = {
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
    "days": "days since 1970",
    "iso": "ISO 8601",
}

DAY_MS: Final = 86_400_000
#: A unit's length in ms: a factor, or a divisor.
_FACTOR: Final[dict[str, int]] = {"s": 1000, "ms": 1, "days": DAY_MS}
_DIVISOR: Final[dict[str, int]] = {"us": 1000, "ns": 1_000_000}


def _year(year: int) -> int:
    return int(datetime(year, 1, 1, tzinfo=UTC).timestamp() * 1000)


#: No log is from later; a time that is belongs to another unit.
LATEST_MS: Final = _year(2100)
#: The median of a log's times lies in these years, in the unit that is found. Units are a factor of 1,000 apart, these
#: years one of 3. Numbers of other clocks lie outside: Excel's days (32,874 is 1990) as days, .NET's ticks as ns.
FOUND_MS: Final = (_year(1995), _year(2050))
#: A single time of a log whose unit was found may lie here: a second among milliseconds is of 1970.
PLAUSIBLE_MS: Final = (_year(1980), LATEST_MS)
#: Smaller numbers than any plausible one, in any unit, count from a start of the log's own, in seconds.
FIRST_DAYS: Final = FOUND_MS[0] // DAY_MS


class BadValue(ValueError):
    """A value that makes its line a broken one; the message is the reason that is shown."""


def is_number(text: str) -> bool:
    """Whether the text is a finite decimal number."""
    if not text.isascii() or len(text) > 40 or "_" in text:  # float() accepts Arabic digits and 1_000
        return False
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def parse_time(text: str, unit: Unit, within: tuple[int, int] = (0, LATEST_MS)) -> int:
    """Unix time in ms, within [within[0], within[1]); a time without a zone is UTC. Raises BadValue."""
    if unit == "iso":
        milliseconds = _parse_iso(text)
    elif text.isdigit() and text.isascii() and len(text) <= 20:
        milliseconds = int(text) * _FACTOR.get(unit, 1) // _DIVISOR.get(unit, 1)
    elif is_number(text):
        milliseconds = math.floor(float(text) * _FACTOR.get(unit, 1) / _DIVISOR.get(unit, 1))
    else:
        raise BadValue(f"time {short(text)} is not a number of {UNIT_WORDS[unit]}")
    if not within[0] <= milliseconds < within[1]:
        year = f", the year {_shown_year(milliseconds)}" if milliseconds >= 0 else ""
        raise BadValue(
            f"time {short(text)} is out of range: in {UNIT_WORDS[unit]}{year}; another unit needs --time-unit"
        )
    return milliseconds


def is_time(text: str) -> bool:
    """Whether the text could be a time in any unit."""
    if is_number(text):
        return float(text) >= 0
    try:
        parse_time(text, "iso")
    except BadValue:
        return False
    return True


def unit_by_size(number: float) -> Unit:
    """The unit of a number of time since 1970 by its size alone: each is the smallest that keeps it before 5138."""
    bounds: tuple[tuple[Unit, float], ...] = (("s", 1e11), ("ms", 1e14), ("us", 1e17))
    return next((unit for unit, bound in bounds if number < bound), "ns")


def find_time_unit(sample: Sequence[str]) -> tuple[Unit, tuple[int, int]] | None:
    """The unit of a log's times, and the range of plausible ones in ms; None if the median fits no unit.

    Text is ISO 8601; so are numbers such as 20140517. Numbers below FIRST_DAYS count seconds from the log's start.
    """
    numbers = sorted(float(text) for text in sample if is_number(text))
    dates = sum(is_time(text) for text in sample if not is_number(text))
    if dates > len(numbers):
        return "iso", (0, LATEST_MS)
    if not numbers:
        return "s", (0, LATEST_MS)
    median = numbers[len(numbers) // 2]
    if sum(len(text) == 8 and text.isdigit() and text[:2] in ("19", "20") for text in sample) == len(sample):
        return "iso", PLAUSIBLE_MS
    if median < FIRST_DAYS:
        return "s", (0, LATEST_MS)
    for unit in ("s", "ms", "us", "ns", "days"):
        low, high = (bound * _DIVISOR.get(unit, 1) / _FACTOR.get(unit, 1) for bound in FOUND_MS)
        if low <= median < high:
            return unit, PLAUSIBLE_MS
    return None


def _shown_year(milliseconds: float) -> str:
    year = 1970 + milliseconds / (365.2425 * DAY_MS)
    return f"{year:.0f}" if year < 1e6 else f"{year:.3g}"


def _parse_iso(text: str) -> int:
    try:
        # Several public shop logs write " UTC" at the end.
        moment = datetime.fromisoformat(text.strip().removesuffix(" UTC"))
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return math.floor(moment.timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise BadValue(f"time {short(text)} is not ISO 8601") from error


def short(text: str) -> str:
    """A value as messages quote it."""
    return repr(text if len(text) <= 40 else text[:39] + "…")
