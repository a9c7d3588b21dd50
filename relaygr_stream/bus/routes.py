"""Reads, follows and writes `routes`: which group serves which users."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from relaygr_stream.bus.contents import read_all
from relaygr_stream.bus.newest import Exists, NewestTail, Take
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import topic_exists
from relaygr_stream.errors import DecodeError
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.routes import Routes, encode_routes, key_of, routes_topic, with_newer
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.wire.worker_status import StatusReader


async def read_routes(kafka: Kafka, topics: TopicSet, reader: StatusReader) -> Mapping[str, Routes]:
    """The newest routes on the cluster, by scenario; "": of the requests that are of none. Raises BrokerError."""
    topic, newest = routes_topic(topics), dict[str, Routes]()
    if await topic_exists(kafka, topic):
        for record in await read_all(kafka, topic.name, [0]):
            with suppress(DecodeError):
                newest = dict(with_newer(record, reader, newest))
    return newest


async def write_routes(
    producer: Producer, topics: TopicSet, reader: StatusReader, routes: Routes, scenario: str = ""
) -> None:
    """Write them, signed if the fleet has a secret. scenario: "": none. Raises BrokerError."""
    name, value, (key, headers) = routes_topic(topics).name, encode_routes(routes), key_of(scenario)
    await producer.send_and_wait(name, value, key=key, headers=reader.signed(name, key, value, headers))


class RoutesTail(NewestTail[Mapping[str, Routes]]):
    """The newest routes by scenario, from the topic's beginning on. on_routes: called with all when one is newer.

    exists: whether the topic is there.
    """

    what = "routes"

    def __init__(
        self,
        kafka: Kafka,
        topic: str,
        reader: StatusReader,
        exists: Exists,
        on_routes: Take[Mapping[str, Routes]],
    ) -> None:
        super().__init__(kafka, topic, exists, on_routes, {})
        self._reader = reader

    def newer(self, record: Record) -> Mapping[str, Routes]:
        """As of the record."""
        return with_newer(record, self._reader, self.newest)

    @property
    def routes(self) -> Mapping[str, Routes]:
        """The newest known."""
        return self.newest
