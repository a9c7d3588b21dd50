"""TCP proxies between our processes and the brokers, which can cut, stall and slow what passes.

Each runs on the event loop that opened it. Knows nothing of what passes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

CHUNK_BYTES: Final = 64 * 1024


class Link:
    """One proxied address. While `cut`, nobody gets through and nobody is let in; while `stalled`, connections stand
    but nothing moves, as when packets are dropped; `delay_s` is added to each chunk in each direction."""

    def __init__(self, listen_port: int, target_port: int) -> None:
        self.listen_port, self.target_port = listen_port, target_port
        self.delay_s = 0.0
        self._cut = False
        self._moving = asyncio.Event()
        self._moving.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        """How many pass now."""
        return len(self._writers) // 2

    def cut(self) -> None:
        """Reset every connection and refuse new ones."""
        self._cut = True
        for writer in self._writers:
            writer.transport.abort()

    def stall(self) -> None:
        """From here on nothing moves, in either direction; new connections are accepted and hear nothing."""
        self._moving.clear()

    def mend(self) -> None:
        """Let everything pass again; what was stalled moves on."""
        self._cut = False
        self.delay_s = 0.0
        self._moving.set()

    async def open(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.listen_port)

    async def close(self) -> None:
        """Cut, and listen no more."""
        self.cut()
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))  # our own: of its tasks, asyncio logs cancelled ones
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if self._cut:
                return
            with contextlib.suppress(OSError):
                await self._moving.wait()
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
                self._writers.add(far_writer)
                try:
                    await self._both(self._pass(reader, far_writer), self._pass(far_reader, writer))
                finally:
                    self._writers.discard(far_writer)
                    far_writer.transport.abort()
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _both(self, *ways: Coroutine[Any, Any, None]) -> None:
        """Until one direction ends; then the other ends, too."""
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await self._moving.wait()
            writer.write(chunk)
            await writer.drain()


@asynccontextmanager
async def links(ports: dict[int, tuple[int, int]]) -> AsyncIterator[dict[int, Link]]:
    """Open a link for each broker. ports: broker → (listened on, passed on to)."""
    opened = {broker: Link(*pair) for broker, pair in ports.items()}
    try:
        for link in opened.values():
            await link.open()
        yield opened
    finally:
        await asyncio.gather(*(link.close() for link in opened.values()))
