"""Samples the ends of the lanes' logs, and derives bounds on the age of each record.

If a broker answers at time t that a log ends at an offset, records below that offset arrived before t, and the others
later. The broker's order and this process's monotonic clock therefore bound every record's age, independently of the
sender's clock. The age that a sender states is used only where the bounds are wide, minus the lag of senders' clocks.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Self

from aiokafka import AIOKafkaConsumer, TopicPartition

from relaygr_stream.bus.aiokafka_compat import client_options, typed_errors
from relaygr_stream.bus.renewed import ClientUser, Renewed
from relaygr_stream.errors import BrokerUnavailable
from relaygr_stream.settings.schema import Kafka

#: Samples kept per lane: they distinguish ages within the last few seconds.
SAMPLES: Final = 16
#: A stated age that exceeds the bounds by more than this means a wrong clock; NTP leaves a smaller error.
CLOCK_TOLERANCE_MS: Final = 100.0
#: A record is fresh if its age is at most this: ends are sampled every 250 ms, and a sample or two may be late. A fresh
#: record needs no stated age; the age that it states measures the lag of the senders' clocks.
FRESH_MS: Final = 600.0
#: Time of a message to its log and from there to this process: 5 ms each at P99.
WAY_MS: Final = 10.0
#: The period of the maximum lag: senders may be silent for minutes, and clocks are corrected.
LAG_PERIOD_S: Final = 300.0
#: The largest lag of a clock that counts. Clocks without NTP are minutes off; more is a wrong date, and such a sender
#: must not keep the old records of all others from expiring.
MOST_LAG_MS: Final = 600_000.0
#: The time limit of an answer, which takes milliseconds. A slower broker no longer delays the others.
ANSWER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The log ended at `offset` at a moment between asked_s and answered_s (monotonic clock)."""

    offset: int
    asked_s: float
    answered_s: float


class SenderLag:
    """The largest lag of the senders' clocks: how much older fresh records state to be than the log's order proves.

    assumed_ms: the lag before the first fresh record; None: unknown, so stated ages are not used.
    """

    def __init__(self, assumed_ms: float | None = None) -> None:
        self._assumed_ms = assumed_ms
        self._began_s = -math.inf
        self._before: float | None = None  # the largest in the former period
        self._now: float | None = None

    def seen(self, excess_ms: float, now_s: float) -> None:
        """Record that a fresh record stated an age of excess_ms more than the log's order proves.

        An excess beyond MOST_LAG_MS is ignored.
        """
        if now_s - self._began_s >= LAG_PERIOD_S:
            self._turn(now_s)
        if excess_ms <= MOST_LAG_MS:
            self._now = max(excess_ms, self._now or 0.0)

    def most_ms(self, now_s: float) -> float | None:
        """The largest lag in the last LAG_PERIOD_S to 2 · LAG_PERIOD_S, or assumed_ms; None if neither is known."""
        if now_s - self._began_s >= LAG_PERIOD_S:
            self._turn(now_s)
        if self._before is None or self._now is None:
            known = self._now if self._before is None else self._before
            return self._assumed_ms if known is None else known
        return max(self._before, self._now)

    def _turn(self, now_s: float) -> None:
        """A period is over."""
        periods = (now_s - self._began_s) / LAG_PERIOD_S
        self._before, self._now, self._began_s = (self._now if periods < 2 else None), None, now_s


class Age(NamedTuple):
    """The age of a record in milliseconds.

    sure_ms: the least age, which decides whether the record expires: what the log's order proves, and up to WAY_MS more
        if the record states it. Where the order proves little (a backlog, no sample yet), it is the stated age minus
        the senders' lag, within the bounds. Thus a sender's clock that is behind expires no fresh record.
    stated_ms: the stated age within the bounds, for reports.
    clock_off: the stated age contradicts the bounds.
    """

    sure_ms: float
    stated_ms: float
    clock_off: bool


