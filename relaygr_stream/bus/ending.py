"""Ends connections within bounded time, whatever the brokers do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

log = structlog.get_logger(__name__)

#: A client without anything left to send disconnects in milliseconds, unless a broker does not answer its farewell: a
#: TLS connection then waits 30 s for it (asyncio's ssl_shutdown_timeout, which aiokafka leaves alone).
CLOSE_S: Final = 3.0

_late: set[asyncio.Task[None]] = set()


async def end(what: str, stop: Callable[[], Coroutine[Any, Any, None]], within_s: float = CLOSE_S) -> None:
    """Await stop(), but not for longer than within_s, and never fail: what cannot be ended ends with the process.

    As a task of its own, because aiokafka's stop() lets the cancellation of its own inner tasks escape to the caller
    (seen when a broker is away, in aiokafka 0.14).
    """
    task = asyncio.create_task(stop(), name=f"end {what}")
    await asyncio.wait({task}, timeout=within_s)
    if not task.done():
        _late.add(task)  # it goes on for as long as the process does
        task.add_done_callback(_late.discard)
        log.warning("does not end, and is left behind", what=what, after_s=within_s)
    elif not task.cancelled() and (error := task.exception()) is not None:
        log.warning("did not end in order", what=what, error=f"{type(error).__name__}: {error}")


async def end_consumer(what: str, consumer: Any) -> None:
    """As `end`, of an AIOKafkaConsumer, and its connections are closed in any case: where a fetch is waiting for a
    broker, aiokafka lets its cancellation escape from stop() (as above), which then has not closed them yet.
    """

    async def stop() -> None:
        try:
            await consumer.stop()
        finally:
            await consumer._client.close()

    await end(what, stop)
