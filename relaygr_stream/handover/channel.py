"""Frames over one connection: bounded in length, each within a time. Knows nothing of what they mean, nor of TLS."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from types import UnionType
from typing import Any, Final, TypeVar, overload

from relaygr_stream.errors import DecodeError, RelayError
from relaygr_stream.handover.wire import COPY, HEADER, MESSAGE, SLICE_BYTES, Message, decode, encode

# A bound on bytes per second: a token bucket. Knows nothing of what the bytes are.


class Bandwidth:
    """`take` returns when so many bytes may go. burst: bytes that may go at once after a pause.

    Those who wait are served in turn of asking; the bound is on all of them together. clock: seconds.
    """

    def __init__(
        self,
        bytes_per_s: float,
        burst: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._rate = bytes_per_s
        self._burst = burst
        self._clock = clock
        self._sleep = sleep
        self._level = float(burst)
        self._at = clock()

    async def take(self, nbytes: int) -> None:
        """Wait for nbytes of the bandwidth. What is taken stays taken, if the waiting is cancelled too."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        self._level -= nbytes
        if self._level < 0:
            await self._sleep(-self._level / self._rate)


M = TypeVar("M", bound=Message)

#: An answer takes milliseconds; one between loaded workers less than this.
ANSWER_S: Final = 5.0
#: Data not yet taken by the kernel, at which a sender waits: two slices.
WRITE_BUFFER: Final = 2 * SLICE_BYTES


class PeerError(RelayError):
    """The other worker, or the network, does not keep to the protocol; says what happened."""


class Channel:
    """One end of a connection. Raises PeerError for whatever the other end does wrong."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=WRITE_BUFFER)

    @property
    def certificate(self) -> dict[str, Any] | None:
        """The other end's, as ssl tells it."""
        found: dict[str, Any] | None = self._writer.get_extra_info("peercert")
        return found

    async def send(self, message: Message) -> None:
        """Send a message."""
        await self._send(MESSAGE, encode(message))

    async def send_copy(self, data: bytes) -> None:
        """Send a slice of a copy."""
        await self._send(COPY, data)

    @overload
    async def receive(self, kind: type[M], max_bytes: int, seconds: float = ANSWER_S) -> M: ...

    @overload
    async def receive(self, kind: UnionType, max_bytes: int, seconds: float = ANSWER_S) -> Message: ...

    async def receive(self, kind: type[object] | UnionType, max_bytes: int, seconds: float = ANSWER_S) -> Message:
        """The next message, which must be of this kind, or of one of these."""
        payload = await self._receive(MESSAGE, max_bytes, seconds)
        try:
            message = decode(payload)
        except DecodeError as error:
            raise PeerError(f"sent something that is no message of the hand-over: {error.detail}") from error
        if not isinstance(message, kind):
            raise PeerError(f"sent `{type(message).__name__}` out of turn")
        return message

    async def receive_copy(self, left: int) -> bytes:
        """The next slice of a copy of which so many bytes are left. Slices are whole but the last: who sends bytes one
        by one cannot hold a session for long."""
        expected = min(left, SLICE_BYTES)
        data = await self._receive(COPY, expected, ANSWER_S)
        if len(data) != expected:
            raise PeerError(f"sent a slice of {len(data)} bytes, expected {expected}")
        return data

    async def close(self) -> None:
        """Hang up; what was sent before may still arrive."""
        self._writer.close()
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._writer.wait_closed()
        except OSError:  # TimeoutError and ssl.SSLError are OSErrors
            self.abort()

    def abort(self) -> None:
        """Hang up at once."""
        self._writer.transport.abort()

    async def _send(self, kind: int, payload: bytes) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                self._writer.writelines((HEADER.pack(len(payload), kind), payload))
                await self._writer.drain()
        except OSError as error:
            raise PeerError(_gone(error, "took nothing", ANSWER_S)) from error

    async def _receive(self, kind: int, max_bytes: int, seconds: float) -> bytes:
        try:
            async with asyncio.timeout(seconds):
                length, found = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if found != kind or length > max_bytes:
                    raise PeerError(f"sent a frame of kind {found} and {length} bytes, expected {kind} and {max_bytes}")
                return await self._reader.readexactly(length)
        except (OSError, EOFError) as error:
            raise PeerError(_gone(error, "sent nothing", seconds)) from error


def _gone(error: Exception, silent: str, seconds: float) -> str:
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        return f"did not accept our certificate ({error.reason}): is `handover.secret` the same there?"
    if isinstance(error, TimeoutError):
        return f"{silent} for {seconds:g} s"
    return f"hung up ({str(error) or type(error).__name__})"
