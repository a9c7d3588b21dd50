"""A set of disjoint byte ranges, merged into maximal runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sortedcontainers import SortedList

from relaygr_stream.errors import CacheCorruption


class Runs:
    """Maximal runs of bytes, found by start, end, size or any byte inside, in O(log n)."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}  # start → size
        self._starts: dict[int, int] = {}  # end → start
        self._by_size: SortedList[tuple[int, int]] = SortedList()  # (size, start)
        self._by_start: SortedList[int] = SortedList()

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def largest(self) -> int:
        """Size of the largest run; 0 if there is none."""
        return self._by_size[-1][0] if self._by_size else 0

    def before(self, offset: int) -> int:
        """Size of the run that ends at `offset`; 0 if there is none."""
        start = self._starts.get(offset)
        return 0 if start is None else offset - start

    def after(self, offset: int) -> int:
        """Size of the run that starts at `offset`; 0 if there is none."""
        return self.sizes.get(offset, 0)

    def around(self, offset: int) -> tuple[int, int] | None:
        """(start, size) of the run that contains the byte at `offset`; None if there is none."""
        start = offset if offset in self.sizes else next(self._by_start.irange(None, offset, reverse=True), None)
        return None if start is None or start + self.sizes[start] <= offset else (start, self.sizes[start])

    def at_least(self, size: int) -> Iterator[tuple[int, int]]:
        """(size, start) of the runs of at least `size`, smallest first, then by address. A change invalidates it."""
        yield from self._by_size.irange((size, 0))

    def add(self, offset: int, size: int) -> None:
        """Add a range that overlaps no run; merges it with its neighbours."""
        before, after = self.before(offset), self.after(offset + size)
        if before:
            self._delete(offset - before)
        if after:
            self._delete(offset + size)
        self._insert(offset - before, before + size + after)

    def remove(self, offset: int, size: int) -> None:
        """Remove a range from the run that contains it; the rest of the run stays.

        Raises CacheCorruption if no run contains the whole range.
        """
        run = self.around(offset)
        if run is None or offset + size > run[0] + run[1]:
            raise CacheCorruption(f"{size} bytes at {offset} are not all in one run ({run})")
        start, whole = run
        self._delete(start)
        if offset > start:
            self._insert(start, offset - start)
        if start + whole > offset + size:
            self._insert(offset + size, start + whole - offset - size)

    def check_integrity(self, expected: Mapping[int, int], what: str) -> None:
        """Raise CacheCorruption unless all indexes equal `expected` (start → size). what: the set's name."""
        if (
            self.sizes != expected
            or self._starts != {start + size: start for start, size in expected.items()}
            or list(self._by_start) != sorted(expected)
            or list(self._by_size) != sorted((size, start) for start, size in expected.items())
        ):
            raise CacheCorruption(f"the indexes of {what} contradict each other or the held extents")

    def _insert(self, start: int, size: int) -> None:
        self.sizes[start] = size
        self._starts[start + size] = start
        self._by_size.add((size, start))
        self._by_start.add(start)

    def _delete(self, start: int) -> None:
        size = self.sizes.pop(start)
        del self._starts[start + size]
        self._by_size.remove((size, start))
        self._by_start.remove(start)
