"""What planners have published on a cluster."""

from __future__ import annotations

from contextlib import suppress

from relaygr_stream.bus.contents import read_all
from relaygr_stream.bus.topics import topic_exists
from relaygr_stream.errors import DecodeError
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.assignments import Assignments, newer_assignments
from relaygr_stream.wire.routes import routes_topic
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.wire.worker_status import StatusReader


async def read_assignments(kafka: Kafka, topics: TopicSet, reader: StatusReader) -> Assignments | None:
    """The newest on the cluster; None: there are none. topics: of the fleet, not of a scenario."""
    topic, newest = routes_topic(topics), None
    if await topic_exists(kafka, topic):
        for record in await read_all(kafka, topic.name, [0]):
            with suppress(DecodeError):
                newest = newer_assignments(record, reader, newest)
    return newest
