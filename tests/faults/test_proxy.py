"""The proxy of the fault tests passes, cuts, stalls and slows; else they would test nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from relaygr_stream.ops.brokers.distribution import free_ports
from tests.faults.proxy import Link, links


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(1024):
        writer.write(chunk)
    writer.close()


async def _says(link: Link, text: bytes, patience: float = 60.0) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", link.listen_port)
    try:
        writer.write(text)
        return await asyncio.wait_for(reader.read(1024), patience)
    finally:
        writer.transport.abort()


async def test_a_link_passes_stalls_cuts_and_mends() -> None:
    (listen,) = free_ports(1)
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    target = server.sockets[0].getsockname()[1]
    async with server, links({1: (listen, target)}) as opened:
        link = opened[1]
        assert await _says(link, b"one") == b"one"

        reader, writer = await asyncio.open_connection("127.0.0.1", listen)
        link.stall()
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1024), 0.2)
        link.mend()
        assert await asyncio.wait_for(reader.read(1024), 60) == b"two"
        link.delay_s = 0.2
        start = time.monotonic()
        assert await _says(link, b"three") == b"three"
        assert time.monotonic() - start >= 0.4  # there and back
        link.cut()
        with contextlib.suppress(ConnectionResetError):  # or the end, if it came before "four" was written
            assert not await _says(link, b"four")
        link.mend()
        assert await _says(link, b"five") == b"five"
        writer.transport.abort()
