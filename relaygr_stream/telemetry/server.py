"""/metrics, /healthz and /readyz over HTTP, from a thread with its own event loop: it reports a stuck main loop.

The number of clients and the time of each are bounded. Two callbacks tell whether the process is live and ready; they
are called from this thread and do not wait.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from typing import Final
from urllib.parse import unquote

import structlog
from prometheus_client import CollectorRegistry, Gauge

from relaygr_stream.telemetry.exposition import Exposition, Page
from relaygr_stream.telemetry.listener import Known, Listener

#: Returns why not, or None if all is well.
Check = Callable[[], str | None]

#: Timeout of a client's first byte, and from there to the end of its answer. Scrapers and probes take milliseconds.
REQUEST_S: Final = 5.0
#: Clients at once, a quarter of them of one address, each with a request of 8 KiB at most and an answer of some
#: hundred KiB.
MAX_CLIENTS: Final = 64
#: A client younger than this is not closed in favour of another.
GRACE_S: Final = 0.25
MAX_REQUEST: Final = 8192
PATHS: Final = ("/metrics", "/healthz", "/readyz")
_JSON: Final = "application/json"
_TEXT: Final = "text/plain; charset=utf-8"


class TelemetryServer:
    """Serves one registry and two checks until stopped.

    live: answers /healthz; a process that is not live should be restarted. ready: answers /readyz; a process that is
    not ready should get no work. Raises ConfigError if the address cannot be bound.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int, live: Check, ready: Check) -> None:
        export_readiness(registry, ready)
        self._exposition = Exposition(registry)
        self._checks: dict[str, Check] = {"/healthz": live, "/readyz": ready}
        self._listener = Listener("telemetry", host, port, self._serve, MAX_CLIENTS, GRACE_S, REQUEST_S)
        self.host = host
        self.port = self._listener.port
        self._loop = asyncio.new_event_loop()
        self._running = self._loop.create_task(self._listener.run())
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    @property
    def address(self) -> str:
        """HOST:PORT, IPv6 hosts in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def start(self) -> None:
        """Serve from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and free the port. Waits for the thread; may be called twice."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._running.cancel)
            self._thread.join()
        else:  # never started
            self._running.cancel()
            self._run()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(asyncio.gather(self._running, return_exceptions=True))
        finally:
            self._listener.close()
            self._loop.close()

    async def _serve(self, connection: socket.socket, _: Known) -> None:
        """Read one request, write one answer, close."""
        writer = None
        try:
            async with asyncio.timeout(REQUEST_S):
                reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_REQUEST)
                status, headers, body = self._answer(await reader.readuntil(b"\r\n\r\n"))
                lines = [f"HTTP/1.1 {status}", "Connection: close", *(f"{name}: {value}" for name, value in headers)]
                writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:  # closed, late or too long: the client's fault
            structlog.get_logger(__name__).debug("telemetry client failed", error=repr(error))
        finally:
            if writer is not None:
                writer.transport.abort()
            else:
                connection.close()

    def _answer(self, request: bytes) -> Page:
        line, *rest = request.decode("latin-1").split("\r\n")
        method, _, target = line.partition(" ")
        path, _, query = target.partition(" ")[0].partition("?")
        path = unquote(path)
        headers = {name.strip().lower(): value.strip() for name, _, value in (each.partition(":") for each in rest)}
        if method not in ("GET", "HEAD"):
            return _respond("405 Method Not Allowed", _TEXT, "Only GET and HEAD.\n", allow="GET, HEAD")
        if path == "/metrics":
            status, found, body = self._exposition.page(
                query, headers.get("accept", ""), headers.get("accept-encoding", "")
            )
        elif path in self._checks:
            reason = _reason(self._checks[path])
            text = json.dumps({"status": "unavailable", "reason": reason} if reason else {"status": "ok"}) + "\n"
            status, found, body = _respond("503 Service Unavailable" if reason else "200 OK", _JSON, text)
        else:
            text = f"Nothing at {path!r}. The paths are {', '.join(PATHS)}.\n"
            status, found, body = _respond("404 Not Found", _TEXT, text)
        return status, found, body if method == "GET" else b""


def export_readiness(registry: CollectorRegistry, ready: Check) -> None:
    """The answer of /readyz as a metric."""
    gauge = Gauge("relaygr_ready", "1 while /readyz answers 200, else 0", registry=registry)
    gauge.set_function(lambda: float(_reason(ready) is None))


def _reason(check: Check) -> str | None:
    try:
        return check()
    except Exception as error:  # a failed check must give an answer, not a closed connection
        return f"the check itself failed: {type(error).__name__}: {error}"


def _respond(status: str, kind: str, text: str, allow: str = "") -> Page:
    body = text.encode(errors="replace")
    headers = [("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")]
    return status, [*headers, ("Allow", allow)] if allow else headers, body
