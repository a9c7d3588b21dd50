"""Where the lanes' logs end, asked for periodically; and what that says of a record's age.

A record at an offset below an end that we were told at time t was there by t; one at or beyond it came later. So the
broker's order and our own monotonic clock bound every record's age, whatever the sender's clock says. What its sender
states is used only where those bounds say little, and only so far as no sender's clock can have made it up. Knows
nothing of what the records contain.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from aiokafka import AIOKafkaConsumer, TopicPartition

from relaygr_stream.bus.aiokafka_compat import client_options, typed_errors
from relaygr_stream.bus.renewed import Renewed
from relaygr_stream.errors import BrokerUnavailable
from relaygr_stream.settings.schema import Kafka

#: Samples remembered per lane: enough to tell ages apart over the last few seconds; older records are just old.
SAMPLES: Final = 16
#: A stated age that misses what the log's order allows by more than this is a clock that is off; NTP leaves that much.
CLOCK_TOLERANCE_MS: Final = 100.0
#: A record that came after a sample so long ago, or less, is fresh: ends are sampled every 250 ms, and a sample or two
#: may be late. Of a fresh one the stated age is not needed, and tells how far the senders' clocks lag.
FRESH_MS: Final = 600.0
#: What any message may take to its log and from there to us: 5 ms each at P99 (DESIGN §5).
WAY_MS: Final = 10.0
#: Senders are quiet for minutes, and clocks are mended.
LAG_PERIOD_S: Final = 300.0
#: Where logs end is answered within milliseconds; who does not is asked apart.
ANSWER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The log ended at `offset` at some moment between asked_s and answered_s (our monotonic clock)."""

    offset: int
    asked_s: float
    answered_s: float


class SenderLag:
    """How much older than they were fresh records have stated to be: by the clocks that lag, and by what any takes.

    assumed_ms: while no fresh record was seen; None: nothing is assumed, so that no stated age is believed.
    """

    def __init__(self, assumed_ms: float | None = None) -> None:
        self._assumed_ms = assumed_ms
        self._began_s = -math.inf
        self._before: float | None = None  # the most in the period before
        self._now: float | None = None

    def seen(self, excess_ms: float, now_s: float) -> None:
        """A fresh record stated to be older than the log's order proves, by so much."""
        self._turn(now_s)
        self._now = max(excess_ms, self._now or 0.0)

    def most_ms(self, now_s: float) -> float | None:
        """The most within LAG_PERIOD_S to twice that, or what is assumed."""
        self._turn(now_s)
        return max((lag for lag in (self._before, self._now) if lag is not None), default=self._assumed_ms)

    def _turn(self, now_s: float) -> None:
        periods = (now_s - self._began_s) / LAG_PERIOD_S
        if periods >= 1:
            self._before, self._now, self._began_s = (self._now if periods < 2 else None), None, now_s


class Age(NamedTuple):
    """How old a record is, in milliseconds.

    sure_ms: the least that it can be, to judge it by: what the log's order proves, and WAY_MS more if it states so.
    Where the order says little (a backlog, no sample yet), what it states less what the senders' clocks may lag, so far
    as the order allows. So a clock that is behind does not expire what is fresh. stated_ms: what it states, so far as
    the order allows, to report. clock_off: it states what cannot be.
    """

    sure_ms: float
    stated_ms: float
    clock_off: bool


