"""Text that others sent, for a terminal: what could steer it, or rewrite what its reader sees, is escaped.

Ids, worker names, details and a log's lines are written by whoever may write to a topic or a file. Every console of
this package is a `SafeConsole`; other foreign text goes through one of the functions.
"""

from __future__ import annotations

import re
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.text import Text

#: C0 (with ESC, and line ends that would begin a line of their own), DEL and C1; line and paragraph separators; the
#: marks that turn the direction of writing; surrogates, which no terminal's encoding has.
_STEERING: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_STEERING_BUT_LINES: Final = re.compile(_STEERING.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def printable(text: str) -> str:
    """The text on one line, what steers a terminal as \\xNN or \\uNNNN."""
    return _STEERING.sub(_escaped, text)


def printable_lines(text: str) -> str:
    """The same of a text that has lines: a traceback, the end of a log."""
    return _STEERING_BUT_LINES.sub(_escaped, text)


def printable_json(line: str) -> str:
    """A line of JSON with such characters escaped as JSON does, so that programs read what was meant."""
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


def readable_id(raw: bytes) -> str:
    """A key or a header for a person: as text where it is text, else 0x and its hexadecimal digits."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return f"0x{raw.hex()}"
    return text if printable(text) == text else f"0x{raw.hex()}"


class SafeConsole(Console):
    """A rich console on which strings, in tables too, are text: no markup, no links, no emoji codes, no escapes.

    Styles are for whoever makes a `Text`, which foreign words enter through `printable`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """As rich, of the printable text."""
        return super().render_str(printable_lines(text), **options)


def render_plain(renderable: RenderableType, width: int) -> str:
    """What a console without colours of that many columns shows, without spaces at the ends of lines."""
    console = SafeConsole(width=width, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
