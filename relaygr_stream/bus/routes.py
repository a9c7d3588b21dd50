"""Reads, follows and writes `routes`: which group serves which users. The topic may come to be while a process runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

import structlog

from relaygr_stream.bus.contents import read_all
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import topic_exists
from relaygr_stream.errors import BrokerError, DecodeError
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.routes import Routes, encode_routes, key_of, routes_topic, with_newer
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.wire.worker_status import StatusReader

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: A topic that is not there is looked for so often; a rollout waits longer before the first user moves.
ASK_S: Final = 5.0


async def read_all_routes(kafka: Kafka, topics: TopicSet, reader: StatusReader) -> Mapping[str, Routes]:
    """The newest routes on the cluster, by scenario; "": of the requests that are of none. Raises BrokerError."""
    topic, newest = routes_topic(topics), dict[str, Routes]()
    if await topic_exists(kafka, topic):
        for record in await read_all(kafka, topic.name, [0]):
            with suppress(DecodeError):
                newest = dict(with_newer(record, reader, newest))
    return newest


async def read_routes(kafka: Kafka, topics: TopicSet, reader: StatusReader) -> Routes | None:
    """Those of the requests that are of no scenario; None: there are none. Raises BrokerError."""
    return (await read_all_routes(kafka, topics, reader)).get("")


async def write_routes(
    producer: Producer, topics: TopicSet, reader: StatusReader, routes: Routes, scenario: str = ""
) -> None:
    """Write them, signed if the fleet has a secret. scenario: "": none. Raises BrokerError."""
    name, value, (key, headers) = routes_topic(topics).name, encode_routes(routes), key_of(scenario)
    if reader.signer is not None:
        headers = reader.signer.sign(name, key, value, headers)
    await producer.send_and_wait(name, value, key=key, headers=headers)


class RoutesTail:
    """The newest routes by scenario, from the topic's beginning on. on_routes: called with all when one is newer.

    exists: whether the topic is there.
    """

    def __init__(
        self,
        kafka: Kafka,
        topic: str,
        reader: StatusReader,
        exists: Callable[[], Awaitable[bool]],
        on_routes: Callable[[Mapping[str, Routes]], None],
    ) -> None:
        self._kafka, self._topic, self._reader = kafka, topic, reader
        self._exists, self._on_routes = exists, on_routes
        self._tail: TopicTail | None = None
        self.routes: Mapping[str, Routes] = {}

    async def start(self) -> None:
        """Read what there is, if the topic is there."""
        try:
            if self._tail is None and await self._exists():
                tail = TopicTail(self._kafka, self._topic, [0], "earliest", self._on_records)
                await tail.start()
                self._tail = tail
        except BrokerError as error:
            limited(log.warning, "routes")("routes cannot be read now", topic=self._topic, error=str(error))

    async def run(self) -> None:
        """Follow the topic as soon as it is there, until cancelled. Raises what ends its reading for good."""
        try:
            while self._tail is None:
                await asyncio.sleep(ASK_S)
                await self.start()
            await self._tail.failed
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Stop following."""
        if self._tail is not None:
            await self._tail.stop()

    def _on_records(self, records: list[Record]) -> None:
        for record in records:
            try:
                newest = with_newer(record, self._reader, self.routes)
            except DecodeError as error:
                limited(log.warning, "routes refused")("a record of routes is ignored", detail=str(error))
                continue
            if newest is not self.routes:
                self.routes = newest
                self._on_routes(newest)
