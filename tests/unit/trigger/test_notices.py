"""What owners are told of requests that were not admitted: soon, whatever becomes of other owners' brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from relaygr_stream.bus.producer import NO_LEADER
from relaygr_stream.errors import BrokerUnavailable
from relaygr_stream.telemetry.background import Background
from relaygr_stream.trigger import outbox
from relaygr_stream.trigger.delegation import FLUSH_S
from relaygr_stream.trigger.outbox import RefusalNotices
from relaygr_stream.wire.refusals import MAX_IDS, Refusal, decode_refusals
from tests.waiting import until

LONG_S = 60.0


class World:
    """Notices before a producer whose lanes hang, or have no leader, where the test says so."""

    def __init__(self) -> None:
        self.hung: set[int] = set()
        self.unled: set[int] = set()
        self.errors: dict[int, Exception] = {}
        self.sent: list[tuple[int, list[str]]] = []
        self.tried: list[int] = []
        self.background = Background()
        self.notices = RefusalNotices("pre-infer", self, self.background)  # type: ignore[arg-type]

    def broker_of(self, topic: str, lane: int) -> int:
        return NO_LEADER if lane in self.unled else 1

    async def send(self, topic: str, value: bytes, *, partition: int, headers: Any) -> asyncio.Future[int]:
        self.tried.append(partition)
        if partition in self.errors:
            raise self.errors[partition]
        if partition in self.hung:
            await asyncio.Event().wait()
        self.sent.append((partition, [key for keys in decode_refusals(value).reasons.values() for key in keys]))
        acknowledged: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        acknowledged.set_result(len(self.sent))
        return acknowledged

    def add(self, owner: str, lane: int, request: str) -> None:
        self.notices.add(owner, lane, Refusal(request, "stale"))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.background.end()
    made.background.check()


async def test_an_owner_whose_broker_hangs_holds_up_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "SENDING_S", LONG_S)
    world.hung = {0}
    world.add("w0", 0, "lost")
    world.add("w1", 1, "a")
    await world.notices.flush(FLUSH_S)
    assert world.sent == [(1, ["a"])]
    world.add("w1", 1, "b")
    world.add("w0", 0, "waits")
    await world.notices.flush(FLUSH_S)
    assert world.sent == [(1, ["a"]), (1, ["b"])]
    assert world.tried.count(0) == 1, "one wait an owner"


async def test_what_a_hung_broker_did_not_take_is_given_up_and_the_next_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "SENDING_S", 0.02)
    world.hung = {0}
    for number in range(MAX_IDS + 1):
        world.add("w0", 0, str(number))
    await world.notices.flush(LONG_S)
    assert world.tried == [0], "its second record is not tried"
    world.hung = set()
    world.add("w0", 0, "next")
    await world.notices.flush(LONG_S)
    assert world.sent == [(0, ["next"])]


async def test_what_is_gathered_while_an_owner_is_waited_for_is_told_behind_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "SENDING_S", 0.02)
    world.hung = {0}
    world.add("w0", 0, "lost")
    flushing = asyncio.create_task(world.notices.flush(LONG_S))
    await until(lambda: world.tried == [0])
    world.add("w0", 1, "next")
    await flushing
    assert world.sent == [(1, ["next"])]


async def test_an_owner_is_told_on_a_lane_that_has_a_leader(world: World) -> None:
    world.unled = {0}
    for lane in (0, 1):
        world.add("w0", lane, f"of {lane}")
    await world.notices.flush(FLUSH_S)
    assert world.sent == [(1, ["of 0", "of 1"])]
    world.add("w0", 0, "nobody hears of")
    await world.notices.flush(FLUSH_S)
    assert world.tried == [1]


async def test_a_notice_that_the_producer_does_not_take_is_given_up(world: World) -> None:
    world.errors[0] = BrokerUnavailable("away")
    world.add("w0", 0, "lost")
    await world.notices.flush(FLUSH_S)
    assert world.tried == [0]
    world.errors.clear()
    world.add("w0", 0, "next")
    await world.notices.flush(FLUSH_S)
    assert world.sent == [(0, ["next"])]
