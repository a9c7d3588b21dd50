"""A consumer's connections are closed whatever its stop() does, and however long that takes nobody waits."""

from __future__ import annotations

import asyncio

from aiokafka import AIOKafkaConsumer, TopicPartition

from relaygr_stream.bus.aiokafka_compat import client_options, end_consumer
from relaygr_stream.bus.topics import apply_topics, load_topics
from relaygr_stream.settings.schema import Kafka
from tests.waiting import until


async def test_connections_are_closed_when_a_fetch_is_given_up(embedded_settings: Kafka) -> None:
    """aiokafka cancels its fetches and lets the cancellation of one that was waiting for its broker escape."""
    await apply_topics(embedded_settings)
    consumer = AIOKafkaConsumer(**client_options(embedded_settings, "test"), group_id=None)
    await consumer.start()
    consumer.assign([TopicPartition(load_topics(embedded_settings).scores.name, 0)])
    connections = consumer._client._conns
    await until(lambda: any(connection.connected() for connection in connections.values()), "connected")
    consumer._fetcher._pending_tasks.add(asyncio.create_task(asyncio.sleep(60)))  # as one that waits to connect
    await end_consumer("a test's reader", consumer)
    assert connections
    assert not any(connection.connected() for connection in connections.values())
