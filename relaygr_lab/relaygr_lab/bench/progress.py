"""The bench's progress: a line per probe, and on a terminal a line at the bottom that shows the current step."""

from __future__ import annotations

from typing import Final, Self

from rich.console import Console
from rich.status import Status


class Progress:
    """A context: `say` prints a permanent line, `live` replaces the line at the bottom of a terminal."""

    def __init__(self, console: Console) -> None:
        self.console: Final = console
        self._status: Status | None = Status("starting …", console=console) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, line: str) -> None:
        """Print a permanent line."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def live(self, line: str) -> None:
        """Show the current step on a terminal."""
        if self._status is not None:
            self._status.update(line)
