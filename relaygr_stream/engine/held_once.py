"""Bytes that pins hold for somebody, each entry once, however many requests pin it.

Such bounds are: what is pinned on other workers' behalf, and what the announced requests of one tenant, or of one
scenario that shares a worker, may pin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from relaygr_stream.cache.entry import Entry

W = TypeVar("W", bound=Hashable)


class HeldOnce(Generic[W]):
    """By whom entries are pinned, and how many bytes that are."""

    def __init__(self) -> None:
        self._held: dict[tuple[W, Entry], tuple[int, int]] = {}  # → pins, bytes
        self._bytes: Counter[W] = Counter()

    def __iter__(self) -> Iterator[W]:
        """For whom any are pinned."""
        return iter(self._bytes)

    def bytes_of(self, whose: W) -> int:
        """Of all entries that are pinned for it."""
        return self._bytes[whose]

    def more(self, whose: W, entry: Entry | None, nbytes: int) -> int:
        """Bytes that another pin of this entry would add. entry: None: a new one. nbytes: what it is counted for."""
        return nbytes if entry is None else max(0, nbytes - self._held.get((whose, entry), (0, 0))[1])

    def add(self, whose: W, entry: Entry, nbytes: int) -> None:
        """One more pin of the entry."""
        pins, held = self._held.get((whose, entry), (0, 0))
        more = self.more(whose, entry, nbytes)
        self._held[whose, entry] = pins + 1, held + more
        self._bytes[whose] += more

    def release(self, whose: W, entry: Entry) -> None:
        """One pin less; with the last one its bytes are free."""
        pins, held = self._held.pop((whose, entry))
        if pins > 1:
            self._held[whose, entry] = pins - 1, held
            return
        self._bytes[whose] -= held
        if not self._bytes[whose]:
            del self._bytes[whose]  # tenants come and go
