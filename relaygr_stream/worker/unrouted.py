"""Rankings that name a partition of `scores` which this worker does not know: it may just have been added.

The worker asks the cluster, at a bounded rate, and takes them again: known by then, or never.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from typing import Final, Protocol

from relaygr_stream.bus.producer import Producer
from relaygr_stream.errors import BrokerError
from relaygr_stream.telemetry.background import Background
from relaygr_stream.wire.records import Record, held_bytes
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.worker.intake import Intake, UnknownReplyPartition

#: The cluster is asked so often at most, whatever rankings name, and above 500 lanes every lanes / LANES_PER_S seconds:
#: an answer has 40 bytes for each partition of four topics.
PACE_S: Final = 0.25
LANES_PER_S: Final = 2000
#: A ranking that has waited so long is given up with the next answer: a broker's metadata may be behind for a moment.
PATIENCE_S: Final = 1.0
#: Most rankings that wait, and their bytes; one beyond them is given up at once.
MOST: Final = 1000
MOST_BYTES: Final = 16 << 20


class Rereader(Protocol):
    """Takes the rankings again."""

    def on_asked(self, records: list[Record]) -> None:
        """The cluster was asked for the reply partitions of these."""


class Unrouted:
    """The rankings that wait. producer: sends the answers, so it learns of new partitions, too. background: runs it."""

    def __init__(
        self, producer: Producer, topics: TopicSet, intake: Intake, background: Background, rereader: Rereader
    ) -> None:
        self._producer, self._topics, self._intake = producer, topics, intake
        self._background, self._rereader = background, rereader
        self._waiting: list[tuple[float, Record]] = []  # when they were read
        self._nbytes = 0
        self._asked_s = -math.inf
        self._asking: asyncio.Task[None] | None = None

    def keep(self, record: Record) -> bool:
        """Have it wait; False: too many do."""
        nbytes = held_bytes(record)
        if len(self._waiting) >= MOST or self._nbytes + nbytes > MOST_BYTES:
            return False
        self._waiting.append((time.monotonic(), record))
        self._nbytes += nbytes
        if self._asking is None or self._asking.done():
            self._asking = self._background.start(self._ask_until_none_waits())
        return True

    async def _ask_until_none_waits(self) -> None:
        while self._waiting:
            pace_s = max(PACE_S, self._topics.lanes / LANES_PER_S)
            await asyncio.sleep(self._asked_s + pace_s - time.monotonic())
            self._asked_s = asked_s = time.monotonic()
            with suppress(BrokerError):  # of which readiness and the other clients tell
                name = self._topics.scores.name
                if count := (await self._producer.partitions([name]))[name]:
                    self._intake.counted(count)
                self._rereader.on_asked(self._take(asked_s - PATIENCE_S))

    def _take(self, read_s: float) -> list[Record]:
        """Those whose partition is known now, and those read before."""
        taken, kept = list[Record](), list[tuple[float, Record]]()
        for waiting in self._waiting:
            if waiting[0] <= read_s or self._knows(waiting[1]):
                taken.append(waiting[1])
            else:
                kept.append(waiting)
        self._waiting, self._nbytes = kept, sum(held_bytes(record) for _, record in kept)
        return taken

    def _knows(self, record: Record) -> bool:
        try:
            self._intake.route(record)
        except UnknownReplyPartition:
            return False
        return True
