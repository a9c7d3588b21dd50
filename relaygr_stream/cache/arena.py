"""Bookkeeping of one contiguous memory: which byte ranges are held, and which are holes.

Allocation is best fit over holes ordered by size; freed extents merge with the holes beside them at once. The search
for the cheapest contiguous window to evict prevents mixed lengths from leaving memory in holes too small to use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from sortedcontainers import SortedList

from relaygr_stream.errors import CacheCorruption


class Runs:
    """A set of disjoint byte ranges, merged into maximal runs: found by start, end, size or any byte inside.

    Each call is O(log n).
    """

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}  # start → size
        self._starts: dict[int, int] = {}  # end → start
        self._by_size: SortedList[tuple[int, int]] = SortedList()  # (size, start)
        self._by_start: SortedList[int] = SortedList()

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


class Extent(NamedTuple):
    """A held byte range; offset and size are multiples of the arena's alignment."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """The first byte behind the extent."""
        return self.offset + self.size


class Arena:
    """`size` bytes (rounded down to the alignment), at first one hole. Not thread-safe.

    Every operation on one extent is O(log n). Requested sizes are rounded up to the alignment. A held extent is fixed
    until `set_evictable` marks it; the mark only lets the arena count it as space that eviction could free.
    Raises ValueError if size < 0 or alignment < 1.
    """

    def __init__(self, size: int, alignment: int) -> None:
        if size < 0 or alignment < 1:
            raise ValueError(f"an arena needs size ≥ 0 and alignment ≥ 1, got {size} and {alignment}")
        self.alignment = alignment
        self.size = size // alignment * alignment
        self.used = 0
        self._held: dict[int, int] = {}  # offset → size
        self._ends: dict[int, int] = {}  # end → offset, of held extents
        self._evictable: set[int] = set()  # offsets
        self._holes = Runs()
        self._open = Runs()  # holes and evictable extents: everything but the fixed extents
        if self.size:
            self._holes.add(0, self.size)
            self._open.add(0, self.size)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, extent: Extent) -> bool:
        return self._held.get(extent.offset) == extent.size

    @property
    def free_bytes(self) -> int:
        """Bytes in holes."""
        return self.size - self.used

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest extent that `allocate` can return now."""
        return self._holes.largest

    @property
    def largest_open(self) -> int:
        """Bytes of the largest extent that `allocate` could return if all evictable extents were freed."""
        return self._open.largest

    def round_up(self, nbytes: int) -> int:
        """`nbytes` rounded up to the alignment. Raises ValueError if nbytes < 1."""
        if nbytes < 1:
            raise ValueError(f"nbytes must be at least 1, got {nbytes}")
        return -(-nbytes // self.alignment) * self.alignment

    def allocate(self, nbytes: int) -> Extent | None:
        """Hold the first `nbytes` of the smallest hole that is large enough (lowest of equals); None if none is."""
        size = self.round_up(nbytes)
        hole = next(self._holes.at_least(size), None)
        if hole is None:
            return None
        extent = Extent(hole[1], size)
        self._holes.remove(extent.offset, size)
        self._open.remove(extent.offset, size)
        self._hold(extent)
        return extent

    def hold_all(self, extents: Iterable[Extent]) -> None:
        """Hold these extents, and mark them evictable, while none is held: disjoint ones, aligned, in address order."""
        assert not self._held
        self._holes, end = Runs(), 0
        for extent in extents:
            if extent.offset > end:
                self._holes.add(end, extent.offset - end)
            self._hold(extent)
            end = extent.end
        if end < self.size:
            self._holes.add(end, self.size - end)
        self._evictable = set(self._held)

    def free(self, extent: Extent) -> None:
        """Turn the extent into a hole and merge it with its neighbours. Raises ValueError if it is not held."""
        self.set_evictable(extent, True)
        self._evictable.remove(extent.offset)
        self._release(extent)
        self._holes.add(extent.offset, extent.size)

    def set_evictable(self, extent: Extent, evictable: bool) -> None:
        """Mark whether the extent may be evicted. Frees nothing. Raises ValueError if the extent is not held."""
        self._check_held(extent)
        if evictable == (extent.offset in self._evictable):
            return
        if evictable:
            self._evictable.add(extent.offset)
            self._open.add(extent.offset, extent.size)
        else:
            self._evictable.remove(extent.offset)
            self._open.remove(extent.offset, extent.size)

    def open_run(self, extent: Extent) -> int:
        """Bytes of the hole around the extent if all evictable extents were freed; 0 if the extent is fixed."""
        run = self._open.around(extent.offset)
        return 0 if run is None else run[1]

    def starts_of_open_runs(self, nbytes: int, count: int) -> Iterator[Extent]:
        """The first extent of each of the `count` smallest runs that could hold `nbytes` if all in them were freed."""
        for size, start in islice(self._open.at_least(nbytes), count):
            first = start + self._holes.after(start)
            if first < start + size:
                yield Extent(first, self._held[first])

    def cheapest_window(
        self, nbytes: int, evictable: Mapping[Extent, float], seeds: Iterable[Extent] | None = None
    ) -> list[Extent] | None:
        """The evictable extents with the least total cost whose freeing makes a hole of `nbytes`, in address order.

        Changes nothing. Returns [] if a hole is large enough already, None if no run of evictable extents and holes is.
        evictable: extent → cost ≥ 0. Without `seeds` it searches all k extents in O(k log k). With `seeds` it searches
        only up to `nbytes` around each seed, looks costs up with `evictable.get`, and its time does not depend on k.
        """
        need = self.round_up(nbytes)
        if self.largest_hole >= need:
            return []
        costs = evictable if seeds is None else self._surroundings(need, evictable, seeds)
        ordered = sorted(costs)
        total = [0.0]  # total[i]: cost of the first i
        starts, ends = [], []  # the hole's bounds if only this extent were freed
        for extent in ordered:
            self._check_held(extent)
            total.append(total[-1] + costs[extent])
            starts.append(extent.offset - self._holes.before(extent.offset))
            ends.append(extent.end + self._holes.after(extent.end))
        best: tuple[float, int] | None = None  # cost, and unused bytes
        window = (0, 0)
        first = 0
        for last, end in enumerate(ends):
            if last and ends[last - 1] < ordered[last].offset:  # a fixed extent lies between
                first = last
            while first < last and end - starts[first + 1] >= need:
                first += 1
            leftover = end - starts[first] - need
            found = (total[last + 1] - total[first], leftover)
            if leftover >= 0 and (best is None or found < best):
                best, window = found, (first, last + 1)
        return None if best is None else ordered[window[0] : window[1]]

    def check_integrity(self) -> None:
        """Raise CacheCorruption unless held extents and holes tile the memory and all indexes agree. O(n log n)."""
        holes: dict[int, int] = {}
        opened: dict[int, int] = {}  # start → size of maximal runs of holes and evictable extents
        last_end = run_start = 0

        def free_up_to(offset: int) -> None:
            if offset > last_end:
                holes[last_end] = offset - last_end

        def run_up_to(offset: int) -> None:
            if offset > run_start:
                opened[run_start] = offset - run_start

        for offset, size in sorted(self._held.items()):
            if offset < last_end or offset + size > self.size or size < 1 or (offset | size) % self.alignment:
                raise CacheCorruption(
                    f"{size} bytes are held at {offset}: the extent before ends at {last_end}, the memory at "
                    f"{self.size}, the alignment is {self.alignment}"
                )
            free_up_to(offset)
            last_end = offset + size
            if offset not in self._evictable:
                run_up_to(offset)
                run_start = last_end
        free_up_to(self.size)
        run_up_to(self.size)
        self._holes.check_integrity(holes, "the holes")
        self._open.check_integrity(opened, "the evictable runs")
        if self._ends != {offset + size: offset for offset, size in self._held.items()}:
            raise CacheCorruption("the index of held extents by their ends differs from the held extents")
        if not self._evictable <= self._held.keys():
            raise CacheCorruption(f"offsets evictable, but not held: {sorted(self._evictable - self._held.keys())}")
        if sum(self._held.values()) != self.used:
            raise CacheCorruption(f"{sum(self._held.values())} bytes are held, {self.used} were counted")

    def _surroundings(
        self, need: int, evictable: Mapping[Extent, float], seeds: Iterable[Extent]
    ) -> dict[Extent, float]:
        """The seeds and the evictable extents up to `need` bytes to either side of them, with their costs."""
        near: dict[Extent, float] = {}

        def include(extent: Extent) -> bool:
            if extent in near:
                return True
            cost = evictable.get(extent)
            if cost is not None:
                near[extent] = cost
            return cost is not None

        for seed in seeds:
            if not include(seed):
                continue
            end = seed.offset - self._holes.before(seed.offset)
            while end > max(0, seed.end - need):
                extent = Extent(self._ends[end], end - self._ends[end])
                if not include(extent):
                    break
                end = extent.offset - self._holes.before(extent.offset)
            start = seed.end + self._holes.after(seed.end)
            while start < min(self.size, seed.offset + need):
                extent = Extent(start, self._held[start])
                if not include(extent):
                    break
                start = extent.end + self._holes.after(extent.end)
        return near

    def _check_held(self, extent: Extent) -> None:
        if extent not in self:
            raise ValueError(f"{extent} is not held by this arena of {self.size} bytes (freed already?)")

    def _hold(self, extent: Extent) -> None:
        self._held[extent.offset] = extent.size
        self._ends[extent.end] = extent.offset
        self.used += extent.size

    def _release(self, extent: Extent) -> None:
        del self._held[extent.offset], self._ends[extent.end]
        self.used -= extent.size
