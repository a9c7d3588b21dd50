"""Reads whole partitions without a group: the compacted `worker-status`, or a client's own partition of `scores`.

It commits nothing, and every reader gets all records.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from relaygr_stream.bus.aiokafka_compat import broker_error, client_options, end_client, read, typed_errors
from relaygr_stream.bus.renewed import Renewed
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
#: Pause after a read of `worker-status`: a fetch for each status takes a quarter of a core with 200 workers
#: (docs/explanation/decisions.md). A relaxed tail would be too late, and fetch as often from a small fleet.
STATUS_PAUSE_S: Final = 0.005


class TopicTail:
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
        self._renewed = Renewed(kafka, f"the reader of {topic}", self._make, self._begin)
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

        Raises BrokerUnavailable, BrokerError.
        """
        await self._renewed.start()
        ends = self._ends
        try:
            with typed_errors(self._kafka, f"read {self._partitions[0].topic}"):
                progress = _Progress(self._kafka, self._partitions[0].topic)
                while await self._behind(ends):
                    consumer = await self._renewed.present()
                    progress.note([await consumer.position(partition) for partition in self._partitions])
                    if not await self._read(consumer):  # a log made anew meanwhile ends earlier
                        now = await consumer.end_offsets(self._partitions)
                        ends = {partition: min(end, now[partition]) for partition, end in ends.items()}
        except BaseException:
            await self._renewed.stop()
            raise
        self._background.start(self._follow())

    def _make(self) -> Any:
        return AIOKafkaConsumer(
            **client_options(self._kafka, f"relaygr-tail-{self._partitions[0].topic}"),
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=self._wait_ms,
            fetch_min_bytes=self._least_bytes,
        )

    async def _begin(self, consumer: Any) -> None:
        """Assign the partitions to a new consumer, at the next offsets."""
        if not self._next:
            # Raises at once if an ACL is missing; a request for offsets would be retried until the timeout.
            await consumer._client._wait_on_metadata(self._partitions[0].topic)
            # Before the first fetch: a request waits behind a fetch that waits for records on the same connection.
            self._ends = await consumer.end_offsets(self._partitions)
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

    async def stop(self) -> None:
        """Stop following and disconnect."""
        await self._background.end()
        await self._renewed.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


class _Progress:
    """Gives up reading what exists when its brokers send nothing: `note` raises BrokerUnavailable once positions have
    stood still for a request timeout."""

    def __init__(self, kafka: Kafka, topic: str) -> None:
        self._kafka = kafka
        self._topic = topic
        self._positions: list[int] = []
        self._moved_s = 0.0

    def note(self, positions: list[int]) -> None:
        now_s = time.monotonic()
        if positions != self._positions:
            self._positions, self._moved_s = positions, now_s
        elif now_s - self._moved_s > self._kafka.request_timeout_ms / 1e3:
            raise BrokerUnavailable(
                f"cannot read {self._topic}: its brokers have sent nothing for {self._kafka.request_timeout_ms} ms, "
                f"though more is there; check that they run, and the quotas of this client"
            )


async def read_all(kafka: Kafka, topic: str, partitions: Sequence[int]) -> list[Record]:
    """Every record that is in these partitions now, in order within each. Raises as TopicTail.start does."""
    records: list[Record] = []
    async with TopicTail(kafka, topic, partitions, "earliest", records.extend):
        return records


async def read_back(kafka: Kafka, topic: str, partition: int = 0) -> AsyncGenerator[list[Record], None]:
    """The partition's records from its end to its beginning, in chunks, each in order; the newest chunk comes first.

    For who looks for one record of a long log, and stops where it is found. Each chunk covers twice the offsets of the
    one before, since compaction leaves few records in the old ones. Raises as TopicTail.start does.
    """
    one = TopicPartition(topic, partition)
    options = client_options(kafka, f"relaygr-back-{topic}")
    consumer = AIOKafkaConsumer(**options, group_id=None, enable_auto_commit=False)
    try:
        with typed_errors(kafka, f"read {topic}"):
            await consumer.start()
            pass_unreadable(consumer)
            await consumer._client._wait_on_metadata(topic)  # see TopicTail._begin
            end = (await consumer.end_offsets([one]))[one]
            begin = (await consumer.beginning_offsets([one]))[one]
            consumer.assign([one])
            back = RECENT_RECORDS
            while end > begin:
                start, back = max(begin, end - back), 2 * back
                consumer.seek(one, start)
                chunk: list[Record] = []
                progress = _Progress(kafka, topic)
                while (position := await consumer.position(one)) < end:
                    progress.note([position])
                    chunk += [record for record in await read(consumer) if record.offset < end]
                yield chunk
                end = start
    finally:
        await end_client("the reader of a log's end", consumer)
