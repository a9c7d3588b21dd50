"""Signals that wait for the beginning of their sequence, and what of them counts against the footprint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.engine.commands import Cancel, LanesLost
from tests.properties import examples
from tests.unit.engine.worlds import GRANULE_BYTES, LIMITS, MAX_TOKENS, World, history, world


def stopped() -> float:
    """A clock by which the device takes no time, so that no job is late by chance."""
    return 0.0


# ---- signals that wait for the beginning of their sequence ----


def longer_signal_waits(w: World, life: float = 2.0) -> None:
    w.signal("short", 1, 100)
    w.signal("long", 1, 150, life=life)
    assert "long" in w.scheduler.pins


def test_a_waiting_signal_is_in_the_books_from_when_it_was_read() -> None:
    """The trigger counts a signal as read, not as on its way, once the worker's position is past it."""
    with world() as w:
        longer_signal_waits(w)
        assert w.scheduler.pins.lane_bytes(1) == (2 + 3) * GRANULE_BYTES
        w.settle()
        assert w.scheduler.pins.lane_bytes(1) == (2 + 3) * GRANULE_BYTES
        w.rank("long", 1, 150)
        w.settle()
        assert w.outcome("long") in ("hbm", "joined")


def test_a_waiting_signal_ends_with_its_lane() -> None:
    with world() as w:
        longer_signal_waits(w)
        w.handle(LanesLost(frozenset([1])))
        w.settle()
        assert len(w.scheduler.pins) == 0
        assert w.scheduler.signals.counters.signal_extended <= 1


def test_a_waiting_signal_ends_with_its_life_window() -> None:
    with world() as w:
        longer_signal_waits(w, life=0.5)
        w.now += 0.6
        w.settle()
        assert "long" not in w.scheduler.pins
        assert "short" in w.scheduler.pins
        assert len(w.cache.find("u1", history(1, 150))[0].tokens) == 100  # type: ignore[union-attr]


def test_a_waiting_signal_ends_with_its_ranking() -> None:
    with world() as w:
        longer_signal_waits(w)
        w.rank("long", 1, 150, timeout=0.0)
        w.settle()
        assert "long" not in w.scheduler.pins


def test_the_same_waiting_signal_twice_is_a_duplicate() -> None:
    with world() as w:
        longer_signal_waits(w)
        w.signal("long", 1, 150)
        assert w.scheduler.signals.counters.signal_duplicate == 1


# ---- signals of requests that their client cancels ----


def test_a_cancel_ends_the_pin_and_the_job_at_once() -> None:
    with world(clock=stopped) as w:
        w.signal("kept", 1, 150)
        w.signal("gone", 2, 150)
        w.step()
        w.handle(Cancel("gone"))
        assert w.scheduler.pins.lane_bytes(2) == 0
        assert w.cache.pinned_bytes == w.scheduler.pins.lane_bytes(1) == 3 * GRANULE_BYTES
        assert w.scheduler.backlog == 1
        assert ended(w) == {"job_cancelled": 1}
        w.settle()
        assert ended(w) == {"job_cancelled": 1, "job_finished": 1}


def test_a_job_that_another_request_needs_goes_on() -> None:
    with world(clock=stopped) as w:
        w.signal("gone", 1, 150)
        w.signal("needs it", 1, 150)
        w.signal("also gone", 2, 150)
        w.rank("waits for it", 2, 150)
        w.handle(Cancel("gone"))
        w.handle(Cancel("also gone"))
        w.settle()
        assert ended(w) == {"job_finished": 2, "job_joined": 1}
        assert w.outcome("waits for it") == "joined"
        w.rank("needs it", 1, 150)
        w.settle()
        assert w.outcome("needs it") == "hbm"


def test_a_job_is_due_when_the_first_of_its_requests_is() -> None:
    """It stayed at the time of the request that it was started for."""
    with world(clock=stopped) as w:
        w.signal("later", 1, 150)
        w.now -= 0.05
        w.signal("first", 2, 150)
        w.now -= 0.05
        w.signal("soon", 1, 150)
        assert w.scheduler.backlog == 2
        w.now += 0.1
        while w.scheduler.backlog == 2:
            w.step()
        w.rank("soon", 1, 150)
        w.settle()
        assert w.outcome("soon") == "hbm", "user 1 was served before user 2"
        assert ended(w)["job_finished"] == 2


def test_a_signal_behind_its_cancel_pins_nothing() -> None:
    with world() as w:
        w.handle(Cancel("r"))
        w.signal("r", 1, 60)
        assert w.cache.pinned_bytes == 0
        assert w.scheduler.backlog == 0


def test_a_waiting_signal_ends_with_its_cancel() -> None:
    with world() as w:
        longer_signal_waits(w)
        w.handle(Cancel("long"))
        w.settle()
        assert "long" not in w.scheduler.pins
        assert "short" in w.scheduler.pins


