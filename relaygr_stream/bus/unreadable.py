"""Reads around records that aiokafka cannot unpack.

A record whose header has a name that is not UTF-8 makes `getmany` raise, over and over, and with it what else was at
hand is lost: one such message, which any producer can send and every broker takes, would end every process that reads
the partition, and the next one. So would a batch that a broker's disk has changed, whose checksum is wrong. So the
reader goes back to what it handed out, finds the record, hands out a stand-in without a value, which its consumer
buries like any other bad message, and goes on behind it. Of a changed batch every record gets one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, Final

import structlog
from aiokafka import TopicPartition
from aiokafka.errors import CorruptRecordException

from relaygr_stream.bus.records import Record, as_record
from relaygr_stream.telemetry.limiter import LogLimiter

log = structlog.get_logger(__name__)
limited = LogLimiter().limited

#: What `getmany` raises for such a record, or for one of such a batch.
Unreadable = (UnicodeDecodeError, CorruptRecordException)
#: Header of a stand-in, and so of its dead letter: what could not be read. The record itself is in the log, at the
#: origin that the dead letter names.
HEADER_UNREADABLE: Final = "relaygr-unreadable"
#: Pause while what was fetched anew is on its way.
FETCH_S: Final = 0.005
#: Ordinary reading goes on when nothing unreadable came for a fetch's wait and this long; it comes back if need be.
#: A fetch under way, which waits for other partitions, keeps the next one back: if we left before what we went back to
#: has come, ordinary reading would stumble over the same record, and so on for ever.
PASSED_S: Final = 1.0


async def read_around(
    consumer: Any,
    partitions: Callable[[], Collection[TopicPartition]],
    position: Callable[[TopicPartition], int | None],
    take: Callable[[list[Record]], None],
    fetch_wait_s: float,
) -> None:
    """Read partition by partition, and record by record where it is needed, until the unreadable are passed.

    consumer: an AIOKafkaConsumer. partitions: those being read now. position: the next offset to hand out, which `take`
    moves on; None: the partition is no longer ours. fetch_wait_s: how long the consumer's fetches wait for records.
    Raises what getmany raises otherwise. Records wait up to FETCH_S here, and each turn asks every partition, so it
    ends under traffic as well.
    """
    for partition in partitions():
        _seek(consumer, partition, position(partition))  # what was unpacked along with the bad one is lost
    suspects: set[TopicPartition] = set()
    clock = asyncio.get_running_loop().time
    last_s = clock()
    while clock() - last_s < fetch_wait_s + PASSED_S:
        pause_s = FETCH_S
        for partition in list(partitions()):
            one = partition in suspects
            try:
                batch = await consumer.getmany(partition, timeout_ms=0, max_records=1 if one else None)
            except Unreadable as error:
                at, last_s, pause_s = position(partition), clock(), 0.0
                if one and at is not None:
                    take([_stand_in(partition, at, error)])
                    at += 1
                    suspects.discard(partition)
                else:
                    suspects.add(partition)
                _seek(consumer, partition, at)
                continue
            for messages in batch.values():
                pause_s = 0.0
                take([as_record(message) for message in messages])
        await asyncio.sleep(pause_s)


def _seek(consumer: Any, partition: TopicPartition, offset: int | None) -> None:
    if offset is not None:
        consumer.seek(partition, offset)


def _stand_in(partition: TopicPartition, offset: int, error: Exception) -> Record:
    header = isinstance(error, UnicodeDecodeError)
    why = (
        f"the name of a header is not UTF-8: {error}" if header else f"its batch was changed since it was sent: {error}"
    )
    limited(log.warning, "unreadable")(
        "record unreadable", topic=partition.topic, lane=partition.partition, offset=offset, detail=why
    )
    return Record(partition.topic, partition.partition, offset, 0, None, None, ((HEADER_UNREADABLE, why.encode()),))
