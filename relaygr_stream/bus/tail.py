"""Follows partitions without a group: the compacted `worker-status`, or a client's own partition of `scores`.

It commits nothing, and every reader gets all records.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NoReturn, Self

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, KafkaTimeoutError

from relaygr_stream.bus.aiokafka_compat import broker_error, client_options, read, typed_errors
from relaygr_stream.bus.away import Away, leader_of
from relaygr_stream.bus.contents import Progress
from relaygr_stream.bus.producer import NO_LEADER
from relaygr_stream.bus.renewed import ClientUser, Renewed
from relaygr_stream.bus.unreadable import pass_unreadable
from relaygr_stream.errors import BrokerUnavailable
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.telemetry.background import Background
from relaygr_stream.wire.records import Record

log = structlog.get_logger(__name__)

#: A relaxed tail gets records this late, or as soon as there are RELAXED_BYTES: any fetch costs the broker and this
#: process half a millisecond of a core each.
RELAXED_MS: Final = 300
RELAXED_BYTES: Final = 256 * 1024
#: How many records of a partition "recent" goes back. Living workers state themselves four times a second: of 200,
#: these are the last 12 s; of two, the last 20 minutes. Ten minutes of 200 are 480,000 records, 20 s of processor.
RECENT_RECORDS: Final = 10_000
#: Pause after a read of `worker-status`: a fetch for each status takes a quarter of a core with 200 workers. A relaxed
#: tail would be too late, and fetch as often from a small fleet.
STATUS_PAUSE_S: Final = 0.005


class TopicTail(ClientUser):
    """Follows some partitions of one topic, across broker restarts.

    start: "earliest"; "recent" for the last RECENT_RECORDS offsets of each partition, however long its log; or "latest"
    for records produced after start() returns. on_records(records): gets records in
    order per partition (`Record.lane`); it runs on the loop and must be quick. relaxed: records may arrive RELAXED_MS
    late, many at a time. pause_s: after each read; records come up to two pauses later, many at a time.

    If the broker has lost the offset (the log expired or was recreated), reading continues at the earliest record. A
    record may then arrive twice, but no existing record is skipped. After a refusal, or an end inside aiokafka, reading
    is retried with growing pauses and continues at its position.
    """

    def __init__(
        self,
        kafka: Kafka,
        topic: str,
        partitions: Sequence[int],
        start: Literal["earliest", "recent", "latest"],
        on_records: Callable[[list[Record]], None],
        *,
        relaxed: bool = False,
        pause_s: float = 0.0,
    ) -> None:
        self._kafka = kafka
        self._pause_s = pause_s
        self._wait_ms = RELAXED_MS if relaxed else kafka.tail_max_wait_ms
        self._least_bytes = RELAXED_BYTES if relaxed else 1
        self._partitions = [TopicPartition(topic, partition) for partition in partitions]
        self._start = start
        self._on_records = on_records
        self._next: dict[TopicPartition, int] = {}  # the next offset to hand out
        self._ends: dict[TopicPartition, int] = {}  # the log's end at the start
        self._turned = asyncio.Event()  # set after each read, and when reading has ended
        self._renewed = Renewed(kafka, f"the reader of {topic}", self)
        self._background = Background()

    @property
    def failed(self) -> asyncio.Future[None]:
        """A future that completes, with the error, only if on_records fails."""
        return self._background.failed

    @property
    def trouble(self) -> str | None:
        """Why nothing is read at the moment; None if all is well."""
        return self._renewed.trouble

    async def start(self) -> None:
        """Connect. With "earliest" and "recent", hand out the existing records before returning.

        Raises BrokerUnavailable (PartitionsAway where no broker serves a partition), BrokerError.
        """
        await self._renewed.start()
        ends = self._ends
        try:
            with typed_errors(self._kafka, f"read {self._partitions[0].topic}"):
                progress = Progress(self._kafka)
                while await self._behind(ends):
                    consumer = await self._renewed.present()
                    positions = {each: await consumer.position(each) for each in self._partitions}
                    if progress.stands_still(list(positions.values())):
                        _raise_away(consumer, [each for each, position in positions.items() if position < ends[each]])
                    if not await self._read(consumer):  # a log made anew meanwhile ends earlier
                        now = await consumer.end_offsets(self._partitions)
                        ends = {partition: min(end, now[partition]) for partition, end in ends.items()}
        except BaseException:
            await self._renewed.stop()
            raise
        self._background.start(self._follow())

    def make_client(self) -> Any:
        """A new aiokafka consumer, not started."""
        return AIOKafkaConsumer(
            **client_options(self._kafka, f"relaygr-tail-{self._partitions[0].topic}"),
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=self._wait_ms,
            fetch_min_bytes=self._least_bytes,
        )

    async def begin_client(self, consumer: Any) -> None:
        """Assign the partitions to a new consumer, at the next offsets."""
        if not self._next:
            # Raises at once if an ACL is missing; a request for offsets would be retried until the timeout.
            await consumer._client._wait_on_metadata(self._partitions[0].topic)
            # Before the first fetch: a request waits behind a fetch that waits for records on the same connection.
            try:
                self._ends = await consumer.end_offsets(self._partitions)
            except KafkaTimeoutError:  # a KafkaTimeoutError names neither the partition nor its broker
                _raise_away(consumer, self._partitions)
            self._next = dict(self._ends)
            if self._start != "latest":
                begins = await consumer.beginning_offsets(self._partitions)
                back = RECENT_RECORDS if self._start == "recent" else math.inf
                self._next = {each: int(max(begin, self._ends[each] - back)) for each, begin in begins.items()}
        # Who starts reads again what was there before; those that were there have told of it.
        pass_unreadable(consumer, self._ends if self._start == "recent" else None)
        consumer.assign(self._partitions)
        for partition, offset in self._next.items():
            consumer.seek(partition, offset)

    async def catch_up(self) -> None:
        """Wait until all records that exist now are handed out. Raises BrokerError, or the error of `failed`."""
        with typed_errors(self._kafka, f"read {self._partitions[0].topic}"):
            ends = await (await self._renewed.present()).end_offsets(self._partitions)
            self._turned.clear()
            while not self.failed.done() and await self._behind(ends):
                await self._turned.wait()
                self._turned.clear()
        self._background.check()

    async def listen(self, seconds: float) -> None:
        """Go on for so long. Raises the error of `failed`."""
        await asyncio.wait([self.failed], timeout=seconds)
        self._background.check()

    async def stop(self) -> None:
        """Stop following and disconnect."""
        await self._background.end()
        await self._renewed.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _behind(self, ends: Mapping[TopicPartition, int]) -> bool:
        """Whether a position is before its end. Positions count, since a compacted log's last offsets may be empty."""
        consumer = await self._renewed.present()
        return any([await consumer.position(partition) < end for partition, end in ends.items()])

    async def _follow(self) -> None:
        try:
            while True:
                try:
                    consumer = await self._renewed.present()
                    if await self._read(consumer) and self._pause_s:
                        await asyncio.sleep(self._pause_s)
                except BrokerUnavailable:
                    continue  # `trouble` reports it; try again
                except (KafkaError, OSError) as error:
                    if consumer is self._renewed.client:
                        self._renewed.renew(str(broker_error(self._kafka, "read", error)))
        except Exception as error:
            log.error("a tail failed", topic=self._partitions[0].topic, error=repr(error))
            self._background.fail(error)
            self._turned.set()

    async def _read(self, consumer: Any) -> int:
        """Hand out what there is; returns how many records."""
        records = await read(consumer)
        self._hand_out(records)
        return len(records)

    def _hand_out(self, records: list[Record]) -> None:
        for record in records:
            self._next[TopicPartition(record.topic, record.lane)] = record.offset + 1
        if records:
            self._on_records(records)
        self._turned.set()


def _raise_away(consumer: Any, partitions: Sequence[TopicPartition]) -> NoReturn:
    """Raise PartitionsAway for partitions of which at least one is not served: those without a leader, or all."""
    led = {partition: leader_of(consumer, partition) for partition in partitions}
    away = Away()
    for partition, leader in led.items():
        if leader == NO_LEADER or NO_LEADER not in led.values():
            away.add(partition.topic, partition.partition, leader)
    raise away.error()
