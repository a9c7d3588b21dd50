"""The bound on bytes per second, on a clock that only moves when somebody waits."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.handover.channel import Bandwidth
from tests.waiting import Clock


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 5)), min_size=1, max_size=50),
    st.integers(1, 1000),
    st.integers(0, 2000),
)
def test_never_more_than_the_burst_and_the_rate(takes: list[tuple[int, float]], rate: int, burst: int) -> None:
    async def run() -> None:
        clock = Clock(50.0)
        bandwidth = Bandwidth(rate, burst, clock, clock.sleep)
        start, gone = clock.now, 0
        for nbytes, pause in takes:
            clock.now += pause
            await bandwidth.take(nbytes)
            gone += nbytes
            assert gone <= burst + (clock.now - start) * rate + 1e-6

    asyncio.run(run())


def test_without_pauses_it_is_used_in_full() -> None:
    async def run() -> None:
        clock = Clock(50.0)
        bandwidth = Bandwidth(100, 50, clock, clock.sleep)
        for _ in range(35):
            await bandwidth.take(10)
        assert abs(clock.now - 50.0 - (350 - 50) / 100) < 1e-9

    asyncio.run(run())


def test_a_pause_saves_up_no_more_than_the_burst() -> None:
    async def run() -> None:
        clock = Clock(50.0)
        bandwidth = Bandwidth(100, 50, clock, clock.sleep)
        clock.now += 1000
        await bandwidth.take(150)
        assert abs(clock.now - 1050 - 1.0) < 1e-9

    asyncio.run(run())
