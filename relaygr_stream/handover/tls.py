"""A TLS connection whose handshake and messages run on the event loop, and whose copies run in a thread of their own.

A copy goes from the DRAM tier's memory to the socket, and from the socket to memory, without a copy in between and
without the loop: asyncio's streams copy each byte twice, and encrypt on the loop.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, TypeVar

from relaygr_stream.handover.pace import CopyPace

T = TypeVar("T")

#: Bytes between two looks at the pace, and in which a copy must advance within its time limit: about 0.1 ms of
#: encryption.
SLICE_BYTES: Final = 128 * 1024
#: A copy that gives way looks so often whether it still must.
LOOK_S: Final = 0.005
#: Copies under way at once, of all sessions that a worker serves and fetches.
MAX_COPIES: Final = 64
#: Time limit of TLS's closing exchange.
SHUTDOWN_S: Final = 1.0

_copies = ThreadPoolExecutor(MAX_COPIES, "hand-over")


class TlsSocket:
    """One connection, used by one task at a time. Its methods raise OSError, a TimeoutError by lateness."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._ended = threading.Event()
        self._due_s = 0.0  # when the present slice of a copy must be through

    @classmethod
    async def prove(cls, raw: socket.socket, context: ssl.SSLContext, host: str = "") -> TlsSocket:
        """Shake hands over a connected, non-blocking socket, which it owns from now on. host: to connect to; "": it
        is an accepted one."""
        try:
            # Otherwise a message waits for the peer's delayed acknowledgement of the one before: 40 ms.
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wrapped = context.wrap_socket(
                raw, server_side=not host, server_hostname=host or None, do_handshake_on_connect=False
            )
        except BaseException:
            raw.close()
            raise
        made = cls(wrapped)
        try:
            await made._when_ready(wrapped.do_handshake)
        except BaseException:
            wrapped.close()
            raise
        return made

    @property
    def certificate(self) -> dict[str, Any] | None:
        """The other end's, as returned by ssl."""
        return self._socket.getpeercert()

    @property
    def protocol(self) -> str | None:
        """The protocol that ALPN found."""
        return self._socket.selected_alpn_protocol()

    async def send(self, data: bytes) -> None:
        """Send a message, on the loop."""
        view = memoryview(data)
        while view:
            view = view[await self._when_ready(lambda view=view: self._socket.send(view)) :]  # type: ignore[misc]

    async def receive(self, nbytes: int) -> bytes:
        """Receive exactly so many bytes, on the loop. Raises EOFError where the connection ends before."""
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            got = await self._when_ready(lambda view=view: self._socket.recv_into(view))  # type: ignore[misc]
            if not got:
                raise EOFError
            view = view[got:]
        return bytes(data)

    async def send_copy(self, data: memoryview, pace: CopyPace, seconds: float) -> None:
        """Send all of `data` in a thread, each slice within so many seconds."""
        await self._in_thread(data, pace, seconds, sending=True)

    async def receive_copy(self, into: memoryview, pace: CopyPace, seconds: float) -> None:
        """Fill all of `into`, as send_copy. Raises EOFError where the connection ends before."""
        await self._in_thread(into, pace, seconds, sending=False)

    async def close(self) -> None:
        """Close the connection; what was sent before may still arrive."""
        with suppress(OSError, ValueError):  # a TimeoutError, too, and where it is closed already
            async with asyncio.timeout(SHUTDOWN_S):
                await self._when_ready(self._socket.unwrap)
        self.abort()

    def abort(self) -> None:
        """Close the connection at once; what was sent before may be lost. Harmless when repeated."""
        self._hang_up()
        self._socket.close()

    # ---- inside ----

    def _hang_up(self) -> None:
        """End what a thread does with the connection, too."""
        self._ended.set()
        with suppress(OSError):  # SSLSocket.shutdown would have a thread go on without TLS
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    async def _when_ready(self, call: Callable[[], T]) -> T:
        """The call's result, once the socket can do it."""
        while True:
            try:
                return call()
            except ssl.SSLWantReadError:
                await self._ready(reading=True)
            except ssl.SSLWantWriteError:
                await self._ready(reading=False)

    async def _ready(self, *, reading: bool) -> None:
        loop, fd, ready = self._loop, self._socket.fileno(), self._loop.create_future()
        (loop.add_reader if reading else loop.add_writer)(fd, _resolve, ready)
        try:
            await ready
        finally:
            (loop.remove_reader if reading else loop.remove_writer)(fd)

    async def _in_thread(self, data: memoryview, pace: CopyPace, seconds: float, *, sending: bool) -> None:
        """Copy. When it is over, on every path, no thread touches the copy's memory any more."""
        self._due_s = time.monotonic() + seconds
        running = self._loop.run_in_executor(_copies, self._copy, data, pace, seconds, sending)
        try:
            while not running.done():
                if (left_s := self._due_s - time.monotonic()) <= 0:
                    raise TimeoutError
                await asyncio.wait([running], timeout=left_s)
        except (TimeoutError, asyncio.CancelledError):
            self._hang_up()
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            running.exception()
            raise
        running.result()

    def _copy(self, data: memoryview, pace: CopyPace, seconds: float, sending: bool) -> None:
        """In blocking calls, which the loop ends by hanging up: with a time limit of its own, ssl makes a system call,
        and takes the interpreter's lock, for each piece that the kernel takes or has (a sixth of a copy's time)."""
        one = self._socket.sendall if sending else self._receive_slice
        try:
            self._socket.settimeout(None)
            for at in range(0, len(data), SLICE_BYTES):
                piece = data[at : at + SLICE_BYTES]
                asked = len(piece)
                while wait_s := pace.wait_s(asked):
                    asked, self._due_s = 0, time.monotonic() + wait_s + seconds
                    if self._ended.wait(min(wait_s, LOOK_S)):
                        break
                self._due_s = time.monotonic() + seconds
                began = time.thread_time() if pace.works else 0.0  # a system call
                one(piece)
                if began:
                    pace.spent(time.thread_time() - began)
        finally:
            with suppress(OSError):
                self._socket.settimeout(0)

    def _receive_slice(self, piece: memoryview) -> None:
        while piece:
            got = self._socket.recv_into(piece)
            if not got:
                raise EOFError
            piece = piece[got:]


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
