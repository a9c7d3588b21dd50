"""Users whose prefix KV is computed in the new group before they move."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.routes import read_routes
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.ops.rollout.warming import Warming
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.erase import KIND as ERASE
from relaygr_stream.wire.erase import Erase, encode_erase
from relaygr_stream.wire.messages import PreInferSignal
from relaygr_stream.wire.records import HEADER_KIND, KIND_DELEGATED, Record, kind_of
from relaygr_stream.wire.routes import POSITIONS, Routes
from relaygr_stream.wire.topic_files import lane_of, load_topics
from relaygr_stream.wire.worker_status import StatusReader
from tests.unit.client_peers import PREFIX, request
from tests.unit.rollout.worlds import LANES, World
from tests.waiting import until


@pytest.mark.parametrize(("world", "grown"), [(1, 1), (2, 2)], indirect=["world"], ids=["as stated", "grown"])
async def test_users_are_prefilled_in_the_new_group_before_they_move(world: World, grown: int) -> None:
    """Each once, by delegated signals on its lane there; nobody who stays, and nobody of whom nothing is to be used."""
    old, new = (load_topics(settings.kafka) for settings in (world.settings, world.new_settings))
    signals: list[tuple[int, PreInferSignal]] = []

    def on_records(records: list[Record]) -> None:
        for record in records:
            assert kind_of(record.headers) == KIND_DELEGATED
            signals.append((record.lane, decode(PreInferSignal, record.value)))

    first = Routes.of_one("", LANES).moved("next", LANES, 500)
    users = [f"u{number}" for number in range(100)]
    canary = {user for user in users if first.group_of(user) == "next"}
    tail = TopicTail(world.settings.kafka, new.ranking.name, range(LANES), "earliest", on_records)
    async with world.stating(world.old, world.new), tail:
        rolling = asyncio.create_task(world.roll_out(hold_s=3600))
        await until(lambda: any(line.startswith("step 1") for line in world.lines))
        for number, user in enumerate(users):
            asked = msgspec.structs.replace(request(number, user_id=user), mode="full" if number % 5 == 0 else "auto")
            lane = lane_of(user, grown * LANES)
            await world.producer.send_and_wait(old.ranking.name, encode(asked), key=user.encode(), partition=lane)
        half = first.moved("next", LANES, POSITIONS // 2)
        expected = {user for user in users[1:] if half.group_of(user) == "next"} - canary - set(users[::5])
        await until(lambda: len(signals) >= len(expected) > 20, "the signals")
        world.context.stop.set()
        await rolling
    assert sorted(signal.user_id for _, signal in signals) == sorted(expected)
    assert all(lane == lane_of(signal.user_id, LANES) for lane, signal in signals)
    assert {signal.prefix for _, signal in signals} == {PREFIX}


async def test_a_user_who_is_erased_is_not_prefilled(world: World) -> None:
    """Nor by a ranking of before, that is read later; the routes name the group before anyone is prefilled in it."""
    topics, reader = load_topics(world.new_settings.kafka), StatusReader()
    found = Warming(world.new_settings, "next", LANES, world.producer, reader)

    def asked(user: str, at_ms: int) -> Record:
        return Record("ranking", 0, 0, at_ms, user.encode(), encode(request(user_id=user)), ())

    async def known(*users: str) -> None:
        running = asyncio.create_task(found.run())
        await until(lambda: set(found._known.keys) == set(users), f"only {users} are known")
        running.cancel()
        await asyncio.wait({running})

    erase = Erase.request("e" * 16, "ann", now_ms(), reader)
    headers = ((HEADER_KIND, ERASE.encode()),)
    found.on_rankings([asked("ann", 1), asked("bob", 1)])
    found.on_statuses([Record(topics.worker_status.name, 0, 0, 5, b"erase/e", encode_erase(erase), headers)])
    found.on_rankings([asked("ann", 4)])
    await known("bob")
    found.on_rankings([asked("ann", 6)])
    await known("ann", "bob")
    async with world.stating(world.old):
        rolling = asyncio.create_task(world.roll_out())
        await until(lambda: len(world.lines) > 1)
        while True:
            routes = (await read_routes(world.settings.kafka, load_topics(world.settings.kafka), reader)).get("")
            if routes is not None and "next" in routes.groups:
                break
        rolling.cancel()
        await asyncio.wait({rolling})
    assert routes.share_of("next") == 0
