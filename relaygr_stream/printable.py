"""Text that others sent, for a terminal: control characters, which could rewrite what its reader sees, escaped."""

from __future__ import annotations

from typing import Final

#: C0 (with ESC, and line ends that would begin a line of their own), DEL and C1.
_CONTROLS: Final = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


def printable(text: str) -> str:
    """The text on one line, without control characters."""
    return text.translate(_CONTROLS)
