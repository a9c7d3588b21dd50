"""Items by time against a sorted list, and that what is over does not pile up."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.engine.queue import SPARE, TimerHeap
from tests.properties import examples


@dataclass(eq=False)
class Item:
    at: float
    over: bool = False


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.sampled_from(["add", "add", "end", "first", "pop"]), st.integers(0, 9)), max_size=120))
def test_earliest_first_and_only_what_is_not_over(moves: list[tuple[str, int]]) -> None:
    agenda: TimerHeap[Item] = TimerHeap(lambda item: item.over)
    kept: list[Item] = []  # in the order they came; sorted() is stable, so ties go to who came first
    for move, number in moves:
        if move == "add":
            kept.append(Item(float(number)))
            agenda.add(float(number), kept[-1])
        elif move == "end" and kept:
            kept.pop(number % len(kept)).over = True
        ordered = sorted(kept, key=lambda item: item.at)
        first = agenda.first()
        assert first == ((ordered[0].at, ordered[0]) if ordered else None)
        assert set(agenda) == set(kept)
        if move == "pop" and ordered:
            agenda.pop()
            kept.remove(ordered[0])


def test_what_is_over_is_dropped_long_before_its_time() -> None:
    agenda: TimerHeap[Item] = TimerHeap(lambda item: item.over)
    agenda.add(0.0, Item(0.0))  # stays, and hides everything behind it
    most = 0
    for number in range(10_000):
        item = Item(1e9 + number)
        agenda.add(item.at, item)
        item.over = True
        most = max(most, len(agenda))
    assert most <= 2 * SPARE
