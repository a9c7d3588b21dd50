"""Reads whole partitions without a group: the compacted `worker-status`, or a client's own partition of `scores`.

Commits nothing, shares with nobody. Knows nothing of what the records contain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from relaygr_stream.bus.aiokafka_compat import broker_error, client_options, typed_errors
from relaygr_stream.bus.renewed import Renewed
from relaygr_stream.bus.unreadable import pass_unreadable
from relaygr_stream.errors import BrokerUnavailable
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.records import Record, as_record

log = structlog.get_logger(__name__)

#: How long one wait for records lasts; only how often an idle loop turns.
WAIT_MS: Final = 1000
#: A relaxed tail has its records so late, or as soon as there are so many bytes: a fetch costs the broker and us half a
#: millisecond of a core each, whatever it brings.
RELAXED_MS: Final = 300
RELAXED_BYTES: Final = 256 * 1024


class TopicTail:
    """Follows some partitions of one topic, over broker restarts.

    start: "earliest", or "latest" for what is produced after start() returned. on_records(records): in order per
    partition (`Record.lane`), on the loop, quick. relaxed: they may come RELAXED_MS late, many at a time. If the
    broker lost the offset (log expired, or begun anew), reading goes on from the earliest record there is, so a record
    may come twice, and none is passed over that exists. A refusal, or the end of something inside aiokafka, is no end:
    reading is tried again, less and less often, and goes on where it was.
    """

    def __init__(
        self,
        kafka: Kafka,
        topic: str,
        partitions: Sequence[int],
        start: Literal["earliest", "latest"],
        on_records: Callable[[list[Record]], None],
        *,
        relaxed: bool = False,
    ) -> None:
        self._kafka = kafka
        self._wait_ms = RELAXED_MS if relaxed else kafka.tail_max_wait_ms
        self._least_bytes = RELAXED_BYTES if relaxed else 1
        self._partitions = [TopicPartition(topic, partition) for partition in partitions]
        self._start = start
        self._on_records = on_records
        self._next: dict[TopicPartition, int] = {}  # offsets behind what was handed out
        self._ends: dict[TopicPartition, int] = {}  # where the log ended at the start
        self._turned = asyncio.Event()  # something was read, or nothing will be any more
        self._renewed = Renewed(kafka, f"the reader of {topic}", self._make, self._begin)
        self._task: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[None] | None = None

    @property
    def failed(self) -> asyncio.Future[None]:
        """Never completes unless on_records failed; then it raises why."""
        assert self._failed is not None, "start() comes first"
        return self._failed

    @property
    def trouble(self) -> str | None:
        """Why nothing is read at the moment."""
        return self._renewed.trouble

    async def start(self) -> None:
        """Connect, and with "earliest" hand out everything there is before returning.

        Raises BrokerUnavailable, BrokerError.
        """
        self._failed = asyncio.get_running_loop().create_future()
        self._failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())  # may go unwatched
        await self._renewed.start()
        ends = self._ends
        try:
            with typed_errors(self._kafka, f"read {self._partitions[0].topic}"):
                while await self._behind(ends):
                    await self._read(await self._renewed.present())
        except BaseException:
            await self._renewed.stop()
            raise
        self._task = asyncio.create_task(self._follow())

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
        """Point a new consumer at where we are."""
        pass_unreadable(consumer)
        if not self._next:
            # Raises at once where an ACL is missing; the offsets of such a topic would be asked for until the timeout.
            await consumer._client._wait_on_metadata(self._partitions[0].topic)
            # Before anything is fetched: what is asked on a connection waits for a fetch that waits for records.
            self._ends = await consumer.end_offsets(self._partitions)
            earliest = self._start == "earliest"
            self._next = dict(await consumer.beginning_offsets(self._partitions) if earliest else self._ends)
        consumer.assign(self._partitions)
        for partition, offset in self._next.items():
            consumer.seek(partition, offset)

    async def catch_up(self) -> None:
        """Return when all that is there now has been handed out. Raises BrokerError, and what `failed` does."""
        with typed_errors(self._kafka, f"read {self._partitions[0].topic}"):
            ends = await (await self._renewed.present()).end_offsets(self._partitions)
            self._turned.clear()
            while not self.failed.done() and await self._behind(ends):
                await self._turned.wait()
                self._turned.clear()
        if self.failed.done():
            self.failed.result()

    async def stop(self) -> None:
        """Stop following and disconnect."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._renewed.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _behind(self, ends: Mapping[TopicPartition, int]) -> bool:
        """By position, not by records: the last offsets of a compacted partition may hold none."""
        consumer = await self._renewed.present()
        return any([await consumer.position(partition) < end for partition, end in ends.items()])

    async def _follow(self) -> None:
        try:
            while True:
                try:
                    consumer = await self._renewed.present()
                    await self._read(consumer)
                except BrokerUnavailable:
                    continue  # it is told by `trouble`, and tried again
                except (KafkaError, OSError) as error:
                    if consumer is self._renewed.client:
                        self._renewed.renew(str(broker_error(self._kafka, "read it", error)))
        except Exception as error:
            log.error("tail_failed", topic=self._partitions[0].topic, error=repr(error))
            self.failed.set_exception(error)
            self._turned.set()

    async def _read(self, consumer: Any) -> None:
        batches = await consumer.getmany(timeout_ms=WAIT_MS)
        self._take([as_record(message) for messages in batches.values() for message in messages])

    def _take(self, records: list[Record]) -> None:
        for record in records:
            self._next[TopicPartition(record.topic, record.lane)] = record.offset + 1
        if records:
            self._on_records(records)
        self._turned.set()
