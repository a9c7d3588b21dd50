"""The gateway process: one relay client, one view of the fleet, HTTP in front of them."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import AsyncExitStack
from typing import Final

from relaygr_stream.bus.tail import STATUS_PAUSE_S, TopicTail
from relaygr_stream.bus.topics import verified_topics
from relaygr_stream.client import RelayClient
from relaygr_stream.gateway.app import Door
from relaygr_stream.gateway.connections import HttpServer
from relaygr_stream.gateway.tokens import TenantTokens
from relaygr_stream.history.store import open_store
from relaygr_stream.ops.dashboard.board import Board
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.wire.worker_status import StatusReader

#: How often it looks whether its client still works.
LOOK_S: Final = 0.5


async def run_gateway(context: ProcessContext) -> None:
    """Serve until `context.stop` is set, then answer what was accepted. Raises RelayError where it cannot go on."""
    settings, background = context.settings, Background()
    tokens = TenantTokens(settings.gateway)
    topics = await verified_topics(settings.kafka)
    reader = StatusReader.from_settings(settings, topics)
    await reader.prepare()
    name = f"gateway-{socket.gethostname()}-{os.getpid()}"
    relay = RelayClient(settings=settings, client_id=name, registry=context.registry)
    board = Board(settings, relay.topics, reader, links='<a href="docs">API</a> <a href="metrics">metrics</a>')
    status = topics.worker_status.name
    tail = TopicTail(settings.kafka, status, [0], "recent", board.view.on_records, pause_s=STATUS_PAUSE_S)
    store = open_store(settings.history) if settings.history.store else None
    async with AsyncExitStack() as stack:
        if store is not None:
            stack.push_async_callback(store.close)
        await stack.enter_async_context(relay)
        await stack.enter_async_context(tail)
        board.view.live = True
        background.watch(tail.failed)
        door = Door(context, relay, board, tokens, store)
        connections = HttpServer(door.application, settings.gateway)
        door.metrics.connections.set_function(lambda: connections.count)
        serving = background.start(connections.run())
        background.start(_look(relay))
        context.conditions.append(lambda: relay.trouble)
        context.set_ready(True)
        scheme = "https" if settings.gateway.tls_certificate else "http"
        context.log.info("serving", url=f"{scheme}://{settings.gateway.host}:{connections.port}")
        try:
            await background.until(context.stop.wait())
            await connections.drain(settings.gateway.drain_ms / 1e3)
        finally:
            serving.cancel()
            await background.end()


async def _look(relay: RelayClient) -> None:
    """End the process, for its supervisor to restart it, when answers can no longer be read."""
    while True:
        if (error := relay.error) is not None:
            raise error
        await asyncio.sleep(LOOK_S)
