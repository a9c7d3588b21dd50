"""Reads what partitions hold now, once, without a group: all of it, or from the end back to the beginning."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, KafkaTimeoutError

from relaygr_stream.bus.aiokafka_compat import client_options, end_client, read, typed_errors
from relaygr_stream.bus.away import Away, leader_of
from relaygr_stream.bus.producer import NO_LEADER
from relaygr_stream.bus.unreadable import pass_unreadable
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.records import Record

#: Offsets of the first chunk of `read_back`: what living processes state is among them (bus/tail.py, RECENT_RECORDS).
FIRST_CHUNK: Final = 10_000


class OffsetSpan(NamedTuple):
    """The offsets that a partition holds: begin ≤ offset < end."""

    begin: int
    end: int


async def read_all(kafka: Kafka, topic: str, partitions: Sequence[int], away: Away | None = None) -> list[Record]:
    """Every record that is in these partitions now, in order within each.

    away: gets the partitions that no broker serves, whose records are missing, or the last of them; None: the first of
    them raises. It waits for as long as records come, and then for at most a request timeout.
    Raises PartitionsAway, BrokerUnavailable, BrokerError.
    """
    missing = Away()
    async with _reader(kafka, topic) as consumer:
        held = await _spans(consumer, topic, partitions, missing)
        found = {TopicPartition(topic, partition): span for partition, span in held.items() if span.begin < span.end}
        records = await _read(kafka, consumer, found, missing) if found else []
    if away is None:
        missing.check()
    else:
        away.update(missing)
    return records


async def spans(kafka: Kafka, topic: str, partitions: Sequence[int], away: Away) -> dict[int, OffsetSpan]:
    """What each of these partitions holds, of those that a broker serves; `away` gets the others.

    Raises BrokerUnavailable, BrokerError.
    """
    async with _reader(kafka, topic) as consumer:
        return await _spans(consumer, topic, partitions, away)


async def read_back(kafka: Kafka, topic: str, partition: int = 0) -> AsyncGenerator[list[Record], None]:
    """The partition's records from its end to its beginning, in chunks, each in order; the newest chunk comes first.

    For who looks for one record of a long log, and stops where it is found. Each chunk covers twice the offsets of the
    one before, since compaction leaves few records in the old ones. Raises as `read_all` does.
    """
    one, away = TopicPartition(topic, partition), Away()
    async with _reader(kafka, topic) as consumer:
        held = await _spans(consumer, topic, [partition], away)
        away.check()
        begin, end = held[partition]
        back = FIRST_CHUNK
        while end > begin:
            start, back = max(begin, end - back), 2 * back
            chunk = await _read(kafka, consumer, {one: OffsetSpan(start, end)}, away)
            away.check()
            yield chunk
            end = start


async def read_since(
    kafka: Kafka, topic: str, partitions: Sequence[int], since_ms: int
) -> AsyncGenerator[list[Record], None]:
    """The records of these partitions from that Unix time on, as they come, in order within each: for who keeps few.

    Raises as `read_all` does.
    """
    away = Away()
    async with _reader(kafka, topic) as consumer:
        held = await _spans(consumer, topic, partitions, away)
        away.check()
        asked = {TopicPartition(topic, partition): since_ms for partition in partitions}
        since = await consumer.offsets_for_times(asked)
        # None, or from the embedded broker a negative time: there are no such records.
        begins = {one: found.offset for one, found in since.items() if found and found.timestamp >= 0}
        spans = {one: OffsetSpan(begin, held[one.partition].end) for one, begin in begins.items()}
        if spans := {one: span for one, span in spans.items() if span.begin < span.end}:
            async for batch in _batches(kafka, consumer, spans, away):
                yield batch
        away.check()


async def read_from(kafka: Kafka, topic: str, partition: int, offset: int) -> AsyncGenerator[list[Record], None]:
    """The partition's records from this offset on, as they come, in order. Raises as `read_all` does."""
    one, away = TopicPartition(topic, partition), Away()
    async with _reader(kafka, topic) as consumer:
        held = await _spans(consumer, topic, [partition], away)
        away.check()
        begin, end = max(offset, held[partition].begin), held[partition].end
        if begin < end:
            async for batch in _batches(kafka, consumer, {one: OffsetSpan(begin, end)}, away):
                yield batch
        away.check()


