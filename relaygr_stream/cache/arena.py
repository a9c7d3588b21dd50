"""Bookkeeping of one contiguous memory: which byte ranges are held, which are holes. Knows no tensors and no entries.

Best fit over holes ordered by size, coalescing at once, and the search for the cheapest contiguous window to evict,
without which mixed lengths would leave much of the memory in holes too small to use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from sortedcontainers import SortedList

from relaygr_stream.errors import CacheCorruption


@dataclass(frozen=True, slots=True)
class Extent:
    """A held byte range; offset and size are multiples of the arena's alignment."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """First byte behind the extent."""
        return self.offset + self.size


class Arena:
    """`size` bytes (rounded down to the alignment), all one hole at first. Not thread-safe.

    Every operation on one extent is O(log n) in the number of holes; sizes asked for are rounded up to the alignment.
    """

    def __init__(self, size: int, alignment: int) -> None:
        if size < 0 or alignment < 1:
            raise ValueError(f"an arena needs size ≥ 0 and alignment ≥ 1, got {size} and {alignment}")
        self.alignment = alignment
        self.size = size // alignment * alignment
        self.used = 0
        self._held: dict[int, int] = {}  # offset → size
        self._holes: dict[int, int] = {}  # offset → size
        self._starts: dict[int, int] = {}  # end → offset, of held ranges and holes alike
        self._by_size: SortedList[tuple[int, int]] = SortedList()  # (size, offset) of the holes
        if self.size:
            self._add_hole(0, self.size)

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
        return self._by_size[-1][0] if self._by_size else 0

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
        """Hold the smallest hole's first `nbytes` that fit, lowest address first; None when no hole is large enough."""
        size = self.round_up(nbytes)
        hole = next(self._by_size.irange((size, 0)), None)
        if hole is None:
            return None
        hole_size, offset = hole
        self._remove_hole(offset)
        if hole_size > size:
            self._add_hole(offset + size, hole_size - size)
        self._hold(offset, size)
        return Extent(offset, size)

    def free(self, extent: Extent) -> None:
        """Give the extent back, joined with the holes beside it. ValueError if it is not held (a double free)."""
        self._release(extent)
        offset, end = extent.offset, extent.end
        before = self._hole_before(offset)
        if before:
            self._remove_hole(offset - before)
        after = self._holes.get(end, 0)
        if after:
            self._remove_hole(end)
        self._add_hole(offset - before, before + extent.size + after)

    def grow(self, extent: Extent, nbytes: int) -> Extent | None:
        """Enlarge to `nbytes` in place, into the hole behind; None, and nothing changed, when that is too small."""
        self._check_held(extent)
        size = self.round_up(nbytes)
        more = size - extent.size
        if more < 0:
            raise ValueError(f"cannot grow {extent} to {nbytes} bytes; use shrink")
        if more == 0:
            return extent
        after = self._holes.get(extent.end, 0)
        if after < more:
            return None
        self._remove_hole(extent.end)
        self._release(extent)
        self._hold(extent.offset, size)
        if after > more:
            self._add_hole(extent.offset + size, after - more)
        return Extent(extent.offset, size)

    def shrink(self, extent: Extent, nbytes: int) -> Extent:
        """Keep the first `nbytes`, the rest becomes free. ValueError if that would be more than it has."""
        self._check_held(extent)
        size = self.round_up(nbytes)
        if size > extent.size:
            raise ValueError(f"cannot shrink {extent} to {nbytes} bytes; use grow")
        if size == extent.size:
            return extent
        self._release(extent)
        kept = Extent(extent.offset, size)
        self._hold(kept.offset, size)
        after = self._holes.get(extent.end, 0)
        if after:
            self._remove_hole(extent.end)
        self._add_hole(kept.end, extent.size - size + after)
        return kept

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
        candidates = evictable if seeds is None else self._surroundings(need, evictable, seeds)
        ordered = sorted(candidates, key=lambda extent: extent.offset)
        total = [0.0]  # total[i]: cost of the first i
        starts, ends = [], []  # where the free range would start and end if only this one were freed
        for extent in ordered:
            self._check_held(extent)
            total.append(total[-1] + evictable[extent])
            starts.append(extent.offset - self._hole_before(extent.offset))
            ends.append(extent.end + self._holes.get(extent.end, 0))
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

    def beside_largest_holes(self, count: int) -> Iterator[Extent]:
        """The held neighbours of the `count` largest holes: good seeds for `cheapest_window`."""
        for hole_size, offset in islice(reversed(self._by_size), count):
            if offset:
                start = self._starts[offset]
                yield Extent(start, offset - start)
            end = offset + hole_size
            if end < self.size:
                yield Extent(end, self._held[end])

    def check_integrity(self) -> None:
        """Raise CacheCorruption unless held ranges and holes tile the memory and every index agrees. O(n log n)."""
        offset, used, blocks, last_was_hole = 0, 0, 0, False
        while offset < self.size:
            held, hole = self._held.get(offset), self._holes.get(offset)
            if (held is None) == (hole is None):
                raise CacheCorruption(f"offset {offset} is {'nobody' if held is None else 'held and free'}'s")
            size = held or hole or 0
            if size < 1 or size % self.alignment:
                raise CacheCorruption(f"the range at {offset} has {size} bytes, alignment is {self.alignment}")
            if hole is not None and last_was_hole:
                raise CacheCorruption(f"the hole at {offset} was not joined with the one before it")
            if self._starts.get(offset + size) != offset:
                raise CacheCorruption(f"the range at {offset} is not found by its end {offset + size}")
            used += held or 0
            blocks += 1
            offset += size
            last_was_hole = hole is not None
        if offset != self.size:
            raise CacheCorruption(f"the last range ends at {offset}, the memory at {self.size}")
        if blocks != len(self._held) + len(self._holes) or blocks != len(self._starts):
            raise CacheCorruption(
                f"{blocks} ranges tile the memory, but {len(self._held)} held, {len(self._holes)} holes and "
                f"{len(self._starts)} ends are known"
            )
        if used != self.used:
            raise CacheCorruption(f"{used} bytes are held, {self.used} were counted")
        if list(self._by_size) != sorted((size, start) for start, size in self._holes.items()):
            raise CacheCorruption("the holes ordered by size are not the holes by address")

    def _surroundings(self, need: int, evictable: Mapping[Extent, float], seeds: Iterable[Extent]) -> set[Extent]:
        """The seeds and what can be freed next to them, `need` bytes to either side."""
        near: set[Extent] = set()
        for seed in seeds:
            if evictable.get(seed) is None:
                continue
            near.add(seed)
            offset = seed.offset - self._hole_before(seed.offset)
            while offset > max(0, seed.end - need):
                start = self._starts[offset]
                extent = Extent(start, offset - start)
                if evictable.get(extent) is None:
                    break
                near.add(extent)
                offset = start - self._hole_before(start)
            offset = seed.end + self._holes.get(seed.end, 0)
            while offset < min(self.size, seed.offset + need):
                extent = Extent(offset, self._held[offset])
                if evictable.get(extent) is None:
                    break
                near.add(extent)
                offset = extent.end + self._holes.get(extent.end, 0)
        return near

    def _hole_before(self, offset: int) -> int:
        """Size of the hole that ends at `offset`, 0 when there is none."""
        return self._holes.get(self._starts.get(offset, -1), 0)

    def _check_held(self, extent: Extent) -> None:
        if extent not in self:
            raise ValueError(f"{extent} is not held by this arena of {self.size} bytes (freed already?)")

    def _hold(self, offset: int, size: int) -> None:
        self._held[offset] = size
        self._starts[offset + size] = offset
        self.used += size

    def _release(self, extent: Extent) -> None:
        self._check_held(extent)
        del self._held[extent.offset], self._starts[extent.end]
        self.used -= extent.size

    def _add_hole(self, offset: int, size: int) -> None:
        self._holes[offset] = size
        self._starts[offset + size] = offset
        self._by_size.add((size, offset))

    def _remove_hole(self, offset: int) -> None:
        size = self._holes.pop(offset)
        del self._starts[offset + size]
        self._by_size.remove((size, offset))
