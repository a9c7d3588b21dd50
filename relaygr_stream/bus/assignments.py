"""Reads, follows and writes the assignments: which group each worker serves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final

from relaygr_stream.bus.contents import read_all
from relaygr_stream.bus.newest import ASK_S, Exists, NewestTail, Take
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import topic_exists
from relaygr_stream.errors import DecodeError
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.telemetry.background import Background
from relaygr_stream.wire.assignments import HEADERS, KEY, Assignments, encode_assignments, newer_assignments
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.routes import routes_topic
from relaygr_stream.wire.topic_files import TopicSet, load_topics
from relaygr_stream.wire.worker_status import StatusReader

#: Each look is a connection of its own, and most relays never have the topic: a rollout in place waits for longer.
SEEK_S: Final = 20.0


async def read_assignments(kafka: Kafka, topics: TopicSet, reader: StatusReader) -> Assignments | None:
    """The newest on the cluster; None: there are none. topics: of the fleet, not of a scenario. Raises BrokerError."""
    topic, newest = routes_topic(topics), None
    if await topic_exists(kafka, topic):
        for record in await read_all(kafka, topic.name, [0]):
            with suppress(DecodeError):
                newest = newer_assignments(record, reader, newest)
    return newest


async def write_assignments(
    producer: Producer, topics: TopicSet, reader: StatusReader, assignments: Assignments
) -> None:
    """Write them, signed if the fleet has a secret. topics: of the fleet, not of a scenario. Raises BrokerError."""
    name, value = routes_topic(topics).name, encode_assignments(assignments)
    await producer.send_and_wait(name, value, key=KEY, headers=reader.signed(name, KEY, value, HEADERS))


class AssignmentsTail(NewestTail[Assignments | None]):
    """The newest assignments. on_newer: called with those when they are newer. exists: whether the topic is there."""

    what = "assignments"

    def __init__(
        self,
        kafka: Kafka,
        topic: str,
        reader: StatusReader,
        exists: Exists,
        on_newer: Take[Assignments | None],
        ask_s: float = ASK_S,
    ) -> None:
        super().__init__(kafka, topic, exists, on_newer, None, relaxed=True, ask_s=ask_s)
        self._reader = reader

    def newer(self, record: Record) -> Assignments | None:
        """As of the record."""
        return newer_assignments(record, self._reader, self.newest)


@asynccontextmanager
async def following_assignments(fleet: Settings, take: Take[Assignments | None]) -> AsyncIterator[None]:
    """Have `take` called with those that are there, and with each newer one. A defect ends only the following."""
    background, topics = Background(), load_topics(fleet.kafka)
    topic, reader = routes_topic(topics), StatusReader.from_settings(fleet, topics)
    await reader.prepare()
    tail = AssignmentsTail(fleet.kafka, topic.name, reader, partial(topic_exists, fleet.kafka, topic), take, SEEK_S)
    await tail.start()
    background.start(tail.run())
    try:
        yield
    finally:
        await background.end()
