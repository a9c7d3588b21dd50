"""Runs commands that only look at a cluster: they end in bounded time, whatever the brokers do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from relaygr_stream.bus.aiokafka_compat import CLOSE_S
from relaygr_stream.bus.topics import FENCING_S
from relaygr_stream.errors import BrokerUnavailable
from relaygr_stream.settings.schema import Kafka

T = TypeVar("T")

#: Requests that such a command sends one after another to a broker that answers none, each with its own time limit;
#: clients repeat some of them without end.
REQUESTS: Final = 3


def look(kafka: Kafka, work: Coroutine[Any, Any, T], listens_s: float = 0.0) -> T:
    """The result of `work`, on an event loop of its own.

    listens_s: how long the work listens besides its questions. Raises what it raises, and BrokerUnavailable when it has
    not ended after listens_s, FENCING_S and REQUESTS request timeouts.
    """
    limit_s = listens_s + FENCING_S + REQUESTS * kafka.request_timeout_ms / 1e3

    async def bounded() -> T:
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task}, timeout=limit_s)
            if task.done():
                return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task}, timeout=CLOSE_S)
        raise BrokerUnavailable(
            f"no answer from the brokers at {kafka.bootstrap} within {limit_s:g} s: they take connections, and answer "
            f"late or not at all; look at their logs and quotas"
        )

    return asyncio.run(bounded())
