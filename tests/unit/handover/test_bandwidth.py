"""The bound on bytes per second, and what copies take beside rankings, at times that the test gives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.handover import pace
from relaygr_stream.handover.pace import BURST_S, PATIENCE_S, SHARE, Bandwidth
from relaygr_stream.handover.tls import LOOK_S


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 5)), min_size=1, max_size=50),
    st.integers(1, 1000),
    st.integers(0, 2000),
)
def test_never_more_than_the_burst_and_the_rate(takes: list[tuple[int, float]], rate: int, burst: int) -> None:
    start = now = 50.0
    bandwidth, gone = Bandwidth(rate, burst, now), 0
    for nbytes, pause in takes:
        now += pause
        now += bandwidth.take(nbytes, now)
        gone += nbytes
        assert gone <= burst + (now - start) * rate + 1e-6


def test_without_pauses_it_is_used_in_full() -> None:
    now = 50.0
    bandwidth = Bandwidth(100, 50, now)
    for _ in range(35):
        now += bandwidth.take(10, now)
    assert abs(now - 50.0 - (350 - 50) / 100) < 1e-9


def test_a_pause_saves_up_no_more_than_the_burst() -> None:
    bandwidth = Bandwidth(100, 50, 50.0)
    assert abs(bandwidth.take(150, 1050.0) - 1.0) < 1e-9


@pytest.mark.parametrize("slice_s", [1e-4, 1e-3, 0.05])
@pytest.mark.parametrize("bound", [0.0, 1e6])
def test_copies_take_a_twentieth_of_a_processor_while_it_computes(
    slice_s: float, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, device = [50.0], SimpleNamespace(works=True)
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made = pace.CopyPace(device, bound, slice_bytes=1000)

    def copy(slices: int) -> float:
        start = now[0]
        for _ in range(slices):
            now[0] += made.wait_s(1000) + slice_s
            made.spent(slice_s)
        return slices * slice_s / (now[0] - start)

    copy(100)  # what a pause saved up
    assert copy(100) <= pace.SHARE * 1.001
    device.works = False
    assert copy(100) >= min(1.0, bound * slice_s / 1000 or 1.0) * 0.9, "as fast as the wire, or the bound"
    device.works = True
    copy(100)
    assert copy(100) <= pace.SHARE * 1.001


#: Of a slice's copy.
SLICE_S = 1e-4


def copied_beside(turns: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Seconds that copies take beside rankings and alone, and seconds in all, where a ranking and a pause take these
    seconds, in turns."""
    beside = alone = now = 0.0
    device = SimpleNamespace(works=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: 50.0 + now))
        made = pace.CopyPace(device)
        made.wait_s(0)
        device.works = False
        for ranking_s, pause_s in [(0.0, 1.0), *turns]:  # a pause before pays for what the first ranking would give
            over, ends = now + ranking_s, now + ranking_s + pause_s
            while now < ends:
                device.works = now < over
                if wait_s := made.wait_s(0):
                    now += min(wait_s, LOOK_S) + 1e-9  # else a wait may be too short to add up
                    continue
                now += SLICE_S
                if device.works:
                    made.spent(SLICE_S)
                    beside += SLICE_S
                else:
                    alone += SLICE_S
    return beside, alone - 1.0, now - 1.0


@given(
    st.lists(st.tuples(st.floats(0.01, PATIENCE_S - BURST_S - LOOK_S), st.floats(0.05, 0.1)), min_size=1, max_size=5)
)
def test_a_ranking_after_a_pause_has_no_copies_beside_it(turns: list[tuple[float, float]]) -> None:
    beside, alone, _ = copied_beside(turns)
    assert beside == 0.0
    assert alone >= sum(pause_s - 2 * LOOK_S for _, pause_s in turns)


@given(st.tuples(st.floats(1e-3, 2.0), st.floats(0, 0.02)))
def test_rankings_without_pauses_or_with_short_ones_leave_copies_a_twentieth(turn: tuple[float, float]) -> None:
    beside, alone, seconds = copied_beside([turn] * int(10 / sum(turn)))
    assert beside + alone >= 0.9 * SHARE * (seconds - PATIENCE_S)
