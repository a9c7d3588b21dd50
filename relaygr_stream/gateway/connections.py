"""HTTP connections of the gateway: uvicorn's protocol on sockets of telemetry/listener.py, bounded in every way.

uvicorn bounds neither a request's head nor the time of a client that reads or writes slowly. An application says
through `state.known(tenant)` that a client is no stranger; False: its tenant has too many connections already.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from typing import Any, Final

import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.inputs import check_regular
from relaygr_stream.settings.schema import Gateway
from relaygr_stream.telemetry.listener import Known, Listener

#: Connections that have not yet sent a request with a valid token. A further one takes the place of the oldest.
MAX_STRANGERS: Final = 256
#: A stranger younger than this does not give way: an honest one has sent its request by then.
GRACE_S: Final = 0.5
#: Connections of one tenant, for each of the requests that it may have under way: pools keep as many idle ones, too.
#: A further one stays a stranger.
CONNECTIONS_PER_REQUEST: Final = 2
#: Bytes of a request line with its headers; a token and a user id take some hundred. The same of what comes behind a
#: body in chunks, its trailers.
MAX_HEAD_BYTES: Final = 16 << 10
#: A connection without a request is closed after this: longer than the pause between two requests of a pool.
KEEP_ALIVE_S: Final = 75
_TOO_LONG: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Tenants:
    """How many connections each tenant has. most: of one tenant."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def enter(self, tenant: str) -> bool:
        """Count one more, unless the tenant has all that it may have."""
        if self._open[tenant] >= self._most:
            return False
        self._open[tenant] += 1
        return True

    def leave(self, tenant: str) -> None:
        """Count one less."""
        self._open[tenant] -= 1


class Connection(HttpToolsProtocol):
    """One client. read_s: time for a request's head, and for the client to take up what it was sent."""

    def __init__(self, config: Config, state: ServerState, known: Known, read_s: float, tenants: Tenants) -> None:
        super().__init__(config, state, {"known": self._known_as})
        self.closed: asyncio.Future[None] = self.loop.create_future()
        self._known = known
        self._tenants = tenants
        self._tenant: str | None = None  # of the first request with a valid token
        self._read_s = read_s
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._fields_bytes = 0  # since the last part of a body
        self._in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio: the head is awaited from now on."""
        super().connection_made(transport)
        if self.scheme == "http":  # pause_writing is called whenever anything is not taken up; TLS takes 0 for always
            transport.set_write_buffer_limits(high=0)
        self._arm("head")

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: nothing is awaited any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._unset_keepalive_if_required()  # uvicorn does so only where the client closed in order
        super().connection_lost(exc)
        if not self.closed.done():
            self.closed.set_result(None)
        if self._tenant is not None:
            self._tenants.leave(self._tenant)

    def data_received(self, data: bytes) -> None:
        """asyncio: refuse fields that are too long, and do not wait for the rest of a body that nobody reads."""
        in_body = not self._in_head
        if self._in_head:
            self._arm("head")
        self._fields_bytes += len(data)
        super().data_received(data)
        if self._fields_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if self._in_head:
                self.transport.write(_TOO_LONG)
            self.transport.close()
        if in_body and self.cycle.response_complete:  # uvicorn's own timer ended with these data
            self._arm("head")

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: a field of the head, or a trailer, which nobody reads."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """httptools: the head is here."""
        self._in_head, self._fields_bytes = False, 0
        self._disarm("head")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """httptools: a part of a body, whose length the application bounds."""
        self._fields_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """httptools: what comes next is the head of another request."""
        self._in_head = True
        super().on_message_complete()

    def pause_writing(self) -> None:
        """asyncio: the client takes up its answer more slowly than we write it."""
        self._arm("taking up the answer")
        super().pause_writing()

    def resume_writing(self) -> None:
        """asyncio: it took up all of it."""
        self._disarm("taking up the answer")
        super().resume_writing()

    def _known_as(self, tenant: str) -> bool:
        if self._tenant is None and not self.closed.done():
            if not self._tenants.enter(tenant):
                return False
            self._tenant = tenant
            self._known()
        return True

    def _arm(self, what: str) -> None:
        if what not in self._timers:
            self._timers[what] = self.loop.call_later(self._read_s, self.transport.abort)

    def _disarm(self, what: str) -> None:
        if (timer := self._timers.pop(what, None)) is not None:
            timer.cancel()


class Connections:
    """All connections of a gateway. Binds its address when it is made; raises ConfigError."""

    def __init__(self, application: Any, settings: Gateway) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # a client's broken request is not ours to report
        self._config = Config(
            application, http=Connection, ws="none", lifespan="off", log_config=None, access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S, server_header=False, date_header=False, proxy_headers=False,
        )  # fmt: skip
        self._config.load()
        self._state = ServerState()
        self._tenants = Tenants(CONNECTIONS_PER_REQUEST * settings.max_requests)
        self._read_s = settings.read_ms / 1e3
        self._tls = _tls(settings)
        self._listener = Listener("gateway", settings.host, settings.port, self._serve, MAX_STRANGERS, GRACE_S)
        self.port: Final = self._listener.port
        self.run = self._listener.run

    @property
    def count(self) -> int:
        """Open connections."""
        return len(self._state.connections)

    async def drain(self, seconds: float) -> None:
        """Accept no more, finish the requests under way, for so long at most."""
        for connection in list(self._state.connections):
            connection.shutdown()  # at once where it is idle, else with its answer
        await self._listener.drain(seconds)

    async def _serve(self, accepted: socket.socket, known: Known) -> None:
        connection: Connection | None = None
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.connect_accepted_socket(
                lambda: Connection(self._config, self._state, known, self._read_s, self._tenants), accepted,
                ssl=self._tls, ssl_handshake_timeout=self._read_s if self._tls else None,
            )  # fmt: skip
            await connection.closed
        except (OSError, TimeoutError) as error:  # a handshake that fails is the client's fault
            structlog.get_logger(__name__).debug("connection failed", error=repr(error))
        finally:
            if connection is not None:
                connection.transport.abort()
            else:
                with contextlib.suppress(OSError):
                    accepted.close()


def _tls(settings: Gateway) -> ssl.SSLContext | None:
    if not settings.tls_certificate:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        for file in filter(None, (settings.tls_certificate, settings.tls_key)):
            check_regular(file)  # OpenSSL waits for a pipe
        context.load_cert_chain(settings.tls_certificate, settings.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"gateway.tls_certificate {settings.tls_certificate}: {error}") from error
    return context
