from __future__ import annotations

import time

from relaygr_lab.bench.results import Spread
from relaygr_lab.bench.wakes import HOPS, Wakes, chain

from tests.waiting import until


async def test_wakes_are_told_with_their_times_and_end_with_their_owner() -> None:
    began = time.monotonic()
    async with Wakes() as wakes:
        await until(lambda: len(wakes.late_ms(began, time.monotonic())) > 20, "some wakes")
        late = wakes.late_ms(began, time.monotonic())
    assert all(ms > 0 for ms in late)  # no sleep is shorter than asked for
    assert wakes.late_ms(began - 2.0, began - 1.0) == []


def test_a_chain_is_as_late_as_its_wakes_together() -> None:
    assert chain([2.0]) == Spread(2.0 * HOPS, 2.0 * HOPS)
    rare = chain([0.0] * 99 + [10.0])  # one wake in a hundred: nearly one chain in ten, and few have two of them
    assert (rare.p50, rare.p99) == (0.0, 10.0)
    assert chain([]) == Spread(None, None)
