"""Follows and writes the assignments: which scenario each worker serves."""

from __future__ import annotations

from relaygr_stream.bus.newest import Exists, NewestTail, Take
from relaygr_stream.bus.producer import Producer
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.assignments import HEADERS, KEY, Assignments, encode_assignments, newer_assignments
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.routes import routes_topic
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.wire.worker_status import StatusReader


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
    ) -> None:
        super().__init__(kafka, topic, exists, on_newer, None, relaxed=True)
        self._reader = reader

    def newer(self, record: Record) -> Assignments | None:
        """As of the record."""
        return newer_assignments(record, self._reader, self.newest)
