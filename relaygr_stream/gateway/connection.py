"""One HTTP connection of the gateway: uvicorn's protocol, with a bound on all that a client may send ahead.

A request that comes before the last answer is complete is not read: its connection ends with that answer. An offer to
upgrade is ignored. The application bounds a body; everything else of a request is bounded here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from relaygr_stream.telemetry.listener import Known

#: Bytes of a request line with its headers; a token and a user id take some hundred. The same of what comes between
#: the parts of a body in chunks (sizes, extensions), beyond as many bytes as the parts have, and of its trailers.
MAX_HEAD_BYTES: Final = 16 << 10
#: Fields of a head; each takes about 100 bytes of memory, whatever its length. Browsers behind proxies send some 40.
MAX_FIELDS: Final = 256
#: Bytes that are dropped unread after an answer, so that a client that still sends gets to read it.
MAX_DROPPED_BYTES: Final = 256 << 10


def _bare(status: str) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()


_TOO_LONG: Final = _bare("431 Request Header Fields Too Large")
_MALFORMED: Final = _bare("400 Bad Request")


class Tenants:
    """How many connections each tenant has. most: of one tenant."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def enter(self, tenant: str) -> bool:
        """Count one more, unless the tenant has all that it may have."""
        if self._open[tenant] >= self._most:
            return False
        self._open[tenant] += 1
        return True

    def leave(self, tenant: str) -> None:
        """Count one less."""
        self._open[tenant] -= 1


class _Refusal(Exception):
    """What a parser's callback raises. answer: to this request, unless another is under way."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer = answer


class HttpConnection(HttpToolsProtocol):
    """One client. read_s: time for a request's head, and for the client to take up what it was sent."""

    def __init__(self, config: Config, state: ServerState, known: Known, read_s: float, tenants: Tenants) -> None:
        super().__init__(config, state, {"known": self._known_as})
        self.closed: asyncio.Future[None] = self.loop.create_future()
        self._known = known
        self._tenants = tenants
        self._tenant: str | None = None  # of the first request with a valid token
        self._read_s = read_s
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._room = MAX_HEAD_BYTES  # bytes that may come before the next part of a body, or the end of a head
        self._in_head = True
        self._under_way = False  # a request without a complete answer
        self._deaf = False  # what comes is dropped

    # ---- asyncio ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio: the head is awaited from now on."""
        super().connection_made(transport)
        if self.scheme == "http":  # pause_writing is called whenever anything is not taken up; TLS takes 0 for always
            transport.set_write_buffer_limits(high=0)
        self._arm("head")

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: nothing is awaited any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._unset_keepalive_if_required()  # uvicorn does so only where the client closed in order
        super().connection_lost(exc)
        if not self.closed.done():
            self.closed.set_result(None)
        if self._tenant is not None:
            self._tenants.leave(self._tenant)

    def data_received(self, data: bytes) -> None:
        """asyncio: parse it in pieces of what may come, and do not wait for the rest of a body that nobody reads."""
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        while rest and not self.transport.is_closing():
            piece, rest = rest[: self._room + 1], rest[self._room + 1 :]
            self._room -= len(piece)
            if not self._deaf:
                self._feed(piece)
            if self._room < 0:
                self._too_much()
        if not self._under_way:  # a head is not complete, or what came is the rest of an unread body
            self._arm("head")

    def pause_writing(self) -> None:
        """asyncio: the client takes up its answer more slowly than we write it."""
        self._arm("taking up the answer")
        super().pause_writing()

    def resume_writing(self) -> None:
        """asyncio: it took up all of it."""
        self._disarm("taking up the answer")
        super().resume_writing()

    # ---- the parser ----

    def on_message_begin(self) -> None:
        """httptools: another request; only after the answer to the last."""
        if self._under_way:
            raise _Refusal(_MALFORMED)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: a field of the head, or a trailer, which nobody reads."""
        if self._in_head:
            if len(self.headers) >= MAX_FIELDS:
                raise _Refusal(_TOO_LONG)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """httptools: the head is here."""
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise _Refusal(_MALFORMED)
            return  # the head comes again, without the offer
        super().on_headers_complete()
        self._in_head, self._under_way, self._room = False, True, MAX_HEAD_BYTES
        self._disarm("head")

    def on_body(self, body: bytes) -> None:
        """httptools: a part of a body, whose length the application bounds."""
        if self._under_way:
            self._room = min(MAX_HEAD_BYTES, self._room + 2 * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """httptools: what comes next is the head of another request."""
        if not self.parser.should_upgrade():
            self._in_head, self._room = True, MAX_HEAD_BYTES
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """uvicorn: keep nothing of what was asked; of the rest of its body, read a bounded part."""
        self._under_way, self.cycle.body = False, bytearray()
        if not self._in_head:
            self._room = MAX_DROPPED_BYTES
        super().on_response_complete()

    def _feed(self, piece: memoryview | bytes) -> None:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as offer:
            self._without_offer(bytes(piece[offer.args[0] :]))
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause.answer if isinstance(cause, _Refusal) else _MALFORMED)

    def _without_offer(self, rest: bytes) -> None:
        """Parse the head again without its offer to upgrade, and what comes behind it.

        A server may ignore an offer (RFC 9110, 7.8). The parser takes what comes behind the head for another protocol.
        """
        fields = b"".join(b"%b: %b\r\n" % (name, value) for name, value in self.headers if name != b"upgrade")
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._feed(b"%b%b\r\n%b" % (line, fields, rest))

    # ---- refusals ----

    def _too_much(self) -> None:
        """More has come than may: of a head, beside a body, or behind an answer."""
        if self._deaf:
            self.transport.abort()
        else:
            self._refuse(_TOO_LONG)

    def _refuse(self, answer: bytes) -> None:
        """Read no further. A whole request that is under way gets its own answer, and each request one at most."""
        self._deaf, self._room = True, MAX_DROPPED_BYTES
        if self._under_way and self._in_head:  # that request is whole, and this is another
            self.cycle.keep_alive = False
            return
        unanswered = self._in_head or (self._under_way and not self.cycle.response_started)
        if self._under_way:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if unanswered:
            self.transport.write(answer)
        if unanswered and self.transport.can_write_eof():
            self.transport.write_eof()  # the client reads it, whatever it still sends, and closes
            self._arm("head")
        else:
            self.transport.close()

    # ---- strangers and time ----

    def _known_as(self, tenant: str) -> bool:
        if self._tenant is None and not self.closed.done():
            if not self._tenants.enter(tenant):
                return False
            self._tenant = tenant
            self._known()
        return True

    def _arm(self, what: str) -> None:
        if what not in self._timers:
            self._timers[what] = self.loop.call_later(self._read_s, self.transport.abort)

    def _disarm(self, what: str) -> None:
        if (timer := self._timers.pop(what, None)) is not None:
            timer.cancel()
