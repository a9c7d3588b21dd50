"""A listening socket with a bound on strangers: connections that have not identified themselves or sent a request.

A limited number of strangers is held at once. A further one replaces the oldest, after a grace period in which an
honest one identifies itself. If descriptors run out, accepting pauses.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import structlog

from relaygr_stream.errors import ConfigError
from relaygr_stream.telemetry.limiter import LogLimiter

_log = structlog.get_logger(__name__)
_limited = LogLimiter().limited

#: Connections that the kernel queues until they are accepted; asyncio's default.
BACKLOG: Final = 100
#: Pause of accepting while there are no descriptors: they become free as connections close.
BACKOFF_S: Final = 0.2
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Known = Callable[[], None]


class Listener:
    """Binds the address when it is made, accepts connections while `run` runs. Raises ConfigError if it cannot bind.

    section: of the settings that have host and port.

    serve(connection, known): serves a non-blocking connection and closes it; calls known() once the peer is identified.
    most: strangers at once. grace_s: a stranger younger than this is not closed in favour of another.
    """

    def __init__(
        self,
        section: str,
        host: str,
        port: int,
        serve: Callable[[socket.socket, Known], Awaitable[None]],
        most: int,
        grace_s: float,
    ) -> None:
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._socket = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error}; set {section}.host and {section}.port (port 0: any free one)"
            ) from error
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._serve = serve
        self._most = most
        self._grace_s = grace_s
        self._strangers: dict[asyncio.Task[None], float] = {}  # since when each is one, the oldest first
        self._all: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Accept until cancelled, then end all connections."""
        self._accepting = asyncio.create_task(self._accept(), name="accept")
        try:
            await asyncio.wait([self._accepting])
            if not self._accepting.cancelled():
                self._accepting.result()
            await asyncio.get_running_loop().create_future()  # drained; wait to be cancelled
        finally:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self.close()
            for task in self._all:
                task.cancel()
            await asyncio.gather(*self._all, return_exceptions=True)

    async def drain(self, seconds: float) -> None:
        """Accept no more, free the port, and wait until all connections have ended, for so long at most."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        self.close()
        if self._all:
            await asyncio.wait(self._all, timeout=seconds)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wait_for_room()
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                if error.errno in _NO_ROOM:
                    _limited(_log.warning, "descriptors")("cannot accept connections, will retry", error=str(error))
                    await asyncio.sleep(BACKOFF_S)
                continue  # other errors: the peer closed before the connection was accepted
            self._begin(connection)

    def close(self) -> None:
        """Free the port."""
        self._socket.close()

    def _begin(self, connection: socket.socket) -> None:
        task = asyncio.create_task(self._serve_one(connection), name="connection")
        self._strangers[task] = asyncio.get_running_loop().time()
        self._all.add(task)
        task.add_done_callback(partial(self._ended, connection))

    async def _serve_one(self, connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None

        def known() -> None:
            self._strangers.pop(task, None)

        await self._serve(connection, known)

    def _ended(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        self._all.discard(task)
        if task.cancelled():
            connection.close()  # a task that was cancelled before it began has not
        elif (error := task.exception()) is not None:
            _limited(_log.error, "connection")("a connection failed", exc_info=error)

    async def _wait_for_room(self) -> None:
        """Return when one more stranger may be accepted."""
        while len(self._strangers) >= self._most:
            oldest, since = next(iter(self._strangers.items()))
            left = since + self._grace_s - asyncio.get_running_loop().time()
            if left <= 0:
                del self._strangers[oldest]
                oldest.cancel()
                _limited(_log.warning, "strangers")("closed the oldest unidentified connection", most=self._most)
            else:
                await asyncio.wait(self._strangers, timeout=left, return_when=asyncio.FIRST_COMPLETED)
