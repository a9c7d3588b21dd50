"""Puts a message into a batch of an AIOKafkaProducer without waiting.

aiokafka's `send` is a coroutine, which only a task can begin and go on without, and it makes two sets of a topic's
partitions for each message.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiokafka import TopicPartition
from aiokafka.record.default_records import DefaultRecordBatchBuilder


def buffered(
    producer: Any, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes]]
) -> asyncio.Future[Any] | None:
    """As AIOKafkaProducer.send, for a started producer without serializers and transactions; the future of the
    acknowledgement.

    None, and nothing is buffered, where `send` would wait or raise: the producer has ended, the partition is not known,
    its last batch has no room, or the message is too large.
    """
    accumulator, partitions = producer._message_accumulator, producer.client.cluster._partitions.get(topic)
    if accumulator._closed or accumulator._exception is not None or not partitions or partition not in partitions:
        return None
    if DefaultRecordBatchBuilder.estimate_size_in_bytes(key, value, headers) > producer._max_request_size:
        return None
    where = TopicPartition(topic, partition)
    batches = accumulator._batches.get(where)
    batch = batches[-1] if batches else accumulator._append_batch(accumulator.create_builder(), where)
    appended: asyncio.Future[Any] | None = batch.append(key, value, None, headers=headers)
    return appended
