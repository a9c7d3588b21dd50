"""Bookkeeping of one contiguous memory: which byte ranges are held, which are holes. Knows no tensors and no entries.

Best fit over holes ordered by size, coalescing at once, and the search for the cheapest contiguous window to evict,
without which mixed lengths would leave much of the memory in holes too small to use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from relaygr_stream.cache.runs import Runs
from relaygr_stream.errors import CacheCorruption


class Extent(NamedTuple):
    """A held byte range; offset and size are multiples of the arena's alignment."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """First byte behind the extent."""
        return self.offset + self.size


class Arena:
    """`size` bytes (rounded down to the alignment), all one hole at first. Not thread-safe.

    Every operation on one extent is O(log n); sizes asked for are rounded up to the alignment. Held extents are fixed
    until their holder says that they may be evicted, which does no more than let `runs` find room for them.
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
        self._open = Runs()  # holes and evictable extents: everything but what is fixed
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
        """The most that `allocate` can give now, in bytes."""
        return self._holes.largest

    @property
    def largest_open(self) -> int:
        """The most that `allocate` could give if all that may be evicted were freed, in bytes."""
        return self._open.largest

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes outside the largest hole: 0 when all of them are in one piece."""
        return 1 - self.largest_hole / self.free_bytes if self.free_bytes else 0.0

    def round_up(self, nbytes: int) -> int:
        """What `nbytes` ≥ 1 really take."""
        if nbytes < 1:
            raise ValueError(f"nbytes must be at least 1, got {nbytes}")
        return -(-nbytes // self.alignment) * self.alignment

    def allocate(self, nbytes: int) -> Extent | None:
        """Hold the first `nbytes` of the smallest hole they fit in, lowest address first; None when there is none."""
        size = self.round_up(nbytes)
        hole = next(self._holes.at_least(size), None)
        if hole is None:
            return None
        extent = Extent(hole[1], size)
        self._holes.remove(extent.offset, size)
        self._open.remove(extent.offset, size)
        self._hold(extent)
        return extent

    def free(self, extent: Extent) -> None:
        """Give the extent back, joined with the holes beside it. ValueError if it is not held (a double free)."""
        self.set_evictable(extent, True)
        self._evictable.remove(extent.offset)
        self._release(extent)
        self._holes.add(extent.offset, extent.size)

    def grow(self, extent: Extent, nbytes: int) -> Extent | None:
        """Enlarge to `nbytes` in place, into the hole behind; None, and nothing changed, when that is too small."""
        self._check_held(extent)
        size = self.round_up(nbytes)
        more = size - extent.size
        if more < 0:
            raise ValueError(f"cannot grow {extent} to {nbytes} bytes; use shrink")
        if more > self._holes.after(extent.end):
            return None
        if more:
            self._holes.remove(extent.end, more)
            if extent.offset not in self._evictable:
                self._open.remove(extent.end, more)
        return self._resize(extent, size)

    def shrink(self, extent: Extent, nbytes: int) -> Extent:
        """Keep the first `nbytes`, the rest becomes free. ValueError if that would be more than it has."""
        self._check_held(extent)
        size = self.round_up(nbytes)
        less = extent.size - size
        if less < 0:
            raise ValueError(f"cannot shrink {extent} to {nbytes} bytes; use grow")
        if less:
            self._holes.add(extent.end - less, less)
            if extent.offset not in self._evictable:
                self._open.add(extent.end - less, less)
        return self._resize(extent, size)

    def set_evictable(self, extent: Extent, evictable: bool) -> None:
        """Say whether the extent's holder would give it up for others. Changes nothing else."""
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
        """Bytes that would be free around and in the extent if all that may be evicted were freed; 0 if it is fixed."""
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
        """Evictable extents, in address order, whose freeing makes a hole of `nbytes`, at the least sum of costs.

        Changes nothing. [] when a hole is large enough already, None when no run of evictable extents and holes is.
        Without `seeds` all of `evictable` (k extents with costs ≥ 0) is searched, in O(k log k). With `seeds`, only
        the surroundings of these: each as far as nbytes reach, looked up with `evictable.get`, whatever k is.
        """
        need = self.round_up(nbytes)
        if self.largest_hole >= need:
            return []
        costs = evictable if seeds is None else self._surroundings(need, evictable, seeds)
        ordered = sorted(costs)
        total = [0.0]  # total[i]: cost of the first i
        starts, ends = [], []  # where the free range would start and end if only this one were freed
        for extent in ordered:
            self._check_held(extent)
            total.append(total[-1] + costs[extent])
            starts.append(extent.offset - self._holes.before(extent.offset))
            ends.append(extent.end + self._holes.after(extent.end))
        best: tuple[float, int] | None = None  # cost, and bytes that would be left over
        window = (0, 0)
        first = 0
        for last, end in enumerate(ends):
            if last and ends[last - 1] < ordered[last].offset:  # something that must stay lies between
                first = last
            while first < last and end - starts[first + 1] >= need:
                first += 1
            leftover = end - starts[first] - need
            found = (total[last + 1] - total[first], leftover)
            if leftover >= 0 and (best is None or found < best):
                best, window = found, (first, last + 1)
        return None if best is None else ordered[window[0] : window[1]]

    def check_integrity(self) -> None:
        """Raise CacheCorruption unless held extents and holes tile the memory and every index agrees. O(n log n)."""
        holes: dict[int, int] = {}
        opened: dict[int, int] = {}  # start → size of maximal runs of what is not fixed
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
                    f"{size} bytes are held at {offset}: the one before ends at {last_end}, the memory at {self.size}, "
                    f"the alignment is {self.alignment}"
                )
            free_up_to(offset)
            last_end = offset + size
            if offset not in self._evictable:
                run_up_to(offset)
                run_start = last_end
        free_up_to(self.size)
        run_up_to(self.size)
        self._holes.check_integrity(holes, "the holes")
        self._open.check_integrity(opened, "what may be evicted")
        if self._ends != {offset + size: offset for offset, size in self._held.items()}:
            raise CacheCorruption("held extents by their ends are not the held extents")
        if not self._evictable <= self._held.keys():
            raise CacheCorruption(f"evictable, but not held: {sorted(self._evictable - self._held.keys())}")
        if sum(self._held.values()) != self.used:
            raise CacheCorruption(f"{sum(self._held.values())} bytes are held, {self.used} were counted")

    def _surroundings(
        self, need: int, evictable: Mapping[Extent, float], seeds: Iterable[Extent]
    ) -> dict[Extent, float]:
        """The seeds and what can be freed next to them, `need` bytes to either side, with their costs."""
        near: dict[Extent, float] = {}

        def take(extent: Extent) -> bool:
            if extent in near:
                return True
            cost = evictable.get(extent)
            if cost is not None:
                near[extent] = cost
            return cost is not None

        for seed in seeds:
            if not take(seed):
                continue
            end = seed.offset - self._holes.before(seed.offset)
            while end > max(0, seed.end - need):
                extent = Extent(self._ends[end], end - self._ends[end])
                if not take(extent):
                    break
                end = extent.offset - self._holes.before(extent.offset)
            start = seed.end + self._holes.after(seed.end)
            while start < min(self.size, seed.offset + need):
                extent = Extent(start, self._held[start])
                if not take(extent):
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

    def _resize(self, extent: Extent, size: int) -> Extent:
        self._release(extent)
        resized = Extent(extent.offset, size)
        self._hold(resized)
        return resized
