"""A member of the workers' group as the tests see it, and a stream of numbered messages for it to read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.producer import Producer
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import TopicSet
from tests.waiting import until


class Member:
    """Reads `pre-infer` and `ranking`, remembers what it got, and marks it done at once unless told not to."""

    def __init__(
        self,
        kafka: Kafka,
        topics: TopicSet,
        name: str,
        *,
        finish: bool = True,
        capacity: float = 1.0,
        progressing: Callable[[], bool] = lambda: True,
    ) -> None:
        self.name = name
        self._progressing = progressing
        self.finish = finish
        self.capacity = capacity
        self.records: list[Record] = []
        self.arrivals: list[tuple[float, str, int]] = []
        self.history: list[tuple[frozenset[int], frozenset[int]]] = []
        self.consumer = LaneConsumer(
            kafka,
            topics=[topics.pre_infer.name, topics.ranking.name],
            group=f"{kafka.prefix}workers",
            member=name,
            user=self,
            capacity=capacity,
        )

    @property
    def lanes(self) -> frozenset[int]:
        return self.consumer.lanes

    def gained(self, first: int = 0, end: int | None = None) -> list[int]:
        """The lanes gained in that part of the history, which has no loss. Each comes once its offsets are known."""
        assert not any(lost for _, lost in self.history[first:end]), self.history
        return sorted(lane for gained, _ in self.history[first:end] for lane in gained)

    @property
    def values(self) -> list[bytes | None]:
        return [record.value for record in self.records]

    @property
    def progressing(self) -> bool:
        return self._progressing()

    def on_lanes(self, gained: frozenset[int], lost: frozenset[int]) -> None:
        self.history.append((gained, lost))

    def on_records(self, records: list[Record]) -> None:
        now = time.monotonic()
        self.records += records
        self.arrivals += [(now, record.topic, record.lane) for record in records]
        if self.finish:
            for record in records:
                self.consumer.done(record)

    async def __aenter__(self) -> Member:
        await self.consumer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.consumer.stop()


async def shared_out(topics: TopicSet, *members: Member) -> None:
    """Wait until every lane has exactly one owner among the members, each of whom has its share."""
    total = sum(member.capacity for member in members)

    def done() -> bool:
        shares = [topics.lanes * member.capacity / total for member in members]
        return sorted(lane for member in members for lane in member.lanes) == list(range(topics.lanes)) and all(
            abs(len(member.lanes) - share) < 1 for member, share in zip(members, shares, strict=True)
        )

    await until(done, f"all lanes shared out among {[member.name for member in members]}")


class Stream:
    """One numbered message after another to every lane of both topics, until stopped."""

    def __init__(self, producer: Producer, topics: TopicSet, every_s: float = 0.02) -> None:
        self._producer = producer
        self._topics = topics
        self._every_s = every_s
        self._stopped = False
        self._task: asyncio.Task[None] | None = None
        self._acknowledged: list[asyncio.Future[int]] = []
        self.sent: set[tuple[str, int, bytes]] = set()

    async def __aenter__(self) -> Stream:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop sending; everything in `sent` is acknowledged then."""
        self._stopped = True
        if self._task is not None:
            task, self._task = self._task, None
            await task
        await asyncio.gather(*self._acknowledged)

    async def _run(self) -> None:
        number = 0
        while not self._stopped:
            value = str(number).encode()
            for topic in (self._topics.pre_infer.name, self._topics.ranking.name):
                for lane in range(self._topics.lanes):
                    self._acknowledged.append(await self._producer.send(topic, value, partition=lane))
                    self.sent.add((topic, lane, value))
            number += 1
            await asyncio.sleep(self._every_s)
