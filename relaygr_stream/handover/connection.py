"""Opens channels, from an address or from an accepted socket, whose other end is an authenticated worker."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any, Final

from relaygr_stream.handover.certificates import PROTOCOL, Credentials, Networks, identity_problem, worker_name
from relaygr_stream.handover.channel import Channel, PeerError
from relaygr_stream.handover.tls import TlsSocket

#: Time limit of connecting and the TLS handshake: a few milliseconds on each side, tens on a loaded machine.
PROVE_S: Final = 3.0


async def connect(address: str, name: str, credentials: Credentials, networks: Networks) -> Channel:
    """Connect to the worker `name` at `address`, HOST:PORT.

    Raises PeerError if it is outside the networks, does not answer, or is another worker.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        async with asyncio.timeout(PROVE_S):
            family, where = await _allowed(host, int(port), networks)
            raw = socket.socket(family, socket.SOCK_STREAM)
            try:
                raw.setblocking(False)
                await asyncio.get_running_loop().sock_connect(raw, where)
            except BaseException:
                raw.close()
                raise
            connection = await TlsSocket.prove(raw, credentials.context(ssl.Purpose.SERVER_AUTH), host)
    except (OSError, ValueError, OverflowError) as error:  # TimeoutError and ssl.SSLError are OSErrors
        raise PeerError(f"cannot be reached: {_describe(error)}") from error
    problem = _protocol_problem(connection) or identity_problem(connection.certificate, name, host)
    if problem:
        connection.abort()
        raise PeerError(problem)
    return Channel(connection)


async def accept(connection: socket.socket, credentials: Credentials, networks: Networks) -> tuple[Channel, str]:
    """A channel over an accepted socket, and the worker name in its certificate. Takes ownership of the socket.

    The caller must still check that a worker of that name is at that host. Raises PeerError if the other end is outside
    the networks or fails to authenticate.
    """
    try:
        there = connection.getpeername()[0]
        if there not in networks:
            raise PeerError(f"comes from {there}, outside `handover.networks` = {networks}")
        async with asyncio.timeout(PROVE_S):
            proven = await TlsSocket.prove(connection, credentials.context(ssl.Purpose.CLIENT_AUTH))
    except OSError as error:
        connection.close()
        raise PeerError(f"has not authenticated itself: {_describe(error)}") from error
    except BaseException:
        connection.close()
        raise
    name = worker_name(proven.certificate)
    problem = _protocol_problem(proven) or ("" if name else "its certificate names no worker")
    if problem:
        proven.abort()
        raise PeerError(problem)
    return Channel(proven), name


async def _allowed(host: str, port: int, networks: Networks) -> tuple[socket.AddressFamily, Any]:
    """Family and address of the host inside the networks, resolved once, so that the checked address is the one
    used."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, _, _, _, where in found:
        if str(where[0]) in networks:
            return family, where
    addresses = ", ".join(sorted({str(where[0]) for *_, where in found}))
    raise PeerError(f"is at {addresses}, outside `handover.networks` = {networks}")


def _protocol_problem(connection: TlsSocket) -> str:
    spoken = connection.protocol
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
