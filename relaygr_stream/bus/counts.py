"""Polls the topics' partition counts, because an operator may add partitions while the process runs.

More partitions of `scores` are harmless: clients choose among all of them. More lanes are an error: newly started
clients then send users to lanes that this fleet does not serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from relaygr_stream.bus.producer import Producer
from relaygr_stream.errors import BrokerError, LanesChanged
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.topic_files import TopicSet

log = structlog.get_logger(__name__)
limited = LogLimiter().limited

#: The interval of polling in seconds, for up to ASK_S · LANES_PER_S = 500 lanes.
ASK_S: Final = 5.0
#: Above 500 lanes the interval is lanes / LANES_PER_S. A partition takes about 40 bytes of the answer, and there are
#: four topics, so a process reads at most 16 kB a second.
LANES_PER_S: Final = 100


class PartitionCounts:
    """Polls and checks the counts. producer: its metadata is used, so it learns of new partitions too.

    on_replies(count): called with the number of partitions of `scores` after each answer.
    """

    def __init__(
        self, topics: TopicSet, producer: Producer, on_replies: Callable[[int], object] = lambda count: None
    ) -> None:
        self._topics = topics
        self._producer = producer
        self._on_replies = on_replies
        self.error: LanesChanged | None = None

    def why_not_ready(self) -> str | None:
        """The reason for readiness if lanes were added; None if not."""
        return None if self.error is None else str(self.error)

    async def run(self) -> None:
        """Poll for ever. A BrokerError is logged."""
        while True:
            try:
                await self.ask()
            except BrokerError as error:
                limited(log.warning, "counts")("partition counts are not available", error=str(error))
            await asyncio.sleep(max(ASK_S, self._topics.lanes / LANES_PER_S))

    async def ask(self) -> None:
        """Poll once and set `error`. Raises BrokerError."""
        lanes = [topic.name for topic in self._topics.all if topic.lanes]
        counts = await self._producer.partitions([*lanes, self._topics.scores.name])
        if replies := counts.pop(self._topics.scores.name, 0):
            self._on_replies(replies)
        # A topic that is briefly unavailable (0) shows at its readers and writers.
        other = {name: count for name, count in counts.items() if count not in (0, self._topics.lanes)}
        if bool(other) != bool(self.error):
            log.error("lanes changed on the cluster", counts=other, served=self._topics.lanes)
        self.error = LanesChanged(other, self._topics.lanes) if other else None
