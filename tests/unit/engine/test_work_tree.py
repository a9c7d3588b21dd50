"""Predicted work by deadline: the tree answers what a walk over all rankings would, in logarithmic time."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.engine.work_tree import WorkTree

ITEMS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), min_size=1, max_size=60)


def made(items: list[tuple[int, int]]) -> WorkTree[int]:
    tree: WorkTree[int] = WorkTree()
    for number, (deadline, work) in enumerate(items):
        tree.add((deadline / 1e3, number), float(work), number)
    return tree


@given(items=ITEMS, gone=st.sets(st.integers(0, 59)), changed=st.dictionaries(st.integers(0, 59), st.integers(0, 12)),
       after=st.integers(-1, 60), low=st.integers(-100, 60), width=st.integers(0, 20))  # fmt: skip
def test_it_answers_what_a_walk_over_all_items_would(
    items: list[tuple[int, int]], gone: set[int], changed: dict[int, int], after: int, low: int, width: int
) -> None:
    tree = made(items)
    for number, work in changed.items():
        if number < len(items):
            tree.change((items[number][0] / 1e3, number), float(work))
    for number in gone & set(range(len(items))):
        tree.remove((items[number][0] / 1e3, number))
    left = sorted(
        (deadline, number, changed.get(number, work))
        for number, (deadline, work) in enumerate(items)
        if number not in gone
    )
    assert bool(tree) is bool(left)
    assert tree.total_ms == sum(work for *_, work in left)
    assert tree.until(after / 1e3) == sum(work for deadline, _, work in left if deadline <= after)
    assert list(tree.backwards(after / 1e3)) == [number for deadline, number, _ in left[::-1] if deadline <= after]
    found, before = None, 0
    for deadline, _, work in left:
        before += work
        if found is None and deadline > after and low <= deadline - before < low + width:
            found = deadline
    # Deadlines are thousandths of floats: a half keeps the bounds off what is compared with them.
    answer = tree.first_within(after / 1e3, low - 0.5, low + width - 0.5)
    assert answer == (None if found is None else found / 1e3)


def lines(call: Callable[[], object]) -> int:
    """Lines of Python that a call executes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("what", ["add", "remove", "change", "until", "first_within"])
def test_ten_times_as_many_items_take_hardly_longer(what: str) -> None:
    """From 200 to 2,000 items the depth grows by half; a walk over all would take ten times as long."""

    def mean(n: int) -> float:
        rng = random.Random(n)
        # Some are late, most have time to spare, as under overload.
        tree = made([(rng.randrange(40, 4 * n), rng.randrange(6)) for _ in range(n)])
        total = 0
        for number in range(n, n + 40):
            key = (rng.randrange(4 * n) / 1e3, number)
            if what != "add":
                tree.add(key, 3.0, number)
            calls: dict[str, Callable[[], object]] = {
                "add": partial(tree.add, key, 3.0, number),
                "remove": partial(tree.remove, key),
                "change": partial(tree.change, key, 1.0),
                "until": partial(tree.until, key[0]),
                "first_within": partial(tree.first_within, key[0], 0.0, 1e-9),
            }
            total += lines(calls[what])
        return total / 40

    few, many = mean(200), mean(2000)
    assert many < 2.5 * few, (few, many)