class AgeBounds:
    """The ages of one lane's records. lag: of the senders' clocks, shared by all lanes of a process."""

    def __init__(self, lag: SenderLag) -> None:
        self._samples: deque[LogEnd] = deque(maxlen=SAMPLES)
        self._lag = lag
        self._read = -1

    def sample(self, end: LogEnd) -> None:
        """Add a newer sample."""
        if self._samples and end.offset < self._samples[-1].offset:
            self._samples.clear()  # the log was truncated or recreated, so older samples are invalid
        self._samples.append(end)

    def age(self, stated_ms: float | None, offset: int, now_s: float) -> Age:
        """The age of a record read at now_s. stated_ms: its age by the sender's clock; None: not stated."""
        if offset < self._read:
            self._samples.clear()  # reading jumped back, most likely because the log was recreated
        self._read = offset
        at_least, at_most = 0.0, math.inf
        for sample in self._samples:  # oldest first
            if offset < sample.offset:
                at_least = max(at_least, now_s - sample.answered_s)
                break
            at_most = now_s - sample.asked_s
        at_least, at_most = at_least * 1000.0, max(at_least, at_most) * 1000.0
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


def now_ms() -> int:
    """Unix time in milliseconds, as messages state it."""
    return int(time.time() * 1e3)


def stated_age_ms(sent_ms: int) -> float | None:
    """The age of a message by its sender's clock and this one; None: its sender stated no time (0)."""
    return time.time() * 1e3 - sent_ms if sent_ms else None


class LogEnds(ClientUser):
    """Asks brokers for the ends of partitions."""

    def __init__(self, kafka: Kafka, client_id: str) -> None:
        self._kafka = kafka
        self._client_id = client_id
        self._renewed = Renewed(kafka, "the reader of the logs' ends", self)
        #: (leader, topic) → unanswered request; leader -1, None: not known. A missing topic silences no other.
        self._silent: dict[tuple[int | None, str], asyncio.Task[Any]] = {}

    def make_client(self) -> Any:
        """A new aiokafka consumer, not started."""
        return AIOKafkaConsumer(**client_options(self._kafka, self._client_id), group_id=None, enable_auto_commit=False)

    async def __aenter__(self) -> Self:
        """Connect. Raises BrokerUnavailable."""
        await self._renewed.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._silent.values():
            task.cancel()
        await self._renewed.stop()

    async def ask(self, topic: str, lanes: Iterable[int]) -> dict[int, LogEnd]:
        """The ends of the topic's lanes whose brokers answer within ANSWER_S. A silent broker delays no other.

        Raises BrokerUnavailable or BrokerError if no broker answers.
        """
        consumer = await self._renewed.present()
        by_leader: defaultdict[int | None, list[TopicPartition]] = defaultdict(list)
        for partition in (TopicPartition(topic, lane) for lane in lanes):
            by_leader[consumer._client.cluster.leader_for_partition(partition)].append(partition)
        if not by_leader:
            return {}
        asked = {
            asyncio.create_task(self._ask(consumer, topic, partitions)): leader
            for leader, partitions in by_leader.items()
            if (leader, topic) not in self._silent
        }
        try:
            done = (await asyncio.wait(asked, timeout=ANSWER_S))[0] if asked else set()
        except asyncio.CancelledError:
            for task in asked:
                task.cancel()
            raise
        for task, leader in asked.items():
            if task not in done:  # until aiokafka ends this request, its broker is not asked again
                self._silent[leader, topic] = task
                task.add_done_callback(partial(self._heard, (leader, topic)))
        errors = [error for task in done if (error := task.exception()) is not None]
        ends = {lane: end for task in done if task.exception() is None for lane, end in task.result().items()}
        if not ends:
            raise errors[0] if errors else BrokerUnavailable(f"no broker says where {topic} ends")
        return ends

    async def _ask(self, consumer: Any, topic: str, partitions: list[TopicPartition]) -> dict[int, LogEnd]:
        asked_s = time.monotonic()
        with typed_errors(self._kafka, f"ask where {topic} ends", "DESCRIBE"):
            ends = await consumer.end_offsets(partitions)
        answered_s = time.monotonic()
        return {partition.partition: LogEnd(offset, asked_s, answered_s) for partition, offset in ends.items()}

    def _heard(self, asked: tuple[int | None, str], task: asyncio.Task[Any]) -> None:
        if self._silent.get(asked) is task:
            del self._silent[asked]
        if not task.cancelled():
            task.exception()  # mark it as retrieved; the next call asks this broker again
