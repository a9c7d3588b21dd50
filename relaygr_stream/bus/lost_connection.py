"""aiokafka on uvloop: a request to a connection that was closed a moment ago fails as any on a lost connection does.

asyncio's transports take what is written to them after they were closed, and drop it; uvloop's raise RuntimeError,
which aiokafka does not expect: it ended the task that sends heartbeats, and with it the process. Importing this mends
it.
"""

from __future__ import annotations

from typing import Any

from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import KafkaConnectionError

_send = AIOKafkaConnection.send


def send(self: Any, request: Any, expect_response: bool = True) -> Any:
    """As AIOKafkaConnection.send."""
    try:
        return _send(self, request, expect_response)
    except RuntimeError as error:
        if "closed" not in str(error):
            raise
        self.close(reason=CloseReason.CONNECTION_BROKEN)
        raise KafkaConnectionError(f"Connection at {self.host}:{self.port} broken: {error}") from error


AIOKafkaConnection.send = send
