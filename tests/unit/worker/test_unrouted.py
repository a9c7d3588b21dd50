"""A ranking whose reply partition was just added waits until the cluster has said so; any other number is dead-lettered
after a while, and asked for at a bounded rate."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from relaygr_stream.engine.commands import Command, Rank
from relaygr_stream.errors import BrokerUnavailable
from relaygr_stream.settings.schema import Kafka, Relay, Settings
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import RankingRequest
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REASON, HEADER_REPLY_PARTITION, Record
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.worker import unrouted
from tests.done import DoneRecords
from tests.unit.worker.made import made_requests
from tests.waiting import until

TOPICS = load_topics(Kafka(partitions=4))
SCORES = TOPICS.scores.partitions


class Cluster:
    """In place of the producers: the answers to questions for partitions, the last for ever; what was dead-lettered."""

    def __init__(self, *answers: int | None) -> None:
        self._answers = list(answers)
        self.asked = 0
        self.dead: list[dict[str, bytes]] = []

    async def partitions(self, topics: Sequence[str]) -> dict[str, int]:
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is None:
            raise BrokerUnavailable("no broker answers")
        return dict.fromkeys(topics, answer)

    async def send_and_wait(self, topic: str, value: bytes, **more: Any) -> int:
        assert topic == TOPICS.dead_letter.name
        self.dead.append(dict(more["headers"]))
        return 0


class World:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.done, self.device = cluster, DoneRecords(), list[Command]()
        device = SimpleNamespace(prefill_bytes=0, submit=lambda *commands: self.device.extend(commands))
        model = SimpleNamespace(version="m", tasks=("click",))
        settings = Settings(relay=Relay(slo_ms=3.6e6))
        made = made_requests(settings, TOPICS, (cluster, cluster), device, model, reader=self.done)
        self.requests, self.background = made.requests, made.background
        self._offset = 0

    def ask(self, partition: int) -> None:
        request = RankingRequest(
            request_id=f"r{self._offset}",
            user_id="u",
            prefix=Behaviours.from_arrays([1, 2], [0, 0], [1, 2]),
            candidates=pack_items([7]),
        )
        headers = ((HEADER_CORRELATION, b"c"), (HEADER_REPLY_PARTITION, str(partition).encode()))
        record = Record(TOPICS.ranking.name, 1, self._offset, 0, b"u", encode(request), headers)
        self._offset += 1
        self.requests.on_records([record])

    @property
    def ranked(self) -> list[int]:
        """The reply partitions of the rankings that the device got."""
        return [each.task.origin.reply_partition for each in self.device if isinstance(each, Rank)]


@asynccontextmanager
async def world_of(*answers: int | None) -> AsyncIterator[World]:
    world = World(Cluster(*answers))
    try:
        yield world
        world.background.check()
    finally:
        await world.background.end()


async def test_the_first_ranking_on_a_partition_that_was_just_added_is_ranked() -> None:
    """It was a dead letter until the worker counted, every five seconds."""
    async with world_of(2 * SCORES) as world:
        world.ask(SCORES + 4)
        world.ask(1)
        assert world.ranked == [1], "others do not wait"
        await until(lambda: len(world.ranked) == 2, "ranked")
        world.ask(2 * SCORES - 1)
        assert world.ranked == [1, SCORES + 4, 2 * SCORES - 1]
        assert (world.cluster.asked, world.cluster.dead) == (1, [])


async def test_brokers_may_be_behind_or_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrouted, "PACE_S", 0.0)
    monkeypatch.setattr(unrouted, "PATIENCE_S", 60.0)
    async with world_of(SCORES, None, 0, SCORES, 2 * SCORES) as world:
        world.ask(SCORES)
        await until(lambda: world.ranked == [SCORES], "ranked")
        assert (world.cluster.asked, world.cluster.dead) == (5, [])


async def test_a_number_that_no_partition_has_is_a_dead_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come: they share a question."""
    monkeypatch.setattr(unrouted, "PATIENCE_S", 0.0)
    async with world_of(SCORES) as world:
        for number in range(50):
            world.ask(SCORES + number)
        await until(lambda: len(world.cluster.dead) == 50, "dead letters")
        assert {headers[HEADER_REASON] for headers in world.cluster.dead} == {b"invalid"}
        assert world.cluster.asked <= 2
        await until(lambda: len(world.done) == 50, "the lane goes on")
        assert world.ranked == []


async def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrouted, "MOST", 2)
    monkeypatch.setattr(unrouted, "PATIENCE_S", 60.0)
    async with world_of(SCORES) as world:
        for _ in range(5):
            world.ask(SCORES)
        await until(lambda: len(world.cluster.dead) == 3, "those beyond")
        assert len(world.done) == 3


async def test_what_is_no_partitions_number_asks_nothing() -> None:
    async with world_of(SCORES) as world:
        world.ask(-1)
        await until(lambda: len(world.cluster.dead) == 1, "a dead letter")
        assert world.cluster.asked == 0
