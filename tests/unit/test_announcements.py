"""Gathered events: each is sent once, in order, within its bound, and a lane that is held up holds up no other."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.bus.producer import Outgoing
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.client.sender import BATCH_BYTES, MAX_LANE_BYTES, Announcements
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.topic_files import lane_of, load_topics
from tests.unit.client_peers import client_on, count, event, responder_on
from tests.waiting import until

LONG_S = 3600.0


class Gate:
    """Takes batches as a producer would: a lane that is held takes one, and the next waits in it."""

    def __init__(self) -> None:
        self.batches: defaultdict[int, list[list[Outgoing]]] = defaultdict(list)
        self.open: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    def send_lane(self, lane: int, events: Sequence[Outgoing]) -> Coroutine[Any, Any, None] | None:
        self.batches[lane].append([*events])
        return None if self.open[lane].is_set() else self.opened(lane)

    async def opened(self, lane: int) -> None:
        await self.open[lane].wait()

    def sent(self, lane: int) -> list[bytes]:
        return [event.value for batch in self.batches[lane] for event in batch]


async def add(announcements: Announcements, lane: int, event: Outgoing) -> None:
    if not announcements.has_room(lane):
        await announcements.room(lane)
    announcements.add(lane, event)


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 2), st.sampled_from([1, BATCH_BYTES // 3, BATCH_BYTES + 1])),
            st.tuples(st.just("turn"), st.just(0), st.just(0)),
            st.tuples(st.sampled_from(["hold", "free"]), st.integers(0, 2), st.just(0)),
        ),
        max_size=20,  # more would fill a lane that is held, and the test with it
    )
)
def test_every_event_is_sent_once_in_its_lanes_order(steps: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        gate = Gate()
        announcements = Announcements(gate, linger_s=0.0)
        added: defaultdict[int, list[bytes]] = defaultdict(list)
        for lane in range(3):
            gate.open[lane].set()
        for number, (what, lane, size) in enumerate(steps):
            if what == "add":
                value = number.to_bytes(4, "big") + bytes(size)
                await add(announcements, lane, Outgoing(b"k", value))
                added[lane].append(value)
            elif what == "turn":
                await asyncio.sleep(0)
            elif what == "hold":
                gate.open[lane].clear()
            else:
                gate.open[lane].set()
        for lane in range(3):
            gate.open[lane].set()
        await announcements.flush()
        assert {lane: gate.sent(lane) for lane in range(3)} == {lane: added[lane] for lane in range(3)}

    asyncio.run(run())


async def test_events_of_all_lanes_leave_together_when_the_first_has_waited() -> None:
    gate = Gate()
    announcements = Announcements(gate, linger_s=0.05)
    for number in range(6):
        await add(announcements, number % 2, Outgoing(b"k", b"%d" % number))
    assert not gate.batches
    await until(lambda: len(gate.batches) >= 2)
    assert gate.batches == {
        0: [[Outgoing(b"k", b"0"), Outgoing(b"k", b"2"), Outgoing(b"k", b"4")]],
        1: [[Outgoing(b"k", b"1"), Outgoing(b"k", b"3"), Outgoing(b"k", b"5")]],
    }


async def test_a_batchs_worth_leaves_at_once() -> None:
    gate = Gate()
    announcements = Announcements(gate, linger_s=LONG_S)
    await add(announcements, 0, Outgoing(b"k", b"small"))
    await add(announcements, 1, Outgoing(b"k", bytes(BATCH_BYTES)))
    await until(lambda: bool(gate.batches[1]))
    assert not gate.batches[0]


async def test_a_lane_that_is_held_up_bounds_its_own_events_and_no_others() -> None:
    gate = Gate()
    announcements = Announcements(gate, linger_s=LONG_S)
    gate.open[1].set()
    large = bytes(BATCH_BYTES)

    async def fill() -> None:
        while True:
            await add(announcements, 0, Outgoing(b"k", large))
            await asyncio.sleep(0)

    filling = asyncio.create_task(fill())
    await until(lambda: len(gate.batches[0]) == 1)
    for _ in range(5):
        await add(announcements, 1, Outgoing(b"k", large))
        await asyncio.sleep(0)
    assert len(gate.sent(1)) == 5
    with pytest.raises(TimeoutError):  # the lane is full
        async with asyncio.timeout(0.05):
            await add(announcements, 0, Outgoing(b"k", large))
    gate.open[0].set()
    await until(lambda: len(gate.batches[0]) > 1)
    filling.cancel()
    held = sum(len(event.value) for event in gate.batches[0][1])
    assert MAX_LANE_BYTES <= held <= MAX_LANE_BYTES + 2 * BATCH_BYTES
    await announcements.flush()


async def test_closing_sends_what_was_gathered(kafka_settings: Kafka) -> None:
    async with responder_on(kafka_settings) as peer:
        relay = client_on(kafka_settings, announce_linger_ms=1000.0)
        async with relay:
            for number in range(20):
                await relay.announce(event(number, f"user-{number}"))
        await until(lambda: len(peer.events) == 20)
        assert count(relay, "announcements", outcome="sent") == 20


async def test_events_that_came_together_are_one_batch_of_their_lane(kafka_settings: Kafka) -> None:
    topic = load_topics(kafka_settings).retrieval.name
    user, other = "u", next(f"v{n}" for n in range(99) if lane_of(f"v{n}", 8) != lane_of("u", 8))
    arrivals: list[list[str]] = []
    async with (
        responder_on(kafka_settings),
        TopicTail(
            kafka_settings,
            topic,
            range(8),
            "latest",
            lambda records: arrivals.append([(r.key or b"").decode() for r in records]),
        ),
        client_on(kafka_settings, announce_linger_ms=300.0) as relay,
    ):
        for number in range(5):
            await relay.announce(event(number, user))
            await relay.announce(event(number, other))
        await until(lambda: sum(map(len, arrivals)) == 10)
    assert sorted(map(sorted, arrivals)) in (
        [[user] * 5 + [other] * 5],
        [[user] * 5, [other] * 5],
    )
