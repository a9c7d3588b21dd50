"""Connections of strangers: those in excess are closed, whatever they had come to."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

from relaygr_stream.telemetry.listener import Known, Listener

CLIENTS = 20


async def test_a_connection_in_excess_is_closed_even_if_serving_it_has_not_begun() -> None:
    """All are accepted in one turn of the loop, so most of them are replaced before their task begins."""

    async def serve(connection: socket.socket, known: Known) -> None:
        del known
        with connection:
            await asyncio.get_running_loop().sock_recv(connection, 1)

    listener = Listener("telemetry", "127.0.0.1", 0, serve, most=1, grace_s=0.0)
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", listener.port))) for _ in range(CLIENTS)]
        running = asyncio.create_task(listener.run())
        for client in clients:
            client.setblocking(False)
            assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
