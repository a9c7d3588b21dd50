"""The arena against a model that is too simple to be wrong: one owner per unit of memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sortedcontainers import SortedList

from relaygr_stream.cache.arena import Arena, Extent, Runs
from relaygr_stream.errors import CacheCorruption
from tests.properties import examples

UNIT = 16
UNITS = 40


class ArenaAgainstModel(RuleBasedStateMachine):
    """`owner[i]` is who holds unit i, 0 for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(UNITS * UNIT + 5, UNIT)
        self.owner = [0] * UNITS
        self.held: dict[int, Extent] = {}
        self.evictable: set[int] = set()
        self.names = itertools.count(1)

    def holes(self, gone: Collection[int] = ()) -> list[tuple[int, int]]:
        """(size, offset) in bytes, as if what is named `gone` were freed."""
        found, offset = [], 0
        for free, run in itertools.groupby(owner == 0 or owner in gone for owner in self.owner):
            size = len(list(run)) * UNIT
            if free:
                found.append((size, offset))
            offset += size
        return found

    def mark(self, extent: Extent, owner: int) -> None:
        for unit in range(extent.offset // UNIT, extent.end // UNIT):
            self.owner[unit] = owner

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.held)), label="who")

    @rule(nbytes=st.integers(1, UNITS * UNIT // 3))
    def allocate(self, nbytes: int) -> None:
        size = -(-nbytes // UNIT) * UNIT
        fitting = [hole for hole in self.holes() if hole[0] >= size]
        extent = self.arena.allocate(nbytes)
        if not fitting:
            assert extent is None
            return
        assert extent == Extent(min(fitting)[1], size)
        name = next(self.names)
        self.held[name] = extent
        self.mark(extent, name)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = self.pick(data)
        extent = self.held.pop(name)
        self.evictable.discard(name)
        self.mark(extent, 0)
        self.arena.free(extent)
        with pytest.raises(ValueError, match="not held"):
            self.arena.free(extent)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), evictable=st.booleans())
    def set_evictable(self, data: st.DataObject, evictable: bool) -> None:
        name = self.pick(data)
        self.arena.set_evictable(self.held[name], evictable)
        (self.evictable.add if evictable else self.evictable.discard)(name)

    @rule(data=st.data(), nbytes=st.integers(1, UNITS * UNIT))
    def search_window(self, data: st.DataObject, nbytes: int) -> None:
        evictable = {
            extent: float(data.draw(st.integers(0, 9), label="cost"))
            for extent in self.held.values()
            if data.draw(st.booleans(), label="evictable")
        }
        window = self.arena.cheapest_window(nbytes, evictable)
        expected = self.cheapest_by_trying_all(-(-nbytes // UNIT) * UNIT, evictable)
        from_seeds = self.arena.cheapest_window(nbytes, evictable, seeds=evictable)
        assert from_seeds == window
        if expected is None:
            assert window is None
            return
        assert window is not None
        assert sum(evictable[extent] for extent in window) == expected
        assert self.freed_hole(window) >= nbytes

    def cheapest_by_trying_all(self, size: int, evictable: dict[Extent, float]) -> float | None:
        if any(hole >= size for hole, _ in self.holes()):
            return 0.0
        ordered = sorted(evictable, key=lambda extent: extent.offset)
        costs = [
            sum(evictable[extent] for extent in ordered[i:j])
            for i, j in itertools.combinations(range(len(ordered) + 1), 2)
            if self.freed_hole(ordered[i:j]) >= size
        ]
        return min(costs, default=None)

    def freed_hole(self, window: list[Extent]) -> int:
        """Largest hole, in bytes, once the extents are freed."""
        owner = list(self.owner)
        for extent in window:
            owner[extent.offset // UNIT : extent.end // UNIT] = [0] * (extent.size // UNIT)
        runs = [len(list(run)) for who, run in itertools.groupby(owner) if who == 0]
        return max(runs, default=0) * UNIT

    @invariant()
    def agrees(self) -> None:
        self.arena.check_integrity()
        holes = self.holes()
        free = sum(size for size, _ in holes)
        largest = max((size for size, _ in holes), default=0)
        assert self.arena.size == UNITS * UNIT
        assert self.arena.free_bytes == free
        assert self.arena.used == UNITS * UNIT - free
        assert self.arena.largest_hole == largest
        assert len(self.arena) == len(self.held)
        assert all(extent in self.arena for extent in self.held.values())
        runs = self.holes(self.evictable)
        assert self.arena.largest_open == max((size for size, _ in runs), default=0)
        for name, extent in self.held.items():
            around = [size for size, offset in runs if offset <= extent.offset < offset + size]
            assert self.arena.open_run(extent) == (around[0] if name in self.evictable else 0)
        firsts = [
            min((extent for extent in self.held.values() if offset <= extent.offset < offset + size), default=None)
            for size, offset in sorted(runs)
            if size >= 3 * UNIT
        ]
        expected = [first for first in firsts if first is not None]
        assert list(self.arena.starts_of_open_runs(3 * UNIT, UNITS)) == expected


TestArenaAgainstModel = ArenaAgainstModel.TestCase
TestArenaAgainstModel.settings = settings(max_examples=examples(60), stateful_step_count=40)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30), order=st.randoms(use_true_random=False))
def test_whatever_is_freed_in_any_order_is_one_hole_again(sizes: list[int], order: object) -> None:
    arena = Arena(4096, 8)
    extents = [extent for size in sizes if (extent := arena.allocate(size))]
    order.shuffle(extents)  # type: ignore[attr-defined]
    for extent in extents:
        arena.free(extent)
    assert (arena.used, arena.largest_hole) == (0, 4096)
    arena.check_integrity()


def test_empty_arena_holds_nothing() -> None:
    arena = Arena(7, 8)
    assert arena.allocate(1) is None
    assert arena.cheapest_window(1, {}) is None
    assert (arena.size, arena.largest_hole) == (0, 0)
    arena.check_integrity()


def test_foreign_extents_are_refused() -> None:
    arena = Arena(64, 8)
    held = arena.allocate(16)
    assert held is not None
    for foreign in (Extent(8, 8), Extent(0, 8), Extent(16, 16)):
        with pytest.raises(ValueError, match=r"not held"):
            arena.free(foreign)
        with pytest.raises(ValueError, match=r"not held"):
            arena.cheapest_window(64, {foreign: 1.0})
    arena.check_integrity()
    assert arena.used == 16


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_cannot_be_allocated(nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Arena(64, 8).allocate(nbytes)


def test_window_search_does_not_cross_what_must_stay() -> None:
    arena = Arena(40, 8)
    first, pinned, third, fourth, fifth = [arena.allocate(8) for _ in range(5)]
    assert first and pinned and third and fourth and fifth
    costs = {first: 0.0, third: 5.0, fourth: 1.0, fifth: 1.0}
    assert arena.cheapest_window(16, costs) == [fourth, fifth]
    assert arena.cheapest_window(24, costs) == [third, fourth, fifth]
    assert arena.cheapest_window(32, costs) is None
    assert arena.cheapest_window(16, costs, seeds=[first, pinned]) is None
    assert arena.cheapest_window(16, costs, seeds=[third]) == [third, fourth]


def four_extents() -> Arena:
    """Of the first four, the second was freed and the third may be evicted."""
    arena = Arena(64, 8)
    first, second, third, fourth = [arena.allocate(8) for _ in range(4)]
    assert first and second and third and fourth
    arena.free(second)
    arena.set_evictable(third, True)
    return arena


def damages(book: Any) -> dict[str, Callable[[Any], object]]:
    """What can become of a book of the arena: each gives the damaged book."""
    match book:
        case int():
            return {"counts more": lambda count: count + 8}
        case dict():
            one = min(book)
            return {
                "loses one": lambda held: {key: held[key] for key in held if key != one},
                "has one more": lambda held: {**held, 8: 8, 16: 8},
                "has one beyond the end": lambda held: {**held, 128: 8},
                "has one between": lambda held: {**held, 3: 1},
                "has a larger one": lambda held: {**held, one: held[one] + 8},
                "has one of an odd size": lambda held: {**held, one: held[one] + 4},
            }
        case set():
            return {
                "loses all": lambda _: set(),
                "has a fixed one": lambda had: had | {0},
                "has a hole": lambda had: had | {8},
            }
        case SortedList():
            return {"loses all": lambda _: SortedList(), "has one twice": lambda had: SortedList([*had, had[0]])}
    assert isinstance(book, Runs), f"what may become of {book!r}?"
    return {"loses a run": lambda runs: runs.remove(8, 8) or runs, "has one more": lambda runs: runs.add(24, 8) or runs}


def broken_arenas() -> Iterator[tuple[str, str, str]]:
    """All that an arena keeps, directly or in its sets of runs, and what becomes of it."""
    arena = four_extents()
    for name, book in vars(arena).items():
        yield from (("", name, how) for how in damages(book))
        if isinstance(book, Runs):
            yield from ((name, inner, how) for inner, index in vars(book).items() for how in damages(index))


@pytest.mark.parametrize(("runs", "name", "how"), list(broken_arenas()))
def test_damage_to_any_book_is_found(runs: str, name: str, how: str) -> None:
    arena = four_extents()
    arena.check_integrity()
    owner = getattr(arena, runs) if runs else arena
    book = getattr(owner, name)
    setattr(owner, name, damages(book)[how](book))
    with pytest.raises(CacheCorruption):
        arena.check_integrity()


def test_a_range_that_is_not_there_cannot_be_taken_out() -> None:
    runs = Runs()
    runs.add(0, 8)
    runs.add(16, 8)
    for offset, size in ((8, 8), (4, 8), (0, 16), (24, 1)):
        with pytest.raises(CacheCorruption, match="not all in one run"):
            runs.remove(offset, size)
    assert runs.sizes == {0: 8, 16: 8}
