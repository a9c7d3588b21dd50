"""Frames over one connection: sealed, bounded in length, each within a time. Knows nothing of what they mean."""

from __future__ import annotations

import asyncio
import secrets
from types import UnionType
from typing import Final, TypeVar, overload

from relaygr_stream.errors import DecodeError, RelayError
from relaygr_stream.handover.seal import TAG_BYTES, Seal, Side
from relaygr_stream.handover.wire import (
    COPY,
    HEADER,
    MAX_GREETING,
    MESSAGE,
    NONCE_BYTES,
    SLICE_BYTES,
    VERSION,
    Hello,
    Message,
    Welcome,
    decode,
    encode,
)

M = TypeVar("M", bound=Message)

#: A greeting or an answer takes milliseconds; one between loaded workers less than this.
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
        self._ours: Seal | None = None
        self._theirs: Seal | None = None
        writer.transport.set_write_buffer_limits(high=WRITE_BUFFER)

    @property
    def peer(self) -> str:
        """The other end's address, for logs."""
        return str(self._writer.get_extra_info("peername"))

    async def greet(self, secret: str, side: Side) -> None:
        """Exchange nonces; everything after is sealed with the secret."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        if side == "taker":
            await self.send(Hello(VERSION, nonce))
            theirs: Hello | Welcome = await self.receive(Welcome, MAX_GREETING)
        else:
            theirs = await self.receive(Hello, MAX_GREETING)
            await self.send(Welcome(VERSION, nonce))
        if theirs.version != VERSION:
            raise PeerError(f"speaks version {theirs.version} of the hand-over, this worker {VERSION}")
        nonces = (nonce, theirs.nonce) if side == "taker" else (theirs.nonce, nonce)
        self._ours = Seal(secret, *nonces, sender=side)
        self._theirs = Seal(secret, *nonces, sender="giver" if side == "taker" else "taker")

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

    async def receive_copy(self, max_bytes: int) -> bytes:
        """The next slice of a copy: 1 to max_bytes."""
        data = await self._receive(COPY, min(max_bytes, SLICE_BYTES), ANSWER_S)
        if not data:
            raise PeerError("sent an empty slice")
        return data

    async def close(self) -> None:
        """Hang up; what was sent before may still arrive."""
        self._writer.close()
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self._writer.transport.abort()

    async def _send(self, kind: int, payload: bytes) -> None:
        header = HEADER.pack(len(payload), kind)
        tag = b"" if self._ours is None else self._ours.tag(header, payload)
        try:
            async with asyncio.timeout(ANSWER_S):
                self._writer.writelines((header, payload, tag))
                await self._writer.drain()
        except (OSError, TimeoutError) as error:
            raise PeerError(_gone(error, "took nothing", ANSWER_S)) from error

    async def _receive(self, kind: int, max_bytes: int, seconds: float) -> bytes:
        try:
            async with asyncio.timeout(seconds):
                header = await self._reader.readexactly(HEADER.size)
                length, found = HEADER.unpack(header)
                if found != kind or length > max_bytes:
                    raise PeerError(f"sent a frame of kind {found} and {length} bytes, expected {kind} and {max_bytes}")
                payload = await self._reader.readexactly(length)
                tag = b"" if self._theirs is None else await self._reader.readexactly(TAG_BYTES)
        except (OSError, EOFError, TimeoutError) as error:
            raise PeerError(_gone(error, "sent nothing", seconds)) from error
        if self._theirs is not None and not self._theirs.agrees(header, payload, tag):
            raise PeerError(
                "sent a frame with a wrong seal: its `handover.secret` is another one, or the frame changed"
            )
        return payload


def _gone(error: Exception, silent: str, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"{silent} for {seconds:g} s"
    return f"hung up ({str(error) or type(error).__name__})"
