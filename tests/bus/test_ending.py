"""A client's connections are closed whatever its start() or stop() does, and however long that takes nobody waits."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.conn import AIOKafkaConnection, create_conn

from relaygr_stream.bus import aiokafka_patches
from relaygr_stream.bus.ages import LogEnds
from relaygr_stream.bus.aiokafka_compat import client_options, end_client
from relaygr_stream.bus.renewed import Renewed
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.topic_files import load_topics
from tests.waiting import WITHIN_S, until


async def test_connections_are_closed_when_a_fetch_is_given_up(embedded_settings: Kafka) -> None:
    """aiokafka cancels its fetches and lets the cancellation of one that was waiting for its broker escape."""
    await apply_topics(embedded_settings)
    consumer = AIOKafkaConsumer(**client_options(embedded_settings, "test"), group_id=None)
    await consumer.start()
    consumer.assign([TopicPartition(load_topics(embedded_settings).scores.name, 0)])
    connections = consumer._client._conns
    await until(lambda: any(connection.connected() for connection in connections.values()), "connected")
    consumer._fetcher._pending_tasks.add(asyncio.create_task(asyncio.sleep(60)))  # as one that waits to connect
    await end_client("a test's reader", consumer)
    assert connections
    assert not any(connection.connected() for connection in connections.values())


async def test_a_start_that_is_cancelled_leaves_no_connection(embedded_settings: Kafka) -> None:
    """It is cancelled while it waits for the cluster's metadata, on a connection of its own."""
    host, port = embedded_settings.bootstrap.rsplit(":", 1)
    withheld, closed = asyncio.Event(), asyncio.Event()

    async def serve(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        broker, to_broker = await asyncio.open_connection(host, int(port))

        async def answer() -> None:
            size = await broker.readexactly(4)
            to_client.write(size + await broker.readexactly(int.from_bytes(size)))  # its versions
            await broker.read(1)  # the metadata
            withheld.set()

        answering = asyncio.create_task(answer())
        while sent := await client.read(65536):
            to_broker.write(sent)
        closed.set()
        answering.cancel()
        to_broker.close()
        to_client.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        beside = msgspec.structs.replace(embedded_settings, bootstrap=f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        reader = Renewed(beside, "a test's reader", LogEnds(beside, "test"))
        starting = asyncio.create_task(reader.start())
        await withheld.wait()
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
        async with asyncio.timeout(WITHIN_S):
            await closed.wait()
        assert reader.client is None


async def test_a_connection_that_comes_after_the_end_is_closed(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    await apply_topics(embedded_settings)
    monkeypatch.setattr(
        AIOKafkaConnection, "send", aiokafka_patches.send
    )  # the consumer learns of the topic as it starts
    consumer = AIOKafkaConsumer(**client_options(embedded_settings, "test"), group_id=None)
    await consumer.start()
    made: list[AIOKafkaConnection] = []
    coming, ended = asyncio.Event(), asyncio.Event()

    async def slowly(*arguments: Any, **options: Any) -> AIOKafkaConnection:
        made.append(await create_conn(*arguments, **options))
        coming.set()
        await ended.wait()
        return made[0]

    monkeypatch.setattr("aiokafka.client.create_conn", slowly)
    asking = asyncio.create_task(consumer.end_offsets([TopicPartition(load_topics(embedded_settings).scores.name, 0)]))
    await coming.wait()
    await end_client("a test's reader", consumer)
    ended.set()
    await until(lambda: not made[0].connected(), "the connection is closed")
    assert len(made) == 1
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
