"""SyncRelayClient: the client for services with threads: RelayClient on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy.typing as npt

from relaygr_stream.client.answers import Ranking
from relaygr_stream.client.relay import Features, History, HistoryOrReference, RelayClient, Request
from relaygr_stream.errors import RequestError
from relaygr_stream.wire.messages import Mode, RankingRequest, RequestEvent

T = TypeVar("T")


class SyncRelayClient:
    """RelayClient without `await`, as a context; any number of threads may call it at once.

        with SyncRelayClient("kafka:9092") as relay:
            with relay.request(user_id, history, candidates=500) as request:
                candidates = retrieve(user_id)
                ranking = request.rank(candidates, suffix=recent, timeout=0.2)

    arguments: as of RelayClient. Open one per process, after a fork, and keep it. Each call blocks its thread for as
    long as RelayClient's lasts and raises the same; a context variable, such as a trace's span, is the caller's.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.client = RelayClient(*arguments, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def request(self, user_id: str, history: HistoryOrReference, *, candidates: int, **options: Any) -> SyncRequest:
        """As RelayClient.request, with its arguments: enter it as retrieval starts, rank when candidates are known."""
        return SyncRequest(self, self.client.request(user_id, history, candidates=candidates, **options))

    def announce(self, event: RequestEvent) -> None:
        """As RelayClient.announce."""
        self.call(self.client.announce(event))

    def rank(self, request: RankingRequest, *, timeout: float | None = None) -> Ranking:
        """As RelayClient.rank. timeout: seconds; None: client.timeout_ms."""
        return self.call(self.client.rank(request, timeout=timeout))

    def cancel(self, user_id: str, request_id: str, *, tenant: str = "", scenario: str = "") -> None:
        """As RelayClient.cancel."""
        self.call(self.client.cancel(user_id, request_id, tenant=tenant, scenario=scenario))

    def worker_serves(self, within: float, scenario: str = "") -> bool:
        """As RelayClient.worker_serves. within: seconds."""
        return self.call(self.client.worker_serves(within, scenario))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it on the client's loop and return what it returns. Raises RequestError if the client is not open."""
        with self._lock:  # so that each call is a task before the loop is told to stop
            if self._loop is None:
                work.close()
                raise RequestError("the client is not open: use `with SyncRelayClient(…) as relay`")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise RequestError("the client was closed during the call") from None
        except BaseException:  # Ctrl-C, too: nobody waits for it any more
            future.cancel()
            raise

    def __enter__(self) -> Self:
        opened: Future[None] = Future()
        # A daemon: a process that ends without closing the client must not wait for it.
        self._thread = threading.Thread(target=self._run, args=(opened,), name="relaygr-client", daemon=True)
        self._thread.start()
        opened.result()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self, opened: Future[None]) -> None:
        try:
            asyncio.run(self._serve(opened))
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)

    async def _serve(self, opened: Future[None]) -> None:
        self._stop = asyncio.Event()
        async with self.client:
            self._loop = asyncio.get_running_loop()
            opened.set_result(None)
            await self._stop.wait()


class SyncRequest:
    """One request, made by `SyncRelayClient.request`, as a context; see Request."""

    def __init__(self, relay: SyncRelayClient, request: Request) -> None:
        self._relay = relay
        self._request = request

    @property
    def request_id(self) -> str:
        """Its id, as in the logs of triggers and workers."""
        return self._request.request_id

    def __enter__(self) -> Self:
        self._relay.call(self._request.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._relay.call(self._request.__aexit__(kind, error, trace))

    def rank(
        self,
        candidates: npt.ArrayLike,
        *,
        suffix: History | None = None,
        timeout: float | None = None,
        mode: Mode = "auto",
        features: Features | None = None,
    ) -> Ranking:
        """As Request.rank. timeout: seconds; None: client.timeout_ms."""
        return self._relay.call(
            self._request.rank(candidates, suffix=suffix, timeout=timeout, mode=mode, features=features)
        )
