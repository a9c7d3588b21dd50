"""Foreign text for a terminal: characters that control a terminal, or change what its reader sees, are escaped.

Ids, worker names, details and log lines come from any writer of a topic or a file. Every console of this package is a
`SafeConsole`; other output of foreign text uses one of these functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

#: C0 (with ESC and line ends), DEL and C1; line and paragraph separators; marks that change the direction of writing;
#: surrogates, which no terminal's encoding has.
_STEERING: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_STEERING_BUT_LINES: Final = re.compile(_STEERING.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))
#: Prints a line for people.
Say = Callable[[str], object]
#: Columns for output that is not a terminal: wider than any row, also one with a dead letter's detail of 1 MiB.
UNLIMITED_WIDTH: Final = 1 << 21


def printable(text: str) -> str:
    """The text on one line, with characters that control a terminal as \\xNN or \\uNNNN."""
    return _STEERING.sub(_escaped, text)


def printable_lines(text: str) -> str:
    """As `printable`, for text of several lines: a traceback, the end of a log."""
    return _STEERING_BUT_LINES.sub(_escaped, text)


def printable_json(line: str) -> str:
    """A line of JSON with such characters as JSON escapes, so that programs read the original text."""
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


def readable_id(raw: bytes) -> str:
    """A key or a header for a person: its text if it is printable UTF-8, else 0x and hexadecimal digits."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return f"0x{raw.hex()}"
    return text if printable(text) == text else f"0x{raw.hex()}"


class SafeConsole(Console):
    """A rich console that prints strings, also in tables, as plain text: no markup, links, emoji codes or escapes.

    For styles, make a `Text`, with foreign text passed through `printable`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """As in rich, for the escaped text."""
        return super().render_str(printable_lines(text), **options)


def render_plain(renderable: RenderableType, width: int = UNLIMITED_WIDTH) -> str:
    """The renderable as text without colours, `width` columns wide, without spaces at line ends."""
    console = SafeConsole(width=width, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def listing(columns: Sequence[str], *, numbers: Collection[str] = (), whole: Collection[str] = ()) -> Table:
    """A table without lines, to fill with `add_row`.

    numbers: right-aligned columns. These and the columns in `whole` do not fold on a narrow terminal; the others do.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        justify: Any = "right" if name in numbers else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name in numbers or name in whole)
    return table


def print_table(table: RenderableType, console: Console | None = None) -> None:
    """Print a table, by default to stdout. If that is not a terminal, each row is one line, for grep and cut.

    A report for a person should fold instead: use `console.print`.
    """
    console = console or SafeConsole()
    if console.is_terminal:
        console.print(table)
    else:
        console.print(render_plain(table), end="", soft_wrap=True, markup=False, highlight=False, emoji=False)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
