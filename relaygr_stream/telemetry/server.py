"""/metrics, /healthz and /readyz over HTTP, from a thread of its own, so that a stuck event loop is still reported.

Knows nothing of what makes a process alive or ready: two callbacks say so, from any thread and without waiting.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

from relaygr_stream.errors import ConfigError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

#: Says why not, or None when all is well.
Check = Callable[[], str | None]

#: A client that sends nothing for this long is let go. Scrapers and probes send at once.
CLIENT_TIMEOUT_S: Final = 5.0
PATHS: Final = ("/metrics", "/healthz", "/readyz")
_JSON: Final = "application/json"
_TEXT: Final = "text/plain; charset=utf-8"


class TelemetryServer:
    """Serves one registry and two checks until stopped.

    live: answers /healthz; a process that is not live should be restarted. ready: answers /readyz; one that is not
    ready should get no work. Raises ConfigError when the address cannot be bound.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int, live: Check, ready: Check) -> None:
        self._metrics = make_wsgi_app(registry)
        self._checks: dict[str, Check] = {"/healthz": live, "/readyz": ready}
        try:
            self._server = _server_class(host)((host, port), _Handler)
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error}; set telemetry.host and telemetry.port "
                f"(port 0: any free one)"
            ) from error
        self._server.set_app(self._answer)
        self.host = host
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            # The server looks for a request to stop this often; it is what `stop` waits for.
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="telemetry",
            daemon=True,
        )

    @property
    def address(self) -> str:
        """HOST:PORT, IPv6 hosts in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def start(self) -> None:
        """Serve from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and free the port. Waits a moment for the thread; may be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ.get("PATH_INFO", "/")
        if method not in ("GET", "HEAD"):
            return _respond(start_response, "405 Method Not Allowed", _TEXT, "Only GET and HEAD.\n", allow="GET, HEAD")
        if path == "/metrics":
            if method == "HEAD":
                return _respond(start_response, "200 OK", _TEXT, "")
            body: Iterable[bytes] = self._metrics(environ, start_response)
            return body
        if path in self._checks:
            reason = _reason(self._checks[path])
            status = "503 Service Unavailable" if reason else "200 OK"
            text = json.dumps({"status": "unavailable", "reason": reason} if reason else {"status": "ok"}) + "\n"
        else:
            status, text = "404 Not Found", f"Nothing at {path!r}. There are {', '.join(PATHS)}.\n"
        return _respond(start_response, status, _JSON if path in self._checks else _TEXT, text, method == "GET")


def _reason(check: Check) -> str | None:
    try:
        return check()
    except Exception as error:  # a check that fails is an answer, not a dropped connection
        return f"the check itself failed: {type(error).__name__}: {error}"


def _respond(
    start_response: StartResponse, status: str, kind: str, text: str, with_body: bool = True, allow: str = ""
) -> list[bytes]:
    body = text.encode()
    headers = [("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")]
    start_response(status, [*headers, ("Allow", allow)] if allow else headers)
    return [body] if with_body else []


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False  # a slow client must not hold up the end of the process

    def server_bind(self) -> None:
        # http.server asks the DNS for the host's full name here, which can take seconds and is used for nothing.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """A client that hangs up or times out is no news."""
        structlog.get_logger(__name__).debug("telemetry client failed", client=str(client_address), exc_info=True)


class _ServerV6(_Server):
    address_family = socket.AF_INET6


def _server_class(host: str) -> type[_Server]:
    return _ServerV6 if ":" in host else _Server


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_S

    def address_string(self) -> str:
        return str(self.client_address[0])

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Scrapes come every few seconds: only for who debugs."""
        structlog.get_logger(__name__).debug("telemetry request", client=self.address_string(), line=format % args)
