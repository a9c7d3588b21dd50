"""Records that cannot be read: a stand-in is handed out in the place of each, and reading goes on behind it.

What any producer can send, or a broker's failing disk can make, must not end those who read the partition, nor the next
ones: a batch by an unknown codec, one that unpacks to gigabytes, a header's name that is not UTF-8, a flipped bit.
aiokafka raises at such a batch, over and over, or in its own task. So its unpacking is replaced, for our consumers
alone. Consumers bury a stand-in, which has no value, like any other bad message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from types import FunctionType, MethodType
from typing import Any, Final

import structlog
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.consumer import fetcher as aiokafka_fetcher

from relaygr_stream.bus.batches import Unreadable, read_batch, span_of, split
from relaygr_stream.telemetry.limiter import LogLimiter

log = structlog.get_logger(__name__)
limited = LogLimiter().limited

#: Header of a stand-in, and so of its dead letter: what could not be read. The record itself is in the log, at the
#: origin that the dead letter names.
HEADER_UNREADABLE: Final = "relaygr-unreadable"
#: Of one batch so many records have a stand-in each; the last one names all that follow it.
STAND_INS: Final = 1000


def pass_unreadable(consumer: Any) -> None:
    """Make an AIOKafkaConsumer, started and with nothing assigned yet, hand out stand-ins instead of raising."""
    fetcher = consumer._fetcher

    def end_of(partition: TopicPartition) -> int:
        """Where the partition ended as the broker answered: nothing read can lie beyond."""
        return int(fetcher._subscriptions.subscription.assignment.state_value(partition).highwater)

    # aiokafka's own reading of an answer, in which two names mean what is in here.
    ours = {"MemoryRecords": _Answer, "PartitionRecords": partial(_Records, end_of)}
    code = aiokafka_fetcher.Fetcher._proc_fetch_request.__code__
    fetcher._proc_fetch_request = MethodType(FunctionType(code, {**vars(aiokafka_fetcher), **ours}), fetcher)


class _Answer:
    """In place of aiokafka's MemoryRecords: a partition's bytes in the answer to a fetch, and no look at them."""

    def __init__(self, content: bytes | None) -> None:
        self.content = content or b""

    def has_next(self) -> bool:
        return bool(self.content)

    def size_in_bytes(self) -> int:
        return len(self.content)


class _Records(aiokafka_fetcher.PartitionRecords):  # type: ignore[misc]  # untyped
    """In place of aiokafka's: the records from the fetch's offset on, none left out without a stand-in."""

    next_fetch_offset: int

    def __init__(self, end_of: Callable[[TopicPartition], int], partition: TopicPartition, *others: Any) -> None:
        self._end = end_of(partition)
        super().__init__(partition, *others)

    def _unpack_records(self) -> Iterator[ConsumerRecord]:
        began_at = self.next_fetch_offset
        batches = list(split(self._records.content))
        for data, follower in zip_longest(batches, batches[1:]):
            try:
                batch = read_batch(data, self._end, self._check_crcs)
                if follower and span_of(follower).base < batch.span.end:
                    raise Unreadable(f"its batch claims offsets up to {batch.span.end - 1}, and so does the next one")
                if not batch.control:
                    yield from self._read(batch.records, batch.span.base if batch.dense else None, batch.span.end)
            except Exception as error:  # whatever hostile bytes make a decoder raise
                yield from self._stand_ins(self._end_of_bad(data, follower), error)
                break  # its length may be wrong as well: the next fetch tells what follows
            self.next_fetch_offset = max(self.next_fetch_offset, batch.span.end)
        if self.next_fetch_offset == began_at:
            # Else the same bytes would come again, for ever.
            yield from self._stand_ins(began_at + 1, Unreadable("the broker's answer holds no whole batch behind it"))

    def _read(self, records: Any, base: int | None, end: int) -> Iterator[ConsumerRecord]:
        """base: where the offsets have no gaps."""
        for index, record in enumerate(records):
            offset = record.offset
            if offset >= end or (base is not None and offset != base + index):
                raise Unreadable(f"record {index} of its batch claims the offset {offset}")
            if offset >= self.next_fetch_offset:  # a fetch within a batch brings the whole batch
                self.next_fetch_offset = offset + 1
                yield self._consumer_record(self._tp, record)

    def _end_of_bad(self, batch: memoryview, follower: memoryview | None) -> int:
        """Where reading goes on: where this header and the next one say, as far as that can be; the nearer of the two,
        because what is read again is not lost.
        """
        at = self.next_fetch_offset
        ends = [span_of(batch).end, *([span_of(follower).base] if follower else [])]
        return min((end for end in ends if at <= end <= self._end), default=at + 1)

    def _stand_ins(self, end: int, error: Exception) -> Iterator[ConsumerRecord]:
        """One for each offset up to end, or for the rest of them."""
        if isinstance(error, UnicodeDecodeError):
            why = f"the name of a header is not UTF-8: {error}"
        else:
            why = str(error) if isinstance(error, Unreadable) else f"its batch cannot be read: {error!r}"
        at = self.next_fetch_offset
        for offset in range(at, min(end, at + STAND_INS)):
            rest = end - offset if offset == at + STAND_INS - 1 else 1
            self.next_fetch_offset = offset + rest
            detail = why if rest == 1 else f"{rest} records from here on: {why}"
            limited(log.warning, "unreadable")(
                "record unreadable", topic=self._tp.topic, lane=self._tp.partition, offset=offset, detail=detail
            )
            headers = ((HEADER_UNREADABLE, detail.encode()),)
            yield ConsumerRecord(self._tp.topic, self._tp.partition, offset, 0, 0, None, None, None, -1, -1, headers)
