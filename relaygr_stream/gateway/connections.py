"""HTTP connections of the gateway: uvicorn's protocol (connection.py) on sockets of telemetry/listener.py.

An application says through `state.known(tenant)` that a client is no stranger; False: its tenant has too many
connections already.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from typing import Any, Final

import structlog
from uvicorn.config import Config
from uvicorn.server import ServerState

from relaygr_stream.errors import ConfigError
from relaygr_stream.gateway.connection import HttpConnection, Tenants
from relaygr_stream.settings.inputs import check_regular, no_password
from relaygr_stream.settings.schema import Gateway
from relaygr_stream.telemetry.listener import Known, Listener

#: Connections that have not yet sent a request with a valid token, a quarter of them of one address. A further one
#: takes the place of the oldest.
MAX_STRANGERS: Final = 256
#: A stranger younger than this does not give way: an honest one has sent its request by then.
GRACE_S: Final = 0.5
#: Connections of one tenant, for each of the requests that it may have under way: pools keep as many idle ones, too.
#: A further one stays a stranger.
CONNECTIONS_PER_REQUEST: Final = 2
#: A connection without a request is closed after this: longer than the pause between two requests of a pool.
KEEP_ALIVE_S: Final = 75


class HttpServer:
    """All connections of a gateway. Binds its address when it is made; raises ConfigError."""

    def __init__(self, application: Any, settings: Gateway) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # a client's broken request is not ours to report
        self._config = Config(
            application, http=HttpConnection, interface="asgi3", ws="none", lifespan="off", log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S, server_header=False, date_header=False, proxy_headers=False,
        )  # fmt: skip
        self._config.load()
        self._state = ServerState()
        self._tenants = Tenants(CONNECTIONS_PER_REQUEST * settings.max_requests)
        self._read_s = settings.read_ms / 1e3
        self._tls = _tls(settings)
        self._listener = Listener(
            "gateway", settings.host, settings.port, self._serve, MAX_STRANGERS, GRACE_S, self._read_s
        )
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
        connection = HttpConnection(self._config, self._state, known, self._read_s, self._tenants)
        try:
            # What it returns is not looked at: uvloop returns TLS's protocol in place of this one.
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, accepted, ssl=self._tls,
                ssl_handshake_timeout=self._read_s if self._tls else None,
            )  # fmt: skip
            await connection.closed
        except (OSError, TimeoutError) as error:  # a handshake that fails is the client's fault
            structlog.get_logger(__name__).debug("connection failed", error=repr(error))
        finally:
            if connection.transport is not None:
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
        context.load_cert_chain(settings.tls_certificate, settings.tls_key or None, no_password)
    except (OSError, ValueError) as error:
        kind = "not a certificate and its key in PEM form: " if isinstance(error, ssl.SSLError) else ""
        raise ConfigError(f"gateway.tls_certificate {settings.tls_certificate}: {kind}{error}") from error
    return context