def test_a_ranking_behind_its_cancel_is_answered() -> None:
    with world() as w:
        w.signal("idle", 1, 60)
        w.settle()
        w.signal("cut short", 2, 150)
        w.step()
        for request, user, length in (("idle", 1, 60), ("cut short", 2, 150)):
            w.handle(Cancel(request))
            w.rank(request, user, length)
        w.settle()
        assert w.outcome("idle") == "hbm"  # it was not evicted meanwhile
        assert w.answer("cut short").status == "ok"


def test_a_cancel_of_another_tenants_request_does_nothing() -> None:
    with world() as w:
        w.signal("r", 1, 60, tenant="shop")
        w.handle(Cancel("r"))
        assert len(w.scheduler.pins) == 1


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
        assert w.scheduler.signals.counters.signal_over_footprint == 1


def test_a_signal_for_what_is_held_anyway_is_never_over_the_footprint() -> None:
    with world() as w:
        w.signal("a", 1, MAX_TOKENS)
        w.signal("b", 2, MAX_TOKENS)
        w.signal("c", 1, MAX_TOKENS)
        assert w.scheduler.signals.counters.signal_over_footprint == 0
        assert len(w.scheduler.pins) == 3


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("signal"), st.integers(0, 5), st.integers(1, MAX_TOKENS)),
            st.tuples(st.just("rank"), st.integers(0, 5), st.integers(1, MAX_TOKENS)),
            st.tuples(st.just("lose a lane"), st.integers(0, 3), st.just(0)),
            st.tuples(st.just("work"), st.integers(1, 8), st.just(0)),
        ),
        max_size=40,
    )
)
@settings(max_examples=examples(60))
def test_pins_never_exceed_the_room_whatever_signals_come(
    what: list[tuple[str, int, int]],
) -> None:
    """Triggers that know nothing of each other may each send what fits."""
    with world(hbm=24) as w:
        signalled = []
        for number, (name, first, tokens) in enumerate(what):
            if name == "signal":
                w.signal(f"s{number}", first, tokens, lane=first % 4)
                signalled.append(f"s{number}")
            elif name == "rank":
                w.rank(f"r{number}", first, tokens)
            elif name == "work":
                for _ in range(first):
                    w.step()
            else:
                w.handle(LanesLost(frozenset([first])))
            entries = {entry for each in signalled if (entry := w.scheduler.pins.entry(each)) is not None}
            assert sum(map(w.cache.entry_bytes, entries)) <= w.limits.pinned_bytes
        w.settle()


# ---- how pre-inference ended, as metrics tell it ----


def ended(w: World) -> dict[str, int]:
    """Jobs for admitted requests by how they ended."""
    return {name: round(total) for name, total in w.scheduler.totals().items() if name.startswith("job_") and total}


def test_in_time_late_and_unwanted_pre_inference_are_told_apart() -> None:
    """A ranking is expected 0.1 s behind its signal."""
    with world(clock=stopped) as w:
        w.signal("in time", 1, 60)
        w.settle()
        assert ended(w) == {"job_finished": 1}
        w.signal("late", 2, 60)
        w.now += 0.2
        w.settle()
        assert ended(w) == {"job_finished": 1, "job_late": 1}
        w.signal("unwanted", 3, 60)
        w.handle(LanesLost(frozenset([3])))
        w.settle()
        assert ended(w) == {"job_finished": 1, "job_late": 1, "job_starved": 1}
        w.signal("joined", 0, 60)
        w.rank("joined", 0, 60)
        w.settle()
        assert ended(w) == {"job_finished": 2, "job_late": 1, "job_starved": 1, "job_joined": 1}


def expired(w: World) -> None:
    w.now += 0.6


def lane_lost(w: World) -> None:
    w.handle(LanesLost(frozenset([1])))


def ranking_refused(w: World) -> None:
    w.rank("unwanted", 1, 150, timeout=0.0)


@pytest.mark.parametrize("end", [expired, lane_lost, ranking_refused])
def test_a_job_nobody_wants_holds_no_memory_while_the_device_is_busy(end: Callable[[World], None]) -> None:
    with world(clock=stopped) as w:
        w.signal("unwanted", 1, 150, life=0.5)
        for number in range(9):
            w.rank(f"busy {number}", 2, 60, timeout=9.0)
        end(w)
        w.step()
        assert len(w.scheduler.rankings)
        assert w.cache.find("u1", history(1, 150))[0] is None
        assert ended(w) == {"job_starved": 1}


def test_a_ranking_waits_for_the_slice_that_runs_however_many_signals_came() -> None:
    """Who writes `pre-infer` decides how many that are: no trigger's budget binds it."""
    with world(hbm=40, limits=replace(LIMITS, pinned_bytes=30 * GRANULE_BYTES)) as w:
        w.signal("mine", 1, 64)
        w.settle()
        for user in range(2, 12):
            w.signal(f"r{user}", user, MAX_TOKENS)
        w.step()  # a slice of one of theirs
        w.rank("mine", 1, 64)
        w.step()
        assert w.outcome("mine") == "hbm"
        assert w.scheduler.signals.counters.signal_computed > 2
        w.settle()
