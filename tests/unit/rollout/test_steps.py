"""Whole rollouts whose users move by steps, stop there, or do not begin."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from relaygr_stream.bus.routes import read_routes
from relaygr_stream.bus.topics import verify_topics
from relaygr_stream.errors import ConfigError, RelayError
from relaygr_stream.ops.rollout import process
from relaygr_stream.ops.rollout.routing import Bus
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import RankingRequest, ScoreReply
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION
from relaygr_stream.wire.routes import POSITIONS, Routes, group_settings
from relaygr_stream.wire.topic_files import lane_of, load_topics
from relaygr_stream.wire.worker_status import StatusReader
from tests.unit.client_peers import request, responder_on, scored, scores_for
from tests.unit.rollout.worlds import LANES, World
from tests.waiting import until


@pytest.mark.stack
async def test_all_users_move_by_steps_and_the_next_rollout_comes_back(world: World) -> None:
    async with world.stating(world.old, world.new):
        await world.roll_out()
        assert [line.split(":")[1].split("%")[0].strip() for line in world.lines if line.startswith("step")] == [
            "5",
            "50",
            "100",
        ]
        assert world.lines[-1] == "done: all users are in group next"
        assert await world.share() == POSITIONS
        sample = world.context.registry.get_sample_value
        assert sample("relaygr_rollout_share", {"group": "next", "version": "m2"}) == 1.0
        assert sample("relaygr_rollout_step") == 3
        world.lines.clear()
        world.context = ProcessContext(world.settings, asyncio.Event(), CollectorRegistry())
        await world.roll_out()
        assert world.lines[-1] == "done: all users are in group default"
        assert await world.share("") == POSITIONS


def in_turn(request: RankingRequest) -> ScoreReply:
    """As a model whose item ids are another's."""
    return msgspec.structs.replace(scored(request), scores=(-scores_for(request)).tobytes())


async def ask(world: World) -> None:
    """Rankings in the old group, as clients send them."""
    topic = load_topics(world.settings.kafka).ranking.name
    for number in itertools.count():
        asked = request(number, candidates=(number, number + 7, number + 3), user_id=f"u{number}")
        headers = [(HEADER_CORRELATION, b"%d" % number), (HEADER_REPLY_PARTITION, b"3")]
        lane = lane_of(asked.user_id, LANES)
        await world.producer.send_and_wait(topic, encode(asked), partition=lane, headers=headers)


@pytest.mark.stack
@pytest.mark.parametrize("answers", [scored, in_turn], ids=["alike", "unlike"])
async def test_nobody_moves_to_a_model_that_ranks_the_same_in_another_order(
    world: World, answers: Callable[[RankingRequest], ScoreReply]
) -> None:
    async with (
        world.stating(world.old, world.new),
        responder_on(world.settings.kafka) as here,
        responder_on(world.new_settings.kafka, lambda asked: [answers(asked)]) as there,
    ):
        asking = asyncio.create_task(ask(world))
        if answers is scored:
            await world.roll_out(unlike=False, warm=False)
        else:
            with pytest.raises(RelayError, match=r"nobody moved: .* in another order: rank correlation -1"):
                await world.roll_out(unlike=False, warm=False)
        asking.cancel()
        await asyncio.wait({asking})
    assert await world.share() == (POSITIONS if answers is scored else 0)
    assert {asked.mode for _, asked in there.requests} == {"full"}
    assert {asked.mode for _, asked in here.requests} == {"auto"}
    if answers is in_turn:
        assert not any(line.startswith("step") for line in world.lines)
        routes = (await read_routes(world.settings.kafka, load_topics(world.settings.kafka), StatusReader())).get("")
        assert routes is not None
        assert routes.rollout
        assert (routes.rollout.state, "another order" in routes.rollout.reason) == ("back", True)


@pytest.mark.stack
async def test_nobody_moves_before_every_lane_has_an_owner(world: World) -> None:
    async with world.stating(world.old):
        rolling = asyncio.create_task(world.roll_out())
        await until(lambda: len(world.lines) > 1)
        await asyncio.sleep(3 * process.HEARD_S)
        assert not any(line.startswith("step") for line in world.lines)
        async with world.stating(world.new):
            await rolling
    assert await world.share() == POSITIONS


@pytest.mark.stack
async def test_what_is_stopped_stays_and_goes_on(world: World) -> None:
    async with world.stating(world.old, world.new):
        rolling = asyncio.create_task(world.roll_out(hold_s=3600))
        await until(lambda: any(line.startswith("step 1") for line in world.lines))
        world.context.stop.set()
        await rolling
        assert await world.share() == 500
        assert "stay where they are" in world.lines[-1]
        world.context = ProcessContext(world.settings, asyncio.Event(), CollectorRegistry())
        world.lines.clear()
        await world.roll_out()
        assert [line[:6] for line in world.lines if line.startswith("step")] == ["step 2", "step 3"]


@pytest.mark.parametrize("world", [2], indirect=True)
async def test_a_new_group_has_as_many_lanes_as_the_one_before_has_grown_to(world: World) -> None:
    bus = Bus(world.settings)
    await bus.make_topic()
    await bus.write(world.producer, Routes.of_one("", LANES).grown("", 2 * LANES))
    rolling = asyncio.create_task(world.roll_out(group="third"))
    await until(lambda: any(line.startswith("made ") for line in world.lines), "the group's topics")
    rolling.cancel()
    await asyncio.wait({rolling})
    rows = await verify_topics(group_settings(world.settings, "third", 2 * LANES).kafka)
    assert {row.found.partitions for row in rows if row.found and row.topic.lanes} == {2 * LANES}


async def test_workers_that_are_there_already_are_not_joined(world: World) -> None:
    async with world.stating(world.old, world.new):
        with pytest.raises(ConfigError, match="has workers already"):
            await world.roll_out(up=())
