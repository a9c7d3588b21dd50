"""What is on its way to a broker."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from relaygr_stream.telemetry.background import Background

#: With this many refusals under way the process counts as stuck, as with many dead letters: they hold none of
#: worker.max_waiting_bytes, and while `scores` is away each record that is read may add one. 50 MB.
REFUSALS_LIMIT: Final = 10_000


class UnderWay:
    """Tasks that send. background: runs them; a defect in one would hold up its lane's commits, so it ends the process.

    After `close` nothing is sent any more.
    """

    def __init__(self, background: Background) -> None:
        self._background = background
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusals: set[asyncio.Task[None]] = set()  # those of which no bytes are counted (books.py)
        self.closed = False

    @property
    def full(self) -> bool:
        """Whether so many refusals wait that the process should read no more records."""
        return len(self._refusals) >= REFUSALS_LIMIT

    @property
    def tasks(self) -> frozenset[asyncio.Task[None]]:
        """Answers and copies of requests that are on their way."""
        return frozenset(self._tasks)

    def start(self, work: Coroutine[Any, Any, None], *, refusal: bool = False) -> None:
        """Send this. refusal: nothing of its request is counted."""
        if self.closed:
            work.close()
            return
        task = self._background.start(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if refusal:
            self._refusals.add(task)
            task.add_done_callback(self._refusals.discard)

    def close(self) -> None:
        """Cancel what is under way; those records are not done, so they are read again."""
        self.closed = True
        for task in self._tasks:
            task.cancel()
