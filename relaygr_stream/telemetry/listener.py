"""A listening socket whose strangers are bounded: those who have not said who they are, or what they want.

Strangers may open as many connections as they like; so many are held at once, and of them the oldest gives way to the
next, once it has had a grace in which an honest one is done. Running out of descriptors is waited out. Knows nothing of
TLS or protocols.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from relaygr_stream.telemetry.limiter import LogLimiter

_log = structlog.get_logger(__name__)
_limited = LogLimiter().limited

#: Connections that the kernel keeps until they are accepted, as asyncio's servers have it.
BACKLOG: Final = 100
#: Descriptors end by their hundreds and come back as connections close: looked for again after this long.
BACKOFF_S: Final = 0.2
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Known = Callable[[], None]


class Listener:
    """Listens from its making on, accepts while `run` runs. Raises OSError where the address cannot be bound.

    serve: gets each connection (non-blocking, to be closed by `serve`) and a function to call once the other end is no
    stranger any more. most: strangers at once. grace_s: of so many, none younger than this is hung up on.
    """

    def __init__(
        self, host: str, port: int, serve: Callable[[socket.socket, Known], Awaitable[None]], most: int, grace_s: float
    ) -> None:
        family, _, _, _, address = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        assert family in (socket.AF_INET, socket.AF_INET6)
        self._socket = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._serve = serve
        self._most = most
        self._grace_s = grace_s
        self._strangers: dict[asyncio.Task[None], float] = {}  # the oldest first, and since when
        self._all: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Accept until cancelled; ends all connections then."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._room()
                try:
                    connection, _ = await loop.sock_accept(self._socket)
                except OSError as error:
                    if error.errno in _NO_ROOM:
                        _limited(_log.warning, "descriptors")("cannot accept connections for now", error=str(error))
                        await asyncio.sleep(BACKOFF_S)
                    continue  # or the other end was gone before we looked
                self._begin(connection)
        finally:
            self.close()
            await asyncio.sleep(0)  # a connection that came just now must begin, to be closed
            for task in self._all:
                task.cancel()
            await asyncio.gather(*self._all, return_exceptions=True)

    def close(self) -> None:
        """Free the port."""
        self._socket.close()

    def _begin(self, connection: socket.socket) -> None:
        task = asyncio.create_task(self._one(connection), name="connection")
        self._strangers[task] = asyncio.get_running_loop().time()
        self._all.add(task)
        task.add_done_callback(self._over)

    async def _one(self, connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None

        def known() -> None:
            self._strangers.pop(task, None)

        await self._serve(connection, known)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        self._all.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _limited(_log.error, "connection")("a connection failed", exc_info=error)

    async def _room(self) -> None:
        """Return when one more stranger may come."""
        while len(self._strangers) >= self._most:
            oldest, since = next(iter(self._strangers.items()))
            left = since + self._grace_s - asyncio.get_running_loop().time()
            if left <= 0:
                del self._strangers[oldest]
                oldest.cancel()
                _limited(_log.warning, "strangers")("hung up on a connection to let others in", most=self._most)
            else:
                await asyncio.wait(self._strangers, timeout=left, return_when=asyncio.FIRST_COMPLETED)
