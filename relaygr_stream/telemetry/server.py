"""/metrics, /healthz and /readyz over HTTP, from a thread with its own event loop: it reports a stuck main loop.

The number of clients and the time of each are bounded. Two callbacks tell whether the process is live and ready; they
are called from this thread and do not wait.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from prometheus_client import CollectorRegistry, Gauge

from relaygr_stream.telemetry.exposition import Exposition
from relaygr_stream.telemetry.listener import Known, Listener
from relaygr_stream.telemetry.pages import (
    GRACE_S,
    JSON,
    MAX_CLIENTS,
    REQUEST_S,
    Page,
    PageRequest,
    not_found,
    respond,
    serve_one,
)

#: Returns why not, or None if all is well.
Check = Callable[[], str | None]

PATHS: Final = ("/metrics", "/healthz", "/readyz")


class TelemetryServer:
    """Serves one registry and two checks until stopped.

    live: answers /healthz; a process that is not live should be restarted. ready: answers /readyz; a process that is
    not ready should get no work. about: what the answers say besides while all is well; it may change. Raises
    ConfigError if the address cannot be bound.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        live: Check,
        ready: Check,
        about: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._about = about
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
        await serve_one(connection, self._answer)

    async def _answer(self, asked: PageRequest) -> Page:
        if asked.path == "/metrics":
            accept, encoding = (asked.headers.get(name, "") for name in ("accept", "accept-encoding"))
            return self._exposition.page(asked.query, accept, encoding, time.monotonic())
        if asked.path not in self._checks:
            return not_found(asked.path, PATHS)
        reason = _reason(self._checks[asked.path])
        text = (
            json.dumps({"status": "unavailable", "reason": reason} if reason else {"status": "ok", **self._about})
            + "\n"
        )
        return respond("503 Service Unavailable" if reason else "200 OK", JSON, text)


def export_readiness(registry: CollectorRegistry, ready: Check) -> None:
    """The answer of /readyz as a metric."""
    gauge = Gauge("relaygr_ready", "1 while /readyz answers 200, else 0", registry=registry)
    gauge.set_function(lambda: float(_reason(ready) is None))


def _reason(check: Check) -> str | None:
    try:
        return check()
    except Exception as error:  # a failed check must give an answer, not a closed connection
        return f"the check itself failed: {type(error).__name__}: {error}"
