"""From an address, or from a socket that somebody connected to, to a channel whose other end is a proven worker."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Final

from relaygr_stream.handover.certificates import PROTOCOL, Credentials, Networks, named, stranger
from relaygr_stream.handover.channel import Channel, PeerError
from relaygr_stream.handover.wire import SLICE_BYTES

#: Connecting and TLS take a few milliseconds each side, on a loaded machine tens of them.
PROVE_S: Final = 3.0
#: A farewell of TLS that does not come is not waited for longer.
SHUTDOWN_S: Final = 1.0


async def connect(address: str, name: str, credentials: Credentials, networks: Networks) -> Channel:
    """To the worker of that name at HOST:PORT. Raises PeerError: outside the networks, silent, or somebody else."""
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
        raise PeerError(f"cannot be reached: {_words(error)}") from error
    channel = Channel(reader, writer)
    problem = _other_protocol(writer) or stranger(writer.get_extra_info("peercert"), name, host)
    if problem:
        channel.abort()
        raise PeerError(problem)
    return channel


async def accept(connection: socket.socket, credentials: Credentials, networks: Networks) -> tuple[Channel, str]:
    """The other end's channel, and the worker that its certificate names: whether such a worker is at that host is not
    known yet. Takes the socket over. Raises PeerError."""
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
        raise PeerError(f"has not proven itself: {_words(error)}") from error
    except BaseException:
        connection.close()
        raise
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    channel = Channel(reader, writer)
    name = named(writer.get_extra_info("peercert"))
    problem = _other_protocol(writer) or ("" if name else "its certificate names no worker")
    if problem:
        channel.abort()
        raise PeerError(problem)
    return channel, name


async def _allowed(host: str, port: int, networks: Networks) -> str:
    """An address of the host that may be connected to: resolved once, so that it is the one that was judged."""
    loop = asyncio.get_running_loop()
    found = [str(info[4][0]) for info in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address in found:
        if address in networks:
            return address
    raise PeerError(f"is at {', '.join(sorted(set(found)))}, outside `handover.networks` = {networks}")


def _other_protocol(writer: asyncio.StreamWriter) -> str:
    spoken = writer.get_extra_info("ssl_object").selected_alpn_protocol()
    return "" if spoken == PROTOCOL else f"speaks {spoken or 'no protocol by name'}, this worker {PROTOCOL}"


def _words(error: Exception) -> str:
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
