"""Reads how long brokers throttle this process by quotas (KIP-219), and keeps to it. Importing it patches aiokafka.

A broker answers at once, states `throttle_time_ms`, and reads nothing from the connection until then. What a producer
sends meanwhile waits in the socket, in front of what it sends later. So a throttled producer gathers until it may send.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable
from typing import Any, Final

import structlog
from aiokafka.conn import AIOKafkaConnection
from aiokafka.producer.sender import SendProduceReqHandler

from relaygr_stream.bus.aiokafka_patches import ClientId
from relaygr_stream.telemetry.limiter import LogLimiter

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: Client id → seconds that brokers have throttled it, of this process.
throttled_s: Final[Counter[str]] = Counter()
#: A producer waits no longer, whatever a broker states. Kafka's bound is the quota window, 11 s by default.
LONGEST_S: Final = 30.0

_send, _do = AIOKafkaConnection.send, SendProduceReqHandler.do


def send(self: Any, request: Any, expect_response: bool = True) -> Any:
    """As AIOKafkaConnection.send; reads from an answer to our clients how long the broker throttles the connection."""
    answer = _send(self, request, expect_response)
    return _noted(self, answer) if expect_response and isinstance(self._client_id, ClientId) else answer


async def _noted(connection: Any, answer: Awaitable[Any]) -> Any:
    found = await answer
    throttled = getattr(found, "throttle_time_ms", 0)
    if isinstance(throttled, int) and throttled > 0:
        seconds = min(throttled / 1e3, LONGEST_S)
        connection._relaygr_throttled_until = time.monotonic() + seconds
        client = str(connection._client_id)
        throttled_s[client] += seconds  # type: ignore[assignment]
        limited(log.warning, "throttled")(
            "a broker throttles this client: it is over its quota", client_id=client, broker=connection.host, s=seconds
        )
    return found


async def do(self: Any, node_id: int) -> None:
    """As SendProduceReqHandler.do, which sends one request to a broker; the next one waits until it may be sent."""
    await _do(self, node_id)
    if (seconds := throttled_for(self._client, node_id)) > 0:
        await asyncio.sleep(seconds)


AIOKafkaConnection.send, SendProduceReqHandler.do = send, do


def throttled_ms() -> float:
    """Milliseconds for which brokers have throttled clients of this process, as its status states them."""
    return 1e3 * sum(throttled_s.values())


def throttled_for(client: Any, node_id: int | None) -> float:
    """For how many seconds from now the broker reads nothing from this AIOKafkaClient. 0: it reads."""
    now = time.monotonic()
    until_s = (
        getattr(connection, "_relaygr_throttled_until", now)
        for (node, _), connection in client._conns.items()
        if node == node_id
    )
    return max(0.0, max(until_s, default=now) - now)