@asynccontextmanager
async def _reader(kafka: Kafka, topic: str) -> AsyncIterator[Any]:
    """A consumer that knows the topic."""
    options = client_options(kafka, f"relaygr-reader-{topic}")
    consumer = AIOKafkaConsumer(**options, group_id=None, enable_auto_commit=False, auto_offset_reset="earliest")
    try:
        with typed_errors(kafka, f"read {topic}"):
            await consumer.start()
            pass_unreadable(consumer)
            # Raises at once if an ACL is missing; a request for offsets would be retried until the timeout.
            await consumer._client._wait_on_metadata(topic)
            yield consumer
    finally:
        await end_client(f"the reader of {topic}", consumer)


async def _spans(consumer: Any, topic: str, partitions: Sequence[int], away: Away) -> dict[int, OffsetSpan]:
    """What each partition holds; `away` gets those that no broker tells of.

    Brokers that did not answer are asked once more: while aiokafka asks one that hangs for metadata, a request to any
    other may wait in vain.
    """
    found: dict[int, OffsetSpan] = {}
    silent = [TopicPartition(topic, partition) for partition in partitions]
    for _ in range(2):
        answers = await asyncio.gather(*(_span(consumer, one) for one in silent))
        found |= {one.partition: span for one, span in zip(silent, answers, strict=True) if span is not None}
        silent = [one for one in silent if one.partition not in found]
        if all(leader_of(consumer, one) == NO_LEADER for one in silent):
            break
    for one in silent:
        away.add(one.topic, one.partition, leader_of(consumer, one))
    return found


async def _span(consumer: Any, one: TopicPartition) -> OffsetSpan | None:
    """What the partition holds; None: no broker says so within the request timeout. Raises aiokafka's other errors.

    Each partition is asked for alone: aiokafka gives all of a request up for one without a leader.
    """
    try:
        begin = (await consumer.beginning_offsets([one]))[one]
        end = (await consumer.end_offsets([one]))[one]
    except KafkaError as error:
        if not (error.retriable or isinstance(error, KafkaTimeoutError)):
            raise
        return None
    return OffsetSpan(begin, end)


async def _read(kafka: Kafka, consumer: Any, spans: dict[TopicPartition, OffsetSpan], missing: Away) -> list[Record]:
    """The records of these spans; partitions that stop answering are added to `missing`."""
    return [record async for batch in _batches(kafka, consumer, spans, missing) for record in batch]


async def _batches(
    kafka: Kafka, consumer: Any, spans: dict[TopicPartition, OffsetSpan], missing: Away
) -> AsyncGenerator[list[Record], None]:
    """As _read, as they come."""
    ends = {one: span.end for one, span in spans.items()}
    consumer.assign(list(spans))
    for one, span in spans.items():
        consumer.seek(one, span.begin)
    progress = Progress(kafka)
    while behind := await _behind(consumer, ends):
        if progress.stands_still(list(behind.values())):
            for one, position in behind.items():
                now = await _span(consumer, one)  # a log made anew meanwhile ends earlier
                if now is None or now.end > position:
                    missing.add(one.topic, one.partition, leader_of(consumer, one))
                del ends[one]
            continue
        found = await read(consumer)
        yield [each for each in found if each.offset < spans[TopicPartition(each.topic, each.lane)].end]


async def _behind(consumer: Any, ends: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
    """The positions of the partitions that are not read to their ends; -1: none, since its begin has moved.

    Positions count, since a compacted log's last offsets may be empty.
    """
    found = {}
    for one, end in ends.items():
        state = consumer._subscription.subscription.assignment.state_value(one)
        position = await consumer.position(one) if state.has_valid_position else -1
        if position < end:
            found[one] = position
    return found


class Progress:
    """Tells when brokers send nothing of what they have."""

    def __init__(self, kafka: Kafka) -> None:
        self._patience_s = kafka.request_timeout_ms / 1e3
        self._positions: list[int] = []
        self._moved_s = 0.0

    def stands_still(self, positions: list[int]) -> bool:
        """Whether these positions have been the same for a request timeout."""
        now_s = time.monotonic()
        if positions != self._positions:
            self._positions, self._moved_s = positions, now_s
        return now_s - self._moved_s > self._patience_s
