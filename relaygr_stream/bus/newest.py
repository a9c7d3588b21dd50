"""Follows what a compacted topic says now. The topic may come to be while a process runs."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import ClassVar, Final, Generic, TypeVar

import structlog

from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.errors import BrokerError, DecodeError
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.records import Record

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: Clients look for the topic so often; a rollout waits longer before the first user moves.
ASK_S: Final = 5.0

T = TypeVar("T")
#: Whether the topic is there.
Exists = Callable[[], Awaitable[bool]]
#: Takes what counts now.
Take = Callable[[T], None]


class NewestTail(ABC, Generic[T]):
    """What the records of partition 0 say, from the topic's beginning on.

    on_newer: called with it when a record changes it. newest: where there is no record. relaxed: as of TopicTail.
    ask_s: a topic that is not there is looked for so often.
    """

    what: ClassVar[str]  # it is, in words

    def __init__(
        self,
        kafka: Kafka,
        topic: str,
        exists: Exists,
        on_newer: Take[T],
        newest: T,
        *,
        relaxed: bool = False,
        ask_s: float = ASK_S,
    ) -> None:
        self._kafka, self._topic, self._relaxed = kafka, topic, relaxed
        self._exists, self._on_newer, self._ask_s = exists, on_newer, ask_s
        self._tail: TopicTail | None = None
        self._why_not = ""  # it could not be read the last time
        self.newest = newest

    @abstractmethod
    def newer(self, record: Record) -> T:
        """What counts as of this record; `newest` itself where that stays. Raises DecodeError for a bad record."""

    async def start(self) -> None:
        """Read what there is, if the topic is there."""
        try:
            if self._tail is None and await self._exists():
                tail = TopicTail(self._kafka, self._topic, [0], "earliest", self._on_records, relaxed=self._relaxed)
                await tail.start()
                self._tail = tail
            self._why_not = ""
        except BrokerError as error:
            if self._why_not != (why := str(error)):
                limited(log.warning, self.what)(f"{self.what} cannot be read now", topic=self._topic, error=why)
            self._why_not = why

    async def run(self) -> None:
        """Follow the topic as soon as it is there, until cancelled. Raises what ends its reading for good."""
        try:
            while self._tail is None:
                await asyncio.sleep(self._ask_s)
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
                newest = self.newer(record)
            except DecodeError as error:
                limited(log.warning, f"{self.what} refused")(f"a record of {self.what} is ignored", detail=str(error))
                continue
            if newest is not self.newest:
                self.newest = newest
                self._on_newer(newest)
