"""Where the lanes' logs end, asked for periodically; and what that says of a record's age.

A record at an offset below an end that we were told at time t was there by t; one at or beyond it came later. So the
broker's order and our own monotonic clock bound every record's age, whatever the sender's clock says. Knows nothing of
what the records contain.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from aiokafka import AIOKafkaConsumer, TopicPartition

from relaygr_stream.bus.connection import client_options, typed_errors
from relaygr_stream.bus.renewed import Renewed
from relaygr_stream.settings import Kafka

#: Samples remembered per lane: enough to tell ages apart over the last few seconds; older records are just old.
SAMPLES: Final = 16


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The log ended at `offset` at some moment between asked_s and answered_s (our monotonic clock)."""

    offset: int
    asked_s: float
    answered_s: float


class AgeBounds:
    """Bounds of the time since a lane's records were appended."""

    def __init__(self) -> None:
        self._samples: deque[LogEnd] = deque(maxlen=SAMPLES)

    def sample(self, end: LogEnd) -> None:
        """Take a newer sample."""
        self._samples.append(end)

    def clamp(self, age_ms: float, offset: int, now_s: float) -> float:
        """The age nearest to age_ms, in milliseconds, that a record at this offset can have at now_s."""
        at_least, at_most = 0.0, math.inf
        for sample in self._samples:  # oldest first
            if offset < sample.offset:
                at_least = max(at_least, now_s - sample.answered_s)
                break
            at_most = now_s - sample.asked_s
        return min(max(age_ms, at_least * 1000.0), max(at_least, at_most) * 1000.0)


class LogEnds:
    """Asks brokers where partitions end."""

    def __init__(self, kafka: Kafka, client_id: str) -> None:
        self._kafka = kafka
        self._client_id = client_id
        self._renewed = Renewed(kafka, "the reader of the logs' ends", self._make)

    def _make(self) -> Any:
        return AIOKafkaConsumer(**client_options(self._kafka, self._client_id), group_id=None, enable_auto_commit=False)

    async def __aenter__(self) -> Self:
        """Connect. Raises BrokerUnavailable."""
        await self._renewed.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._renewed.stop()

    async def ask(self, topic: str, lanes: Iterable[int]) -> dict[int, LogEnd]:
        """The end of each lane of the topic. Raises BrokerUnavailable, BrokerError."""
        partitions = [TopicPartition(topic, lane) for lane in lanes]
        if not partitions:
            return {}
        asked_s = time.monotonic()
        with typed_errors(self._kafka, f"ask where {topic} ends"):
            ends = await (await self._renewed.present()).end_offsets(partitions)
        answered_s = time.monotonic()
        return {partition.partition: LogEnd(offset, asked_s, answered_s) for partition, offset in ends.items()}
