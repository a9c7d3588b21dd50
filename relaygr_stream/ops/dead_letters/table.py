"""Dead letters as text; control characters, by which a hostile one could change its reader's terminal, are escaped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from rich.console import Console

from relaygr_stream.ops.dead_letters.letter import Letter, show_value
from relaygr_stream.ops.dead_letters.replay import Verdict
from relaygr_stream.telemetry.printable import listing, print_table, printable, printable_json, readable_id

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: A longer key is cut in a listing; `show` prints it completely.
KEY_CHARACTERS: Final = 48


def print_letters(console: Console, letters: Sequence[Letter]) -> None:
    """Print a row for each dead letter, with its address and origin, and the count of each reason.

    On a terminal, key and detail are below the origin, folded to its width; otherwise each dead letter is one line.
    """
    if not letters:
        console.print("no dead letters")
        return
    head = ("address", "when (UTC)", "reason", "from")
    table = listing(head if console.is_terminal else (*head, "key, size, detail"), whole=head[:3])
    for letter in letters:
        *cells, origin = _cells(letter)
        table.add_row(*cells, *([f"{origin}\n{_more(letter)}"] if console.is_terminal else [origin, _more(letter)]))
    print_table(table, console)
    reasons = Counter(letter.reason or "unknown" for letter in letters)
    counted = ", ".join(f"{count} {printable(reason)}" for reason, count in sorted(reasons.items()))
    console.print(f"{len(letters)} dead letter{'' if len(letters) == 1 else 's'}: {counted}", soft_wrap=True)


def as_json(letter: Letter, *, value: bool) -> str:
    """One line of JSON; value: include the unpacked value. Binary keys and headers are 0x and hexadecimal digits."""
    known = {
        "address": letter.address,
        "time": _when(letter, "milliseconds"),
        "reason": letter.reason,
        "detail": letter.detail,
        **({"scenario": letter.scenario} if letter.scenario else {}),
        "origin": {"topic": letter.origin_topic, "partition": letter.origin_partition, "offset": letter.origin_offset},
        "key": None if letter.key is None else readable_id(letter.key),
        "bytes": len(letter.value),
        "digest": letter.digest,
        "replays": letter.replays,
        "replayed": letter.replayed,
        "headers": {name: readable_id(value) for name, value in letter.headers},
    }
    line = json.dumps(known | ({"value": show_value(letter.value)} if value else {}), ensure_ascii=False)
    return printable_json(line)


def print_letter(console: Console, letter: Letter) -> None:
    """Print one dead letter with all its fields and its unpacked value."""
    # Rich formats the JSON again, and escapes every control character only as ASCII.
    console.print_json(as_json(letter, value=True), ensure_ascii=True)


def line_of(letter: Letter, verdict: Verdict, detail: str) -> str:
    """A line of a replay's output: the dead letter and its verdict."""
    where = f"{letter.origin_topic or 'unknown topic'} key {_key(letter)}"
    return printable(f"{letter.address:>10}  {verdict:<15}  {where}{': ' + detail if detail else ''}")


def _cells(letter: Letter) -> tuple[str, ...]:
    origin = f"{letter.origin_topic}[{letter.origin_partition}]@{letter.origin_offset}" if letter.origin_topic else "?"
    cells = (letter.address, _when(letter, "seconds"), letter.reason or "unknown", origin)
    return tuple(printable(cell) for cell in cells)


def _more(letter: Letter) -> str:
    """Key, size, replays, and the detail."""
    parts = [f"key {_key(letter)}", letter.digest or f"{len(letter.value):,} bytes"]
    if letter.replays:
        parts.append(f"came back from replay {letter.replays}")
    if letter.replayed:
        parts.append("replayed")
    return printable(", ".join(parts) + (f": {letter.detail}" if letter.detail else ""))


def _key(letter: Letter) -> str:
    key = "–" if letter.key is None else readable_id(letter.key)
    return key if len(key) <= KEY_CHARACTERS else f"{key[:KEY_CHARACTERS]}…"


def _when(letter: Letter, precision: str) -> str:
    """The producer's timestamp, which may be any int64."""
    try:
        when = _EPOCH + timedelta(milliseconds=letter.timestamp_ms)
    except OverflowError:
        return f"{letter.timestamp_ms} ms"
    return when.replace(tzinfo=None).isoformat(timespec=precision) + "Z"
