"""Dead letters as text, without the control characters by which a hostile one could rewrite its reader's terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relaygr_stream.dead_letters.letter import Letter, show_value
from relaygr_stream.dead_letters.replay import Verdict
from relaygr_stream.printable import printable

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: DEL and the C1 control characters, which JSON leaves as they are.
_JSON_CONTROLS: Final = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}


def print_letters(console: Console, letters: Sequence[Letter]) -> None:
    """One line each, and how many there are for each reason."""
    if not letters:
        console.print("no dead letters")
        return
    table = Table("address", "when (UTC)", "reason", "from", "key", "bytes", "replays", "detail")
    for letter in letters:
        table.add_row(*(Text(printable(cell)) for cell in _cells(letter)))
    console.print(table)
    reasons = {reason: sum(letter.reason == reason for letter in letters) for reason in sorted(_reasons(letters))}
    counted = ", ".join(f"{n} {reason or 'unknown'}" for reason, n in reasons.items())
    console.print(Text(printable(f"{len(letters)} letters: {counted}")))


def as_json(letter: Letter, *, value: bool) -> str:
    """One line of JSON; value: with the value unpacked."""
    known = {
        "address": letter.address,
        "time": _when(letter),
        "reason": letter.reason,
        "detail": letter.detail,
        "origin": {"topic": letter.origin_topic, "partition": letter.origin_partition, "offset": letter.origin_offset},
        "key": _key(letter),
        "bytes": len(letter.value),
        "replays": letter.replays,
        "replayed": letter.replayed,
        "headers": {name: value.decode("utf-8", "replace") for name, value in letter.headers},
    }
    line = json.dumps(known | ({"value": show_value(letter.value)} if value else {}), ensure_ascii=False)
    return line.translate(_JSON_CONTROLS)


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
    sent = f"{letter.replays}{', replayed' if letter.replayed else ''}"
    return (
        letter.address,
        _when(letter),
        letter.reason,
        origin,
        _key(letter),
        str(len(letter.value)),
        sent,
        letter.detail,
    )


def _key(letter: Letter) -> str:
    return "–" if letter.key is None else letter.key.decode("utf-8", "backslashreplace")


def _when(letter: Letter) -> str:
    """The producer's clock, which may say anything that an int64 holds."""
    try:
        when = _EPOCH + timedelta(milliseconds=letter.timestamp_ms)
    except OverflowError:
        return f"{letter.timestamp_ms} ms"
    return when.isoformat(timespec="milliseconds")


def _reasons(letters: Sequence[Letter]) -> set[str]:
    return {letter.reason for letter in letters}
