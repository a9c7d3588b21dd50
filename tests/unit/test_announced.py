"""The head start that a client expects: that of its last requests, whatever a few of them took."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.client.announced import LEAST_STATED_MS, MOST, STEP, Announced
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import RequestEvent
from tests.unit.client_peers import PATIENCE_S, PREFIX, client_on, event, request, responder_on
from tests.waiting import until

LONGEST_MS = 2000.0


def usual(times_ms: list[float], announced: Announced | None = None) -> float:
    """What is learned from rankings after so long, one after the other."""
    announced = announced or Announced(LONGEST_MS)
    for number, ms in enumerate(times_ms):
        announced.add(str(number), 100.0)
        announced.ranked(str(number), 100.0 + ms / 1e3)
    return announced.usual_ms


@given(st.floats(1, 2000), st.floats(60, 500), st.floats(1, 10), st.integers(2, 5))
def test_it_comes_to_the_median_from_anywhere(first: float, middle: float, factor: float, every: int) -> None:
    """Of `every` rankings one takes the factor as long; the others are the median, and those two are a tie."""
    later = [middle * factor if number % every == 0 else middle for number in range(600)]
    high = middle * factor if every == 2 else middle
    assert middle / STEP**3 <= usual([first, *later]) <= high * STEP**3


def test_a_few_very_late_rankings_count_no_more_than_others() -> None:
    assert usual([80.0] * 50 + [1e9] * 3) <= 80.0 * STEP**4


def test_from_the_shortest_it_finds_back_and_beyond_the_longest_it_does_not_go() -> None:
    assert usual([0.0] + [80.0] * 200) >= 80.0 / STEP
    assert usual([1e9]) == LONGEST_MS
    assert usual([LONGEST_MS - 1, 1e9]) == LONGEST_MS


def test_a_head_start_in_which_nothing_can_be_done_is_not_stated() -> None:
    announced = Announced(LONGEST_MS)
    assert usual([LEAST_STATED_MS - 1] * 30, announced) == 0
    assert usual([2 * LEAST_STATED_MS] * 2, announced) >= LEAST_STATED_MS, "but learned"


def test_what_was_cancelled_or_ranked_before_or_not_announced_teaches_nothing() -> None:
    announced = Announced(LONGEST_MS)
    assert announced.ranked("unknown", 5.0) is None
    announced.add("cancelled", 0.0)
    announced.cancelled("cancelled")
    announced.ranked("cancelled", 1.0)
    assert announced.usual_ms == 0
    announced.add("one", 0.0)
    announced.add("one", 0.05)
    announced.ranked("one", 0.1)
    announced.ranked("one", 1.9)
    assert announced.usual_ms == 100


def test_memory_is_bounded_and_the_newest_stay() -> None:
    announced = Announced(LONGEST_MS)
    for number in range(MOST + 1):
        announced.add(str(number), 0.0)
    announced.ranked("0", 0.5)
    assert announced.usual_ms == 0
    announced.ranked(str(MOST), 0.5)
    assert announced.usual_ms == 500


async def test_events_state_it_where_their_caller_states_nothing(embedded_settings: Kafka) -> None:
    async with responder_on(embedded_settings) as peer, client_on(embedded_settings) as relay:

        async def stated(expected: int) -> float:
            await until(lambda: len(peer.events) == expected)
            return decode(RequestEvent, peer.events[-1].value).rank_in_ms

        await relay.announce(event(0))
        assert await stated(1) == 0
        await asyncio.sleep(0.06)  # longer than LEAST_STATED_MS, however long the calls take
        await relay.rank(request(0), timeout=PATIENCE_S)
        async with relay.request("u", PREFIX, candidates=3):
            assert await stated(2) >= LEAST_STATED_MS
        async with relay.request("u", PREFIX, candidates=3, rank_in=0.4):
            assert await stated(3) == 400
