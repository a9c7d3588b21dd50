"""Reads, follows and writes the assignments: which scenario each worker serves."""

from __future__ import annotations

from contextlib import suppress

from relaygr_stream.bus.contents import read_all
from relaygr_stream.bus.newest import Exists, NewestTail, Take
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import topic_exists
from relaygr_stream.errors import DecodeError
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.assignments import HEADERS, KEY, Assignments, encode_assignments, newer_assignments
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.routes import routes_topic
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.wire.worker_status import StatusReader


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
    """Write them, signed if the fleet has a secret. topics: as of read_assignments. Raises BrokerError."""
    name, value, headers = routes_topic(topics).name, encode_assignments(assignments), [*HEADERS]
    if reader.signer is not None:
        headers = reader.signer.sign(name, KEY, value, headers)
    await producer.send_and_wait(name, value, key=KEY, headers=headers)


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
    ) -> None:
        super().__init__(kafka, topic, exists, on_newer, None, relaxed=True)
        self._reader = reader

    def newer(self, record: Record) -> Assignments | None:
        """As of the record."""
        return newer_assignments(record, self._reader, self.newest)
