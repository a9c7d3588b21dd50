"""Tasks that wait at an entry for something to be over: a copy, or another's computation."""

from __future__ import annotations

from collections import defaultdict

from relaygr_stream.cache.entry import Entry
from relaygr_stream.worker.tasks import PreInferTask, RankTask


class Parked:
    """By entry, in the order they came."""

    def __init__(self) -> None:
        self._tasks: defaultdict[Entry, list[RankTask | PreInferTask]] = defaultdict(list)

    def add(self, entry: Entry, task: RankTask | PreInferTask) -> None:
        """Wait here until the entry is woken."""
        self._tasks[entry].append(task)

    def take(self, entry: Entry) -> list[RankTask | PreInferTask]:
        """Everyone who waits at the entry, who wait no more."""
        return self._tasks.pop(entry, [])
