"""Rollouts whose users come back: by a figure, by a command, or with a rollout that is stopped."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.routes import read_routes
from relaygr_stream.errors import RelayError
from relaygr_stream.ops.rollout import process
from relaygr_stream.ops.rollout.process import take_back
from relaygr_stream.ops.rollout.routing import Bus
from relaygr_stream.wire.routes import POSITIONS, Routes
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader
from tests.unit.rollout.worlds import LANES, World
from tests.waiting import until


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"failing": 0.5}, "failed or were rejected"), ({"interval": 12}, "P99 of `relay` is .* the limit is 2×")],
    ids=["fails", "slow"],
)
async def test_users_come_back_and_the_reason_stays(world: World, changes: dict[str, Any], why: str) -> None:
    vars(world.new).update(changes)
    async with world.stating(world.old, world.new):
        with pytest.raises(RelayError, match=why):
            await world.roll_out(hold_s=3600)
    assert await world.share() == 0
    routes = (await read_routes(world.settings.kafka, load_topics(world.settings.kafka), StatusReader())).get("")
    assert routes is not None
    assert routes.rollout
    assert routes.rollout.state == "back"
    assert re.search(why, routes.rollout.reason)


@pytest.mark.stack
async def test_a_later_step_goes_back_all_the_way(world: World) -> None:
    async with world.stating(world.old, world.new):
        rolling = asyncio.create_task(world.roll_out(hold_s=1.0))
        await until(lambda: any(line.startswith("step 2") for line in world.lines))
        world.new.failing = 0.5
        with pytest.raises(RelayError, match="failed or were rejected"):
            await rolling
    assert await world.share() == 0


@pytest.mark.stack
async def test_back_by_hand_needs_workers_there(world: World) -> None:
    with pytest.raises(RelayError, match="has no users"):
        await take_back(world.settings, None, world.say)
    async with world.stating(world.new), world.stating(world.old):
        await world.roll_out()
    async with world.stating(world.old):
        await take_back(world.settings, None, world.say)
    assert await world.share() == 0


async def test_back_by_hand_overtakes_a_rollout_that_takes_a_step_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = Bus(world.settings)
    await bus.make_topic()
    first = Routes.of_one("", LANES).moved("next", LANES, 500)
    await bus.write(world.producer, first)
    write = Bus.write

    async def behind(own: Bus, producer: Producer, routes: Routes) -> None:
        monkeypatch.setattr(Bus, "write", write)
        await bus.write(producer, first.moved("next", LANES, 5000))
        await own.write(producer, routes)

    monkeypatch.setattr(Bus, "write", behind)
    async with world.stating(world.old):
        await take_back(world.settings, "next", world.say)
    assert await world.share() == 0


@pytest.mark.stack
async def test_back_to_a_group_without_workers_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "UNOWNED_S", 0.5)
    async with world.stating(world.old, world.new):
        await world.roll_out()
    world.settings = msgspec.structs.replace(
        world.settings, trigger=msgspec.structs.replace(world.settings.trigger, max_status_age_ms=1.0)
    )
    with pytest.raises(RelayError, match="start its workers first"):
        await take_back(world.settings, None, world.say)
    assert await world.share() == POSITIONS


async def test_a_rollout_ends_where_another_command_has_moved_its_users(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next step, and the figures that it states, would take them along again."""
    write = Bus.write

    async def after_the_other(own: Bus, producer: Producer, routes: Routes) -> None:
        if any(line.startswith("step 1") for line in world.lines):
            monkeypatch.setattr(Bus, "write", write)
            await take_back(world.settings, None, world.say)
        await write(own, producer, routes)

    monkeypatch.setattr(Bus, "write", after_the_other)
    async with world.stating(world.old, world.new):
        with pytest.raises(RelayError, match=r"another command .* users are in next 0%, default 100%"):
            await world.roll_out()
    assert not any(line.startswith("step 2") for line in world.lines)
    assert await world.share() == 0


async def test_who_is_stopped_while_no_broker_takes_the_routes_goes_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With processes of its own: the write may have come through, and its workers end with it."""
    writing = asyncio.Event()
    write = Bus.write

    async def slow(bus: Bus, producer: Producer, routes: Routes) -> None:
        await write(bus, producer, routes)
        if routes.share_of("next"):
            writing.set()
            await asyncio.Event().wait()

    class Up:
        exit_code = None

    @asynccontextmanager
    async def started(*_: object) -> AsyncIterator[Up]:
        async with world.stating(world.new):
            yield Up()

    monkeypatch.setattr(Bus, "write", slow)
    monkeypatch.setattr(process, "_started", started)
    monkeypatch.setattr(process, "LISTEN_S", 0.0)
    async with world.stating(world.old):
        rolling = asyncio.create_task(world.roll_out(up=()))
        await writing.wait()
        assert await world.share() == 500
        world.context.stop.set()
        with pytest.raises(RelayError, match="it was stopped"):
            await rolling
    assert await world.share() == 0
