"""A connection that was closed a moment ago, on the event loop that the processes run on."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from aiokafka.conn import create_conn
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest

from relaygr_stream.settings.schema import Kafka


def test_a_request_on_it_fails_as_on_any_lost_connection(embedded_settings: Kafka) -> None:
    host, port = embedded_settings.bootstrap.rsplit(":", 1)

    async def request_after_the_end() -> None:
        connection = await create_conn(host, int(port))
        connection._writer.transport.abort()
        await asyncio.sleep(0)  # the socket is closed, and aiokafka does not know yet
        with pytest.raises(KafkaConnectionError, match="closed"):
            await connection.send(MetadataRequest([]))
        assert not connection.connected()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(request_after_the_end())
