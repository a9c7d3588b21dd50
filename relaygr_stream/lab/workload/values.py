"""Single values of a log: numbers and times out of text."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Final, Literal

TimeUnit = Literal["auto", "s", "ms", "iso"]

#: Smaller numbers are seconds (1e11 s is the year 5138), others milliseconds (1e11 ms is March 1973).
FIRST_MILLISECONDS: Final = 1e11
MAX_TIME_MS: Final = 2**53  # the largest that a float holds exactly; far beyond any time


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


def parse_time(text: str, unit: TimeUnit) -> int:
    """Unix time in ms; a time without a zone is UTC. Raises BadValue."""
    if unit == "iso":
        milliseconds = _parse_iso(text)
    elif text.isdigit() and text.isascii() and len(text) <= 16:
        milliseconds = int(text) * 1000 if unit == "s" else int(text)
    elif is_number(text):
        milliseconds = math.floor(float(text) * (1000 if unit == "s" else 1))
    else:
        raise BadValue(f"time {short(text)} is not a number of {'seconds' if unit == 's' else 'milliseconds'}")
    if not 0 <= milliseconds < MAX_TIME_MS:
        raise BadValue(f"time {short(text)} is out of range; expected Unix time in s or ms, or ISO 8601")
    return milliseconds


def is_time(text: str) -> bool:
    """Whether the text could be a time in any unit."""
    try:
        parse_time(text, "s" if is_number(text) else "iso")
    except BadValue:
        return False
    return True


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
