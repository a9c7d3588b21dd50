"""Signals that wait for the beginning of their sequence, and what of them counts against the footprint."""

from __future__ import annotations

from tests.unit.worker.worlds import GRANULE_BYTES, MAX_TOKENS, World, history, world

# ---- signals that wait for the beginning of their sequence ----


def longer_signal_waits(w: World, life: float = 2.0) -> None:
    w.signal("short", 1, 100)
    w.signal("long", 1, 150, life=life)
    assert "long" in w.core.pins


def test_a_waiting_signal_is_in_the_books_from_when_it_was_read() -> None:
    """The trigger counts a signal as read, not as on its way, once the worker's position is past it."""
    with world() as w:
        longer_signal_waits(w)
        assert w.core.pins.lane_bytes(1) == (2 + 3) * GRANULE_BYTES
        w.settle()
        assert w.core.pins.lane_bytes(1) == (2 + 3) * GRANULE_BYTES
        w.rank("long", 1, 150)
        w.settle()
        assert w.outcome("long") in ("hbm", "joined")


def test_a_waiting_signal_ends_with_its_lane() -> None:
    with world() as w:
        longer_signal_waits(w)
        w.core.lanes_lost([1])
        w.settle()
        assert len(w.core.pins) == 0
        assert w.core.signals.counters.signal_extended <= 1


def test_a_waiting_signal_ends_with_its_life_window() -> None:
    with world() as w:
        longer_signal_waits(w, life=0.5)
        w.now += 0.6
        w.settle()
        assert "long" not in w.core.pins
        assert "short" in w.core.pins
        assert len(w.cache.find("u1", history(1, 150))[0].tokens) == 100  # type: ignore[union-attr]


def test_a_waiting_signal_ends_with_its_ranking() -> None:
    with world() as w:
        longer_signal_waits(w)
        w.rank("long", 1, 150, timeout=0.0)
        w.settle()
        assert "long" not in w.core.pins


def test_the_same_waiting_signal_twice_is_a_duplicate() -> None:
    with world() as w:
        longer_signal_waits(w)
        w.signal("long", 1, 150)
        assert w.core.signals.counters.signal_duplicate == 1


# ---- the footprint ----


def test_a_short_signal_on_a_long_entry_counts_what_the_entry_takes() -> None:
    """Seven granules fit beside the scratch region; the pinned share is six."""
    with world(hbm=12) as w:
        for user in (1, 2, 3):
            w.rank(f"r{user}", user, MAX_TOKENS)
            w.settle()
        for user in (1, 2, 3):
            w.signal(f"s{user}", user, 10)  # one granule would do, three are held
        assert w.cache.pinned_bytes == 6 * GRANULE_BYTES
        assert w.core.signals.counters.signal_over_footprint == 1


def test_a_signal_for_what_is_held_anyway_is_never_over_the_footprint() -> None:
    with world() as w:
        w.signal("a", 1, MAX_TOKENS)
        w.signal("b", 2, MAX_TOKENS)
        w.signal("c", 1, MAX_TOKENS)
        assert w.core.signals.counters.signal_over_footprint == 0
        assert len(w.core.pins) == 3
