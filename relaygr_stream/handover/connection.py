"""Opens channels, from an address or from an accepted socket, whose other end is an authenticated worker."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Final

from relaygr_stream.handover.certificates import PROTOCOL, Credentials, Networks, identity_problem, worker_name
from relaygr_stream.handover.channel import Channel, PeerError
from relaygr_stream.handover.wire import SLICE_BYTES

#: Time limit of connecting and the TLS handshake: a few milliseconds on each side, tens on a loaded machine.
PROVE_S: Final = 3.0
#: Time limit of TLS's closing exchange.
SHUTDOWN_S: Final = 1.0


async def connect(address: str, name: str, credentials: Credentials, networks: Networks) -> Channel:
    """Connect to the worker `name` at `address`, HOST:PORT.

    Raises PeerError if it is outside the networks, does not answer, or is another worker.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        async with asyncio.timeout(PROVE_S):
            where = await _allowed(host, int(port), networks)
            reader, writer = await asyncio.open_connection(
                where,
                int(port),
                ssl=credentials.context(ssl.Purpose.SERVER_AUTH),
                server_hostname=host,
                ssl_handshake_timeout=PROVE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
                limit=SLICE_BYTES,
            )
    except (OSError, ValueError, OverflowError) as error:  # TimeoutError and ssl.SSLError are OSErrors
        raise PeerError(f"cannot be reached: {_describe(error)}") from error
    channel = Channel(reader, writer)
    problem = _protocol_problem(writer) or identity_problem(writer.get_extra_info("peercert"), name, host)
    if problem:
        channel.abort()
        raise PeerError(problem)
    return channel


async def accept(connection: socket.socket, credentials: Credentials, networks: Networks) -> tuple[Channel, str]:
    """A channel over an accepted socket, and the worker name in its certificate. Takes ownership of the socket.

    The caller must still check that a worker of that name is at that host. Raises PeerError if the other end is outside
    the networks or fails to authenticate.
    """
    try:
        there = connection.getpeername()[0]
        if there not in networks:
            raise PeerError(f"comes from {there}, outside `handover.networks` = {networks}")
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(SLICE_BYTES, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol,
            connection,
            ssl=credentials.context(ssl.Purpose.CLIENT_AUTH),
            ssl_handshake_timeout=PROVE_S,
            ssl_shutdown_timeout=SHUTDOWN_S,
        )
    except OSError as error:
        connection.close()
        raise PeerError(f"has not authenticated itself: {_describe(error)}") from error
    except BaseException:
        connection.close()
        raise
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    channel = Channel(reader, writer)
    name = worker_name(writer.get_extra_info("peercert"))
    problem = _protocol_problem(writer) or ("" if name else "its certificate names no worker")
    if problem:
        channel.abort()
        raise PeerError(problem)
    return channel, name


async def _allowed(host: str, port: int, networks: Networks) -> str:
    """An address of the host inside the networks, resolved once, so that the checked address is the one used."""
    loop = asyncio.get_running_loop()
    found = [str(info[4][0]) for info in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address in found:
        if address in networks:
            return address
    raise PeerError(f"is at {', '.join(sorted(set(found)))}, outside `handover.networks` = {networks}")


def _protocol_problem(writer: asyncio.StreamWriter) -> str:
    spoken = writer.get_extra_info("ssl_object").selected_alpn_protocol()
    return "" if spoken == PROTOCOL else f"speaks {spoken or 'no protocol by name'}, this worker {PROTOCOL}"


def _describe(error: Exception) -> str:
    match error:
        case ssl.SSLCertVerificationError():
            return (
                f"its certificate was not accepted ({error.verify_message}): is `handover.secret`, or the authority of "
                f"`handover.tls_ca`, the same there, and do the clocks agree?"
            )
        case ssl.SSLError():
            return f"TLS failed ({error.reason or error}): does it know the same `handover.secret`?"
        case TimeoutError():
            return f"no answer within {PROVE_S:g} s"
    return str(error) or type(error).__name__
