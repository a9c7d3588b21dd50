"""Dead letters as text, without the control characters by which a hostile one could rewrite its reader's terminal."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from rich.console import Console

from relaygr_stream.ops.dead_letters.letter import Letter, show_value
from relaygr_stream.ops.dead_letters.replay import Verdict
from relaygr_stream.telemetry.printable import printable, printable_json, readable_id

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_HEAD: Final = ("address", "when (UTC)", "reason", "from")
#: A key longer than this is cut in a listing; `show` has it whole.
KEY_CHARACTERS: Final = 48


def print_letters(console: Console, letters: Sequence[Letter]) -> None:
    """Where each letter lies and came from, and how many there are for each reason.

    On a terminal key and detail are indented below, folded to its width; in a pipe each letter is one whole line.
    """
    if not letters:
        console.print("no dead letters")
        return
    rows = [_HEAD, *(_cells(letter) for letter in letters)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for row, letter in zip(rows, [None, *letters], strict=True):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        more = "" if letter is None else _more(letter)
        if console.is_terminal:
            indent = " " * (widths[0] + 2)
            folded = textwrap.wrap(more, console.width, initial_indent=indent, subsequent_indent=indent)
            console.print("\n".join([line, *folded]), soft_wrap=True)
        else:
            console.print(f"{line}  {more}".rstrip(), soft_wrap=True)
    reasons = Counter(letter.reason or "unknown" for letter in letters)
    counted = ", ".join(f"{count} {printable(reason)}" for reason, count in sorted(reasons.items()))
    console.print(f"{len(letters)} {'letter' if len(letters) == 1 else 'letters'}: {counted}", soft_wrap=True)


def as_json(letter: Letter, *, value: bool) -> str:
    """One line of JSON; value: with the value unpacked. Binary keys and headers are 0x and their digits."""
    known = {
        "address": letter.address,
        "time": _when(letter, "milliseconds"),
        "reason": letter.reason,
        "detail": letter.detail,
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
    """Everything known of one letter, its value unpacked as far as it goes."""
    # Rich writes the JSON anew; only as ASCII does it escape every control character.
    console.print_json(as_json(letter, value=True), ensure_ascii=True)


def line_of(letter: Letter, verdict: Verdict, detail: str) -> str:
    """What became of a letter, as a line of a replay's output."""
    where = f"{letter.origin_topic or 'unknown topic'} key {_key(letter)}"
    return printable(f"{letter.address:>10}  {verdict:<15}  {where}{': ' + detail if detail else ''}")


def _cells(letter: Letter) -> tuple[str, ...]:
    origin = f"{letter.origin_topic}[{letter.origin_partition}]@{letter.origin_offset}" if letter.origin_topic else "?"
    cells = (letter.address, _when(letter, "seconds"), letter.reason or "unknown", origin)
    return tuple(printable(cell) for cell in cells)


def _more(letter: Letter) -> str:
    """Key, size, what replays did, and the detail."""
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
    """The producer's clock, which may say anything that an int64 holds."""
    try:
        when = _EPOCH + timedelta(milliseconds=letter.timestamp_ms)
    except OverflowError:
        return f"{letter.timestamp_ms} ms"
    return when.replace(tzinfo=None).isoformat(timespec=precision) + "Z"
