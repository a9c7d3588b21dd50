"""Of planners that act one leads, and what it publishes counts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from unittest.mock import ANY

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from relaygr_stream.bus.assignments import read_assignments, write_assignments
from relaygr_stream.bus.contents import read_all
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import topic_exists
from relaygr_stream.errors import TopicError
from relaygr_stream.ops.planner.acting import Acting, acting
from relaygr_stream.ops.planner.metrics import PlannerMetrics
from relaygr_stream.ops.planner.plan import DAY
from relaygr_stream.ops.planner.seen import WorkerSeen
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.wire.assignments import Assignments, newer_assignments
from relaygr_stream.wire.routes import routes_topic
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader
from tests.unit.planner.test_moves import SCENARIOS, TO_SEARCH, seen, worker
from tests.waiting import until

FEED = [worker("a", busy=0.5), worker("b", busy=0.2)]


class Scene:
    """A topic of routes, and planners on it."""

    def __init__(self, kafka: Kafka, producer: Producer) -> None:
        self.settings = Settings(kafka=kafka, scenarios=SCENARIOS)
        self.topics, self.reader, self.producer = load_topics(kafka), StatusReader(), producer
        self.registry = CollectorRegistry()
        self._metrics = PlannerMetrics(self.registry)

    def planner(self, name: str) -> AbstractAsyncContextManager[Acting]:
        return acting(self.settings, name, self.reader, self.producer, self._metrics, DAY)

    async def published(self) -> Assignments:
        found = await read_assignments(self.settings.kafka, self.topics, self.reader)
        assert found is not None
        return found

    async def write(self, epoch: int, **workers: str) -> None:
        """As another planner."""
        record = Assignments(epoch=epoch, sent_ms=0, planner="other", workers=workers)
        await write_assignments(self.producer, self.topics, self.reader, record)

    def ended(self, result: str) -> float | None:
        return self.registry.get_sample_value("relaygr_planner_moves_total", {"result": result})


@pytest.fixture
async def scene(embedded_settings: Kafka) -> AsyncIterator[Scene]:
    await topic_exists(embedded_settings, routes_topic(load_topics(embedded_settings)), create=True)
    async with Producer(embedded_settings, client_id="test") as producer:
        yield Scene(embedded_settings, producer)


async def turn(planner: Acting, at_s: float = 0.0, **groups: list[WorkerSeen]) -> bool:
    """A turn in which nothing is proposed; whether it leads."""
    await planner.act(await planner.follow(seen(at_s, **groups)), None)
    return planner.leads


async def leads(planner: Acting) -> None:
    async def it_leads() -> bool:
        return await turn(planner, feed=FEED)

    await until(it_leads, "the planner leads")


async def begun_by(planner: Acting) -> None:
    """It leads, and begins a move."""
    await leads(planner)
    there = await planner.follow(seen(feed=FEED))
    assert not there.moving
    await planner.act(there, TO_SEARCH)
    assert "the move of b from feed to search is under way" in planner.says
    assert (await planner.follow(seen(feed=FEED))).moving


@pytest.mark.stack
async def test_one_leads_and_when_it_goes_the_next_one_ends_its_move(scene: Scene) -> None:
    async with AsyncExitStack() as last:
        first = await last.enter_async_context(scene.planner("first"))
        await begun_by(first)
        moved = await scene.published()
        assert (moved.planner, moved.workers) == ("first", {"b": "search"})
        async with scene.planner("second") as second:
            assert (await second.follow(seen(feed=FEED))).moving, "who stands by proposes nothing"
            assert not await turn(second, feed=FEED)
            assert await turn(first, feed=FEED)
            await last.aclose()
            await leads(second)
            fence = await scene.published()
            assert (fence.planner, fence.workers) == ("second", moved.workers)
            assert fence.epoch > moved.epoch
            await turn(second, 9.0, search=[worker("b", epoch=fence.epoch)])
            assert scene.ended("verified") == 1


async def test_a_move_that_is_given_up_is_written_back(scene: Scene) -> None:
    async with scene.planner("p") as planner:
        await begun_by(planner)
        epoch = (await scene.published()).epoch
        await turn(planner, 9.0, feed=[worker("b", given_up=epoch, why="it did not drain")])
        back = await scene.published()
        assert (back.workers, back.epoch) == ({"b": "feed"}, epoch + 1)
        assert planner.says == "the move of b from feed to search was given up: it did not drain"
        assert scene.ended("given_up") == 1


async def test_what_a_rollout_in_place_has_left_stays(scene: Scene) -> None:
    left = Assignments.after(None, "rollout", {}, 1, "next", {"next": "/models/new"})
    await write_assignments(scene.producer, scene.topics, scene.reader, left)
    async with scene.planner("p") as planner:
        await begun_by(planner)
        found = await scene.published()
    assert (found.workers, found.home, found.checkpoints) == ({"b": "search"}, "next", left.checkpoints)


async def test_a_late_record_of_an_old_leader_is_followed_by_ours_again(scene: Scene) -> None:
    """Compaction would keep the late one."""
    async with scene.planner("p") as planner:
        await begun_by(planner)
        ours = await scene.published()
        await scene.write(ours.epoch - 1, b="feed")
        await planner.tail.catch_up()
        await turn(planner, feed=FEED)
        last = (await read_all(scene.settings.kafka, routes_topic(scene.topics).name, [0]))[-1]
        assert newer_assignments(last, scene.reader, None) == msgspec.structs.replace(ours, sent_ms=ANY)


@pytest.mark.stack
async def test_who_meets_a_newer_record_of_another_leads_no_more_until_its_turn_comes_again(scene: Scene) -> None:
    async with scene.planner("p") as planner:
        await begun_by(planner)
        newer = (await scene.published()).epoch + 5
        await scene.write(newer, a="search")
        await planner.tail.catch_up()
        assert not await turn(planner, feed=FEED)
        assert (await scene.published()).planner == "other"
        await leads(planner)
        again = await scene.published()
        assert (again.planner, again.workers) == ("p", {"a": "search"})
        assert again.epoch > newer


async def test_without_the_topic_the_command_that_makes_it_is_named(embedded_settings: Kafka) -> None:
    async with Producer(embedded_settings, client_id="test") as producer:
        with pytest.raises(TopicError, match="relaygr topics apply"):
            async with Scene(embedded_settings, producer).planner("p"):
                pass
