"""Messages as frames, and copies, over one connection, with a limit on length and time."""

from __future__ import annotations

import asyncio
import ssl
from types import UnionType
from typing import Any, Final, TypeVar, overload

from relaygr_stream.errors import DecodeError, RelayError
from relaygr_stream.handover.pace import CopyPace
from relaygr_stream.handover.tls import TlsSocket
from relaygr_stream.handover.wire import HEADER, Message, decode, encode

M = TypeVar("M", bound=Message)

#: The time limit of one frame, or slice: an answer takes milliseconds, and less than this between loaded workers.
ANSWER_S: Final = 5.0


class PeerError(RelayError):
    """The other worker, or the network, breaks the protocol; the message says how."""


class Channel:
    """One end of a connection. Every method but `abort` raises PeerError if the other end breaks the protocol."""

    def __init__(self, connection: TlsSocket) -> None:
        self._connection = connection

    @property
    def certificate(self) -> dict[str, Any] | None:
        """The other end's certificate, as returned by ssl."""
        return self._connection.certificate

    async def send(self, message: Message) -> None:
        """Send a message."""
        payload = encode(message)
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._connection.send(HEADER.pack(len(payload)) + payload)
        except OSError as error:
            raise PeerError(_describe(error, "accepted nothing", ANSWER_S)) from error

    async def send_copy(self, data: memoryview, pace: CopyPace) -> None:
        """Send a copy, at this pace."""
        try:
            await self._connection.send_copy(data, pace, ANSWER_S)
        except OSError as error:
            raise PeerError(_describe(error, "accepted nothing", ANSWER_S)) from error

    async def receive_copy(self, into: memoryview, pace: CopyPace) -> None:
        """Receive a copy of this length, as send_copy. A peer that trickles it is hung up on."""
        try:
            await self._connection.receive_copy(into, pace, ANSWER_S)
        except (OSError, EOFError) as error:
            raise PeerError(_describe(error, "sent nothing", ANSWER_S)) from error

    @overload
    async def receive(self, kind: type[M], max_bytes: int, seconds: float = ANSWER_S) -> M: ...

    @overload
    async def receive(self, kind: UnionType, max_bytes: int, seconds: float = ANSWER_S) -> Message: ...

    async def receive(self, kind: type[object] | UnionType, max_bytes: int, seconds: float = ANSWER_S) -> Message:
        """Receive the next message, of at most `max_bytes`, within `seconds`. It must be of this kind (or union)."""
        try:
            async with asyncio.timeout(seconds):
                (length,) = HEADER.unpack(await self._connection.receive(HEADER.size))
                if length > max_bytes:
                    raise PeerError(f"sent a frame of {length} bytes, expected {max_bytes} at most")
                payload = await self._connection.receive(length)
        except (OSError, EOFError) as error:
            raise PeerError(_describe(error, "sent nothing", seconds)) from error
        try:
            message = decode(payload)
        except DecodeError as error:
            raise PeerError(f"sent a frame that is no message of the hand-over: {error.detail}") from error
        if not isinstance(message, kind):
            raise PeerError(f"sent `{type(message).__name__}` out of turn")
        return message

    async def close(self) -> None:
        """Close the connection; frames sent before may still arrive."""
        await self._connection.close()

    def abort(self) -> None:
        """Close the connection at once; frames sent before may be lost."""
        self._connection.abort()


def _describe(error: Exception, silent: str, seconds: float) -> str:
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        return f"did not accept our certificate ({error.reason}): is `handover.secret` the same there?"
    if isinstance(error, TimeoutError):
        return f"{silent} for {seconds:g} s"
    return f"hung up ({str(error) or type(error).__name__})"