class AgeBounds:
    """Ages of one lane's records, by the log's order. lag: of the senders' clocks; all lanes of a process share it."""

    def __init__(self, lag: SenderLag) -> None:
        self._samples: deque[LogEnd] = deque(maxlen=SAMPLES)
        self._lag = lag
        self._read = -1

    def sample(self, end: LogEnd) -> None:
        """Take a newer sample."""
        if self._samples and end.offset < self._samples[-1].offset:
            self._samples.clear()  # the log was cut short, or began anew: its offsets mean other moments now
        self._samples.append(end)

    def age(self, stated_ms: float | None, offset: int, now_s: float) -> Age:
        """Of a record read just now. stated_ms: by its sender's clock; None: it states nothing."""
        if offset < self._read:
            self._samples.clear()  # it is read anew from further back, most likely in another log
        self._read = offset
        at_least, at_most = self._bounds(offset, now_s)
        if stated_ms is None:
            return Age(at_least, at_least, False)
        off = not at_least - CLOCK_TOLERANCE_MS <= stated_ms <= at_most + CLOCK_TOLERANCE_MS
        believed = min(stated_ms, at_least + WAY_MS)
        if at_most <= FRESH_MS:
            self._lag.seen(stated_ms - at_least, now_s)
        elif (lag_ms := self._lag.most_ms(now_s)) is not None:
            believed = max(believed, stated_ms - lag_ms)
        sure = min(max(believed, at_least), at_most)
        return Age(sure, at_least if off else min(max(stated_ms, at_least), at_most), off)

    def _bounds(self, offset: int, now_s: float) -> tuple[float, float]:
        at_least, at_most = 0.0, math.inf
        for sample in self._samples:  # oldest first
            if offset < sample.offset:
                at_least = max(at_least, now_s - sample.answered_s)
                break
            at_most = now_s - sample.asked_s
        return at_least * 1000.0, max(at_least, at_most) * 1000.0


class LogEnds:
    """Asks brokers where partitions end."""

    def __init__(self, kafka: Kafka, client_id: str) -> None:
        self._kafka = kafka
        self._client_id = client_id
        self._renewed = Renewed(kafka, "the reader of the logs' ends", self._make)
        self._silent: dict[int | None, asyncio.Task[Any]] = {}  # leader (-1, None: not known) → what it was asked

    def _make(self) -> Any:
        return AIOKafkaConsumer(**client_options(self._kafka, self._client_id), group_id=None, enable_auto_commit=False)

    async def __aenter__(self) -> Self:
        """Connect. Raises BrokerUnavailable."""
        await self._renewed.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._silent.values():
            task.cancel()
        await self._renewed.stop()

    async def ask(self, topic: str, lanes: Iterable[int]) -> dict[int, LogEnd]:
        """The end of each lane of the topic whose broker says so within ANSWER_S; one that is silent keeps the answers
        of no other back. Raises BrokerUnavailable, BrokerError where none does."""
        consumer = await self._renewed.present()
        by_leader: defaultdict[int | None, list[TopicPartition]] = defaultdict(list)
        for partition in (TopicPartition(topic, lane) for lane in lanes):
            by_leader[consumer._client.cluster.leader_for_partition(partition)].append(partition)
        if not by_leader:
            return {}
        asked = {
            asyncio.create_task(self._ask(consumer, topic, partitions)): leader
            for leader, partitions in by_leader.items()
            if leader not in self._silent
        }
        done = (await asyncio.wait(asked, timeout=ANSWER_S))[0] if asked else set()
        for task, leader in asked.items():
            if task not in done:  # it goes on until aiokafka gives it up, and its broker is not asked again until then
                self._silent[leader] = task
                task.add_done_callback(partial(self._heard, leader))
        errors = [error for task in done if (error := task.exception()) is not None]
        ends = {lane: end for task in done if task.exception() is None for lane, end in task.result().items()}
        if not ends:
            raise errors[0] if errors else BrokerUnavailable(f"no broker says where {topic} ends")
        return ends

    async def _ask(self, consumer: Any, topic: str, partitions: list[TopicPartition]) -> dict[int, LogEnd]:
        asked_s = time.monotonic()
        with typed_errors(self._kafka, f"ask where {topic} ends"):
            ends = await consumer.end_offsets(partitions)
        answered_s = time.monotonic()
        return {partition.partition: LogEnd(offset, asked_s, answered_s) for partition, offset in ends.items()}

    def _heard(self, leader: int | None, task: asyncio.Task[Any]) -> None:
        if self._silent.get(leader) is task:
            del self._silent[leader]
        if not task.cancelled():
            task.exception()  # whatever it was, it is asked again
