"""Serves the page to browsers of this machine, without a gateway: joins no group, writes nothing."""

from __future__ import annotations

import socket
from functools import partial
from typing import Final

from relaygr_stream.bus.routes import RoutesTail
from relaygr_stream.bus.tail import STATUS_PAUSE_S, TopicTail
from relaygr_stream.bus.topics import topic_exists, verified_topics
from relaygr_stream.ops.dashboard.board import HEADERS, Board
from relaygr_stream.ops.dashboard.trace import WITHIN_S
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.listener import Known, Listener
from relaygr_stream.telemetry.pages import (
    GRACE_S,
    JSON,
    MAX_CLIENTS,
    REQUEST_S,
    TEXT,
    Page,
    PageRequest,
    not_found,
    respond,
    serve_one,
)
from relaygr_stream.telemetry.printable import Say
from relaygr_stream.wire.routes import routes_topic
from relaygr_stream.wire.worker_status import StatusReader

HOST: Final = "127.0.0.1"
#: From a client's first byte to the end of its answer: a trace takes that long at most.
ANSWER_S: Final = WITHIN_S + REQUEST_S
PATHS: Final = ("/", "/live", "/trace?id=REQUEST")
_HTML: Final = "text/html; charset=utf-8"
#: What a browser of this machine asks for, a tunnel's included. A page elsewhere whose name leads here has another
#: name, and must not read this one (DNS rebinding).
_HOSTS: Final = ("127.0.0.1", "localhost")


async def run_dashboard(settings: Settings, port: int, on_ready: Say) -> None:
    """Serve until cancelled. on_ready: gets the address. port: 0 for any free one.

    Raises BrokerUnavailable, TopicError, ConfigError where it cannot listen.
    """
    topics, background = await verified_topics(settings.kafka), Background()
    reader = StatusReader.from_settings(settings, topics)
    await reader.prepare()
    board = Board(settings, topics, reader)

    async def serve(connection: socket.socket, _: Known) -> None:
        await serve_one(connection, lambda asked: answer(board, asked), ANSWER_S)

    advice = "give another --port (0: any free one)"
    listener = Listener("dashboard", HOST, port, serve, MAX_CLIENTS, GRACE_S, REQUEST_S, advice)
    status, said = topics.worker_status.name, routes_topic(topics)
    exists = partial(topic_exists, settings.kafka, said)
    routes = RoutesTail(settings.kafka, said.name, reader, exists, board.view.take_routes)
    try:
        async with TopicTail(
            settings.kafka, status, [0], "recent", board.view.on_records, pause_s=STATUS_PAUSE_S
        ) as tail:
            board.view.live = True
            background.watch(tail.failed)
            await routes.start()
            background.start(routes.run())
            on_ready(f"http://{HOST}:{listener.port}/")
            await background.until(listener.run())
    finally:
        listener.close()
        await background.end()


async def answer(board: Board, asked: PageRequest) -> Page:
    """The page that a request gets."""
    if asked.headers.get("host", "").rpartition(":")[0] not in _HOSTS:
        return respond("421 Misdirected Request", TEXT, f"This is served to {' and '.join(_HOSTS)} only.\n")
    if asked.path == "/live":
        return respond("200 OK", _HTML, await board.live(), *HEADERS.items())
    if asked.path == "/trace":
        return respond("200 OK", _HTML, await board.trace(asked.query), *HEADERS.items())
    if asked.path != "/":
        return not_found(asked.path, PATHS)
    if JSON in asked.headers.get("accept", ""):
        return respond("200 OK", JSON, board.json())
    return respond("200 OK", _HTML, await board.page(), *HEADERS.items())
