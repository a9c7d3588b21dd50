"""How many partitions the topics have now: asked again and again, because somebody may add some while we run.

More partitions of `scores` are fine: clients choose among all that there are. More lanes are not: others then send
users to lanes that nobody here serves. Knows nothing of what a process does about it.
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

#: Counts are asked for this often. A partition takes some 40 bytes of the answer, and there are four topics: beyond 500
#: lanes it is proportionally less often, so that a process costs its brokers 16 kB a second at most.
ASK_S: Final = 5.0
LANES_PER_S: Final = 100


class PartitionCounts:
    """producer: whose metadata is asked for; it learns of new partitions that way. on_replies(count): how many
    partitions `scores` has, whenever it is known.
    """

    def __init__(
        self, topics: TopicSet, producer: Producer, on_replies: Callable[[int], object] = lambda count: None
    ) -> None:
        self._topics = topics
        self._producer = producer
        self._on_replies = on_replies
        self.error: LanesChanged | None = None

    def why_not_ready(self) -> str | None:
        """For readiness."""
        return None if self.error is None else str(self.error)

    async def run(self) -> None:
        """Ask for ever."""
        while True:
            try:
                await self.ask()
            except BrokerError as error:
                limited(log.warning, "counts")("brokers do not say how many partitions there are", error=str(error))
            await asyncio.sleep(max(ASK_S, self._topics.lanes / LANES_PER_S))

    async def ask(self) -> None:
        """Ask once. Raises BrokerError."""
        lanes = [topic.name for topic in self._topics.all if topic.lanes]
        counts = await self._producer.partitions([*lanes, self._topics.scores.name])
        if replies := counts.pop(self._topics.scores.name, 0):
            self._on_replies(replies)
        # A topic that is away for a moment (0) is the matter of those who read and write it.
        other = {name: count for name, count in counts.items() if count not in (0, self._topics.lanes)}
        if bool(other) != bool(self.error):
            log.error("lanes changed on the cluster", counts=other, served=self._topics.lanes)
        self.error = LanesChanged(other, self._topics.lanes) if other else None
