"""One request of HTTP/1.1 and its answer on a connection: for pages that need no HTTP library."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple
from urllib.parse import unquote

import structlog

#: Timeout of a client's first byte, and from there to the end of its answer. Scrapers and probes take milliseconds.
REQUEST_S: Final = 5.0
#: Clients at once, a quarter of them of one address, each with a request of 8 KiB at most and an answer of some
#: hundred KiB.
MAX_CLIENTS: Final = 64
#: A client younger than this is not closed in favour of another.
GRACE_S: Final = 0.25
MAX_REQUEST: Final = 8192
JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"

Page = tuple[str, list[tuple[str, str]], bytes]  # status, headers, body


class PageRequest(NamedTuple):
    """A GET or HEAD. headers: names in small letters."""

    path: str
    query: str
    headers: dict[str, str]


Answer = Callable[[PageRequest], Awaitable[Page]]


def respond(status: str, kind: str, body: str | bytes, *more: tuple[str, str]) -> Page:
    """A page that no cache keeps. more: headers."""
    data = body if isinstance(body, bytes) else body.encode(errors="replace")
    headers = [("Content-Type", kind), ("Content-Length", str(len(data))), ("Cache-Control", "no-store")]
    return status, [*headers, *more], data


def not_found(path: str, paths: Sequence[str]) -> Page:
    """404, and what there is."""
    return respond("404 Not Found", TEXT, f"Nothing at {path!r}. The paths are {', '.join(paths)}.\n")


async def serve_one(connection: socket.socket, answer: Answer, within_s: float = REQUEST_S) -> None:
    """Read one request, write one answer, close."""
    writer = None
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_REQUEST)
            status, headers, body = await _answered(await reader.readuntil(b"\r\n\r\n"), answer)
            lines = [f"HTTP/1.1 {status}", "Connection: close", *(f"{name}: {value}" for name, value in headers)]
            writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
    except (OSError, EOFError, asyncio.LimitOverrunError) as error:  # closed, late or too long: the client's fault
        structlog.get_logger(__name__).debug("a client failed", error=repr(error))
    finally:
        if writer is not None:
            writer.transport.abort()
        else:
            connection.close()


async def _answered(request: bytes, answer: Answer) -> Page:
    line, *rest = request.decode("latin-1").split("\r\n")
    method, _, target = line.partition(" ")
    path, _, query = target.partition(" ")[0].partition("?")
    headers = {name.strip().lower(): value.strip() for name, _, value in (each.partition(":") for each in rest)}
    if method not in ("GET", "HEAD"):
        return respond("405 Method Not Allowed", TEXT, "Only GET and HEAD.\n", ("Allow", "GET, HEAD"))
    status, found, body = await answer(PageRequest(unquote(path), query, headers))
    return status, found, body if method == "GET" else b""
