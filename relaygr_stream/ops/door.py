"""`relaygr up --rolling`: how one process asks a running `relaygr up` of this host to restart its processes.

An `up` listens on an abstract socket of Linux: no file stays behind, and the kernel lists them. Only processes of the
same user, and of root, are answered and believed. Each side writes lines of JSON: the `up` says who it is, is told to
roll, and tells each state of its processes until the roll is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from io import BufferedRWPair
from pathlib import Path
from typing import Any, Final

import msgspec

from relaygr_stream.errors import RelayError
from relaygr_stream.telemetry.printable import Say

PREFIX: Final = "relaygr-up-door-"
#: What the kernel lists of the sockets of this network namespace: an abstract one as @NAME in the last column.
LISTED: Final = Path("/proc/net/unix")
ROLL: Final = b"roll\n"
#: Seconds in which an `up` says who it is; one that is stopped or starved does not.
HELLO_S: Final = 2.0
#: Longest line of either side, in bytes.
MAX_LINE: Final = 1 << 16
#: struct ucred of SO_PEERCRED: process, user, group.
_CREDENTIALS: Final = struct.Struct("3i")

#: Begins a roll. The future completes with why not every process came back ready; "": all did.
Roll = Callable[[], "asyncio.Future[str]"]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Who listens. name: of its workers, without their numbers."""

    name: str
    pid: int


class State(msgspec.Struct, frozen=True, tag=True):
    """A process changed its state. line: as `up` prints it."""

    line: str


class Over(msgspec.Struct, frozen=True, tag=True):
    """The roll is over. why: as of a Roll."""

    why: str


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Hello | State | Over).decode


class RollDoor:
    """Where others ask this `up` to roll, while `open`. name: of its workers."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._askers: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def open(self, roll: Roll) -> AsyncIterator[None]:
        """Answer whoever asks. Without effect outside Linux."""
        if sys.platform != "linux":
            yield
            return
        found = socket.socket(socket.AF_UNIX)
        found.bind(f"\0{PREFIX}{secrets.token_hex(8)}")
        server = await asyncio.start_unix_server(
            lambda reader, writer: self._answer(roll, reader, writer), sock=found, limit=MAX_LINE
        )
        try:
            yield
        finally:
            server.close()
            for asker in self._askers:
                asker.close()

    def tell(self, line: str) -> None:
        """Tell those who asked for a roll that a process changed its state."""
        for asker in self._askers:
            _write(asker, State(line))

    async def _answer(self, roll: Roll, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not _is_ours(writer.get_extra_info("socket")):
                return
            _write(writer, Hello(self._name, os.getpid()))
            if await reader.readline() != ROLL:
                return
            self._askers.add(writer)
            over, gone = roll(), asyncio.create_task(reader.read())
            either: set[asyncio.Future[Any]] = {over, gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if over.done():
                _write(writer, Over(over.result()))
        except (OSError, ValueError):  # it has gone, or writes no line
            pass
        except asyncio.CancelledError:  # this process ends; asyncio would print a traceback for the connection
            pass
        finally:
            self._askers.discard(writer)
            writer.close()


def _write(writer: asyncio.StreamWriter, said: Hello | State | Over) -> None:
    if not writer.is_closing():
        writer.write(_encode(said) + b"\n")


def ask_to_roll(name: str | None, show: Say) -> str:
    """Have the `up` of this host and user with workers of this name (None: the only one) restart its processes.

    show(line): called for each state of a process. Returns why not every process came back ready; "": all did. Raises
    RelayError where there is no such `up`, or several.
    """
    if sys.platform != "linux":
        raise RelayError("--rolling finds a running `relaygr up` on Linux alone; here, send SIGUSR1 to its process")
    with contextlib.ExitStack() as stack:
        found = [(hello, stack.enter_context(lines)) for hello, lines in _doors()]
        _, lines = _the_one(name, [(hello, lines) for hello, lines in found if name in (None, hello.name)], found)
        lines.write(ROLL)
        lines.flush()
        with contextlib.suppress(OSError, ValueError):  # it ended, or writes no line
            for line in iter(lambda: lines.readline(MAX_LINE), b""):
                said = _decode(line)
                if isinstance(said, Over):
                    return said.why
                if isinstance(said, State):
                    show(said.line)
    return "the `relaygr up` ended before all its processes were restarted"


_Found = tuple[Hello, BufferedRWPair]


def _the_one(name: str | None, chosen: Sequence[_Found], found: Sequence[_Found]) -> _Found:
    if len(chosen) == 1:
        return chosen[0]
    runs = ", ".join(f"{hello.name} (pid {hello.pid})" for hello, _ in found)
    if not found:
        raise RelayError("--rolling: no `relaygr up` of this user runs on this host; start one without --rolling")
    if not chosen:
        raise RelayError(f"--rolling --name {name}: no `relaygr up` of this name runs on this host; there is {runs}")
    hint = "choose one with --name" if name is None else "send SIGUSR1 to the process of the one you mean"
    raise RelayError(f"--rolling: several run on this host: {runs}; {hint}")


def _doors() -> Iterator[_Found]:
    """The `up`s of this user, each with a stream to it, by name."""
    listed = LISTED.read_text(encoding="utf-8", errors="replace").split()
    found = []
    for each in sorted({word for word in listed if word.startswith(f"@{PREFIX}")}):
        with contextlib.suppress(OSError, ValueError):  # it ended meanwhile, or is another user's
            found.append(_visit(f"\0{each[1:]}"))
    yield from sorted(found, key=lambda one: (one[0].name, one[0].pid))


def _visit(address: str) -> _Found:
    """Raises OSError or ValueError where no `up` of this user answers."""
    with socket.socket(socket.AF_UNIX) as door:  # which `lines` keeps open
        door.settimeout(HELLO_S)
        door.connect(address)
        if not _is_ours(door):
            raise PermissionError("another user's")
        lines = door.makefile("rwb")
        try:
            hello = _decode(lines.readline(MAX_LINE))
            if not isinstance(hello, Hello):
                raise ValueError("does not say who it is")
        except BaseException:
            lines.close()
            raise
        door.settimeout(None)  # a worker loads for as long as its model takes
    return hello, lines


def _is_ours(peer: socket.socket) -> bool:
    """Whether the other end's user is this process's, or root."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)[1] in (0, os.geteuid())
