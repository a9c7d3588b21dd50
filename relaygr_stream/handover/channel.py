"""Messages and slices as frames over one connection, with a limit on length, time and bandwidth."""

from __future__ import annotations

import asyncio
import ssl
from types import UnionType
from typing import Any, Final, TypeVar, overload

from relaygr_stream.errors import DecodeError, RelayError
from relaygr_stream.handover.wire import COPY, HEADER, MESSAGE, SLICE_BYTES, Message, decode, encode

M = TypeVar("M", bound=Message)

#: The time limit of one frame: an answer takes milliseconds, and less than this between loaded workers.
ANSWER_S: Final = 5.0
#: Bytes that the kernel has not accepted yet, at which a sender waits: two slices.
WRITE_BUFFER: Final = 2 * SLICE_BYTES


class Bandwidth:
    """A token bucket that bounds bytes per second over all its callers, in the order of their calls.

    burst: bytes that may go at once after a pause. now_s: seconds of one monotonic clock.
    """

    def __init__(
        self,
        bytes_per_s: float,
        burst: int,
        now_s: float,
    ) -> None:
        self._rate = bytes_per_s
        self._burst = burst
        self._level = float(burst)
        self._at = now_s

    def take(self, nbytes: int, now_s: float) -> float:
        """Seconds until nbytes may be sent. They are used up, sent or not."""
        self._level = min(self._burst, self._level + (now_s - self._at) * self._rate) - nbytes
        self._at = now_s
        return max(0.0, -self._level / self._rate)


class PeerError(RelayError):
    """The other worker, or the network, breaks the protocol; the message says how."""


class Channel:
    """One end of a connection. Every method but `abort` raises PeerError if the other end breaks the protocol."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=WRITE_BUFFER)

    @property
    def certificate(self) -> dict[str, Any] | None:
        """The other end's certificate, as returned by ssl."""
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
        """Receive the next message, of at most `max_bytes`, within `seconds`. It must be of this kind (or union)."""
        payload = await self._receive(MESSAGE, max_bytes, seconds)
        try:
            message = decode(payload)
        except DecodeError as error:
            raise PeerError(f"sent a frame that is no message of the hand-over: {error.detail}") from error
        if not isinstance(message, kind):
            raise PeerError(f"sent `{type(message).__name__}` out of turn")
        return message

    async def receive_copy(self, left: int) -> bytes:
        """Receive the next slice of a copy with `left` bytes left.

        All slices but the last must be whole: small slices would let a peer hold a session for long.
        """
        expected = min(left, SLICE_BYTES)
        data = await self._receive(COPY, expected, ANSWER_S)
        if len(data) != expected:
            raise PeerError(f"sent a slice of {len(data)} bytes, expected {expected}")
        return data

    async def close(self) -> None:
        """Close the connection; frames sent before may still arrive."""
        self._writer.close()
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._writer.wait_closed()
        except OSError:  # TimeoutError and ssl.SSLError are OSErrors
            self.abort()

    def abort(self) -> None:
        """Close the connection at once; frames sent before may be lost."""
        self._writer.transport.abort()

    async def _send(self, kind: int, payload: bytes) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                self._writer.writelines((HEADER.pack(len(payload), kind), payload))
                await self._writer.drain()
        except OSError as error:
            raise PeerError(_describe(error, "accepted nothing", ANSWER_S)) from error

    async def _receive(self, kind: int, max_bytes: int, seconds: float) -> bytes:
        try:
            async with asyncio.timeout(seconds):
                length, found = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if found != kind or length > max_bytes:
                    raise PeerError(f"sent a frame of kind {found} and {length} bytes, expected {kind} and {max_bytes}")
                return await self._reader.readexactly(length)
        except (OSError, EOFError) as error:
            raise PeerError(_describe(error, "sent nothing", seconds)) from error


def _describe(error: Exception, silent: str, seconds: float) -> str:
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        return f"did not accept our certificate ({error.reason}): is `handover.secret` the same there?"
    if isinstance(error, TimeoutError):
        return f"{silent} for {seconds:g} s"
    return f"hung up ({str(error) or type(error).__name__})"
