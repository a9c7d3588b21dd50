"""A listening socket with bounds on strangers: connections that have not identified themselves or sent a request.

A limited number of strangers is held at once, a quarter of them from one address; there, a further one replaces the
oldest at once: of those that have sent nothing, or of the others, whichever are more. Only where as many addresses
connect as strangers are held does a further one wait: for a grace period in which an honest client identifies itself.
So nobody keeps other addresses out, and the kernel's queue is emptied as quickly as it fills. If descriptors run out,
accepting pauses.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import structlog

from relaygr_stream.errors import ConfigError
from relaygr_stream.telemetry.limiter import LogLimiter

_log = structlog.get_logger(__name__)
_limited = LogLimiter().limited

#: Connections that the kernel queues until they are accepted: what a loop that stands still for half a second finds at
#: 2,000 connects a second. The kernel takes no more than net.core.somaxconn (4,096 by default).
BACKLOG: Final = 1024
#: Addresses that fill a listener: each holds at most this share of its strangers.
ADDRESSES: Final = 4
#: Bits of an IPv6 address that tell one customer from another.
IPV6_PREFIX: Final = 64
#: Pause of accepting while there are no descriptors: they become free as connections close.
BACKOFF_S: Final = 0.2
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Known = Callable[[], None]


@dataclass(slots=True, eq=False)
class _Stranger:
    source: str
    since: float  # of the loop's clock
    silent: bool  # has sent nothing yet


class Listener:
    """Binds the address when it is made, accepts connections while `run` runs. Raises ConfigError if it cannot bind.

    section: of the settings that have host and port. advice: replaces what an error says of these.

    serve(connection, known): serves a non-blocking connection whose client has sent something, or closed it, and closes
    it; calls known() once the peer is identified. most: strangers at once. grace_s: a stranger younger than this is not
    closed in favour of another address. silent_s: how long a client may send nothing at all.
    """

    def __init__(
        self,
        section: str,
        host: str,
        port: int,
        serve: Callable[[socket.socket, Known], Awaitable[None]],
        most: int,
        grace_s: float,
        silent_s: float,
        advice: str = "",
    ) -> None:
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._socket = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except (OSError, OverflowError, UnicodeError) as error:
            advice = advice or f"set {section}.host and {section}.port (port 0: any free one)"
            raise ConfigError(f"cannot listen on {host}:{port}: {error}; {advice}") from error
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._serve = serve
        self._most = most
        self._of_one = max(1, most // ADDRESSES)
        self._grace_s = grace_s
        self._silent_s = silent_s
        self._strangers: dict[asyncio.Task[None], _Stranger] = {}  # the oldest first
        self._held: Counter[str] = Counter()  # strangers by source
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
            try:
                connection, address = await loop.sock_accept(self._socket)
            except OSError as error:
                if error.errno in _NO_ROOM:
                    _limited(_log.warning, "descriptors")("cannot accept connections, will retry", error=str(error))
                    await asyncio.sleep(BACKOFF_S)
                continue  # other errors: the peer closed before the connection was accepted
            try:
                await self._make_room(source := source_of(address))
            except BaseException:
                connection.close()
                raise
            self._begin(connection, source)
            await asyncio.sleep(
                0
            )  # one a turn of the loop: a request that came along is read before others displace it

    def close(self) -> None:
        """Free the port."""
        self._socket.close()

    def _begin(self, connection: socket.socket, source: str) -> None:
        stranger = _Stranger(source, asyncio.get_running_loop().time(), _silent(connection))
        task = asyncio.create_task(self._serve_one(connection, stranger), name="connection")
        self._strangers[task] = stranger
        self._held[source] += 1
        self._all.add(task)
        task.add_done_callback(partial(self._ended, connection))

    async def _serve_one(self, connection: socket.socket, stranger: _Stranger) -> None:
        task = asyncio.current_task()
        assert task is not None
        if stranger.silent:
            try:
                async with asyncio.timeout(self._silent_s):
                    await _readable(connection)
            except TimeoutError:
                connection.close()
                return
            stranger.silent = False
        await self._serve(connection, partial(self._no_stranger, task))

    def _no_stranger(self, task: asyncio.Task[None]) -> None:
        if (stranger := self._strangers.pop(task, None)) is not None:
            self._held[stranger.source] -= 1
            if not self._held[stranger.source]:
                del self._held[stranger.source]

    def _ended(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._no_stranger(task)
        self._all.discard(task)
        if task.cancelled():
            connection.close()  # a task that was cancelled before it began has not
        elif (error := task.exception()) is not None:
            _limited(_log.error, "connection")("a connection failed", exc_info=error)

    async def _make_room(self, source: str) -> None:
        """Return when one more stranger of this source may be held."""
        while self._held[source] >= self._of_one:
            self._replace(source)
        while len(self._strangers) >= self._most:
            largest, held = self._held.most_common(1)[0]
            oldest = next(iter(self._strangers.values()))
            left = oldest.since + self._grace_s - asyncio.get_running_loop().time()
            if held > 1:
                self._replace(largest)
            elif left <= 0:
                self._replace(oldest.source)
            else:
                await asyncio.wait(self._strangers, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def _replace(self, source: str) -> None:
        """Close the oldest connection of this source: of the silent ones or of the others, whichever are more.

        So neither silence nor slow requests take all places of an address whose honest clients are quick.
        """
        own = [(task, stranger.silent) for task, stranger in self._strangers.items() if stranger.source == source]
        silent = 2 * sum(silent for _, silent in own) >= len(own)
        task = next(task for task, each in own if each == silent)
        self._no_stranger(task)
        task.cancel()
        _limited(_log.warning, "strangers")(
            "closed the oldest unidentified connection of an address", most=self._most, of_one_address=self._of_one
        )


def source_of(address: Any) -> str:
    """What connections of one source have in common: the IPv4 address, or the first 64 bits of an IPv6 address."""
    host = ipaddress.ip_address(address[0].partition("%")[0])
    if isinstance(host, ipaddress.IPv6Address):
        mapped = host.ipv4_mapped
        return str(mapped or ipaddress.ip_network((host, IPV6_PREFIX), strict=False))
    return str(host)


def _silent(connection: socket.socket) -> bool:
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:  # it was reset, which whoever serves it will see
        pass
    return False


async def _readable(connection: socket.socket) -> None:
    """Return when the client has sent something, or closed the connection."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, _complete, came)
    try:
        await came
    finally:
        loop.remove_reader(connection)


def _complete(came: asyncio.Future[None]) -> None:
    if not came.done():
        came.set_result(None)
