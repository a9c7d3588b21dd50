"""Requests and answers in HTTP: bodies, formats, deadlines, trace contexts, and the status of each error."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec
import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope

from relaygr_stream.errors import (
    BrokerError,
    DeadlineExceeded,
    DecodeError,
    Overloaded,
    Rejected,
    RelayError,
    UnknownScenario,
    WorkerFailed,
)
from relaygr_stream.gateway.bodies import B, decoded
from relaygr_stream.gateway.details import Details
from relaygr_stream.gateway.messages import FORMATS, JSON, Format, Problem
from relaygr_stream.gateway.tokens import RequestRefused
from relaygr_stream.settings.schema import Gateway, Relay
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.printable import printable
from relaygr_stream.telemetry.tracing import TRACE_HEADERS, trace_headers
from relaygr_stream.wire.versions import NOT_DECODED

T = TypeVar("T")

log = structlog.get_logger(__name__)
limited = LogLimiter().limited

#: Milliseconds within which the client wants the answer.
TIMEOUT_HEADER: Final = "relaygr-timeout-ms"
#: Python's float() takes more than a number in decimal: 1_0, inf, digits of other scripts.
_NUMBER: Final = re.compile(r"[0-9]{1,16}(\.[0-9]{1,16})?")
#: Seconds after which an overloaded relay is asked again: its queues are shorter than a deadline.
RETRY_AFTER_S: Final = "1"
#: The status of each error; the first that fits.
STATUSES: Final[tuple[tuple[type[RelayError], int, str], ...]] = (
    (DeadlineExceeded, 504, "deadline_exceeded"),
    (Overloaded, 429, "overloaded"),
    (Rejected, 400, "rejected"),
    (WorkerFailed, 502, "failed"),
    (UnknownScenario, 503, "unknown_scenario"),
    (BrokerError, 503, "unavailable"),
    (RelayError, 503, "unavailable"),
)
#: Statuses after which the same request may succeed a moment later.
_AGAIN: Final = (429, 503)


class HttpRequest:
    """A request: its head, and how much of its body has been read. headers: of fields of one name the first counts."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.method: Final[str] = scope["method"]
        self.path: Final[str] = scope["path"]
        self.query: Final[str] = scope["query_string"].decode("latin-1")
        self.headers: Final[dict[str, str]] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])
        }
        self.media: Final = self.headers.get("content-type", JSON.media).partition(";")[0].strip().lower()
        self.known_as: Final[Callable[[str], bool]] = scope["state"]["known"]  # connections.py
        self.receive: Final = receive
        self.body_read = False
        self.body_bytes = 0  # that were kept

    @property
    def authorization(self) -> str:
        """The header of this name; empty: there is none."""
        return self.headers.get("authorization", "")

    def parameter(self, name: str) -> str:
        """Of the query; empty: it has none of this name."""
        return dict(parse_qsl(self.query)).get(name, "")

    async def next_part(self) -> bytes:
        """What comes next of the body. Raises ClientDisconnect."""
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        self.body_read = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part


async def read_body(http: HttpRequest, kind: type[B], limits: Gateway, relay: Relay) -> B:
    """The decoded body. Raises Refused, Rejected."""
    form, most = FORMATS.get(http.media), limits.max_body_bytes
    if form is None or http.headers.get("content-encoding", "identity") != "identity":
        send = f"send {' or '.join(FORMATS)}, uncompressed"
        if http.media == "application/x-www-form-urlencoded":  # a page of any host may send it without asking
            send += f"; curl states it with -H 'content-type: {JSON.media}'"
        raise RequestRefused(415, "unsupported", f"content type {printable(http.media)}: {send}")
    data = bytearray()
    try:
        async with asyncio.timeout(limits.read_ms / 1e3):
            if stated_length(http) <= most:
                while not http.body_read and len(data) <= most:
                    data += await http.next_part()
                    http.body_bytes = len(data)
                if len(data) <= most:
                    return decoded(data, form, kind, relay)
    except TimeoutError:
        took = f"the body did not come within {limits.read_ms:g} ms"
        raise RequestRefused(408, "slow", took) from None
    except NOT_DECODED as error:
        raise RequestRefused(400, "malformed", str(error)[:500] or type(error).__name__, close=False) from error
    raise RequestRefused(413, "too_large", f"the body has more than {most} bytes (gateway.max_body_bytes)")


def most_dropped(limits: Gateway) -> int:
    """Bytes of a refused body that are read all the same: most clients read no answer before they have sent theirs."""
    return 2 * limits.max_body_bytes


async def discarded(http: HttpRequest, limits: Gateway) -> bool:
    """Read a body that nobody wants; False: it is too long, slow, or waits to be asked for. Raises ClientDisconnect.

    A connection closed before its body is read is reset, and the client may lose the answer.
    """
    left = most_dropped(limits)
    if stated_length(http) > left or "expect" in http.headers:
        return False
    with suppress(TimeoutError):
        async with asyncio.timeout(limits.read_ms / 1e3):
            while not http.body_read and left >= 0:
                left -= len(await http.next_part())
            return left >= 0
    return False


def stated_length(http: HttpRequest) -> int:
    """Bytes of the body by its head; 0: it does not say."""
    length = http.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 16 else 0


async def while_connected(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled when the client leaves: that raises ClientDisconnect.

    Only for a request whose body has been read.
    """
    working = asyncio.current_task()
    assert working is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await http.receive())["type"] != "http.disconnect":
            pass
        left = True
        working.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if left and not working.uncancel():  # else the process ends, too
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()


def failure(error: RelayError, reply: Format, path: str, details: Details) -> Response:
    """The answer to a request that ended with this error; the relay's own failures are logged."""
    if isinstance(error, DecodeError):
        error = Rejected(error.detail)
    status, name = next((status, name) for kind, status, name in STATUSES if isinstance(error, kind))
    if status >= 500 and status != 504:
        limited(log.warning, name)("a request failed", path=path, outcome=name, detail=str(error))
    headers = {"retry-after": RETRY_AFTER_S} if status in _AGAIN else {}
    return answer(status, reply, Problem(error=name, detail=details.text(error)), headers)


def answer(status: int, form: Format, body: msgspec.Struct, headers: dict[str, str] | None = None) -> Response:
    """An answer with this body, encoded in the format."""
    return Response(form.encode(body), status, headers, form.media)


def reply_format(http: HttpRequest) -> Format:
    """The format of the answer: one that the client accepts; otherwise that of its body."""
    accepted = http.headers.get("accept", "")
    for media, form in FORMATS.items():
        if media in accepted:
            return form
    return FORMATS.get(http.media, JSON)


def deadline(http: HttpRequest, started: float) -> float | None:
    """The monotonic time after which the answer is useless; None: the client states none. Raises Refused."""
    stated = http.headers.get(TIMEOUT_HEADER)
    if stated is None:
        return None
    milliseconds = float(stated) if _NUMBER.fullmatch(stated) else -1.0
    if not 0 < milliseconds <= 3.6e6:
        raise RequestRefused(
            400,
            "rejected",
            f"header {TIMEOUT_HEADER}: {printable(stated[:40])} is not a number of milliseconds above 0, up to 3600000",
        )
    return started + milliseconds / 1e3


def trace_context(http: HttpRequest) -> list[tuple[str, bytes]]:
    """The trace context in the request's headers; empty: none."""
    return trace_headers([(name, value.encode()) for name in TRACE_HEADERS if (value := http.headers.get(name))])
