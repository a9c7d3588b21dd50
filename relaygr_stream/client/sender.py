"""Sends without waiting for acknowledgements, and notices when none come any more.

Knows nothing of what it sends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from relaygr_stream.bus.producer import Producer
from relaygr_stream.errors import BrokerError, BrokerUnavailable

#: No acknowledgement for this long, although some are due, means that the brokers are away: sends then fail at once,
#: but for one in as long a time, which finds out whether they are back. An acknowledgement takes milliseconds; a
#: broker's clean stop holds them up for 1.1 s at most (DESIGN §5).
SILENT_S: Final = 1.5


class Sender:
    """A producer whose acknowledgements are watched, not waited for."""

    def __init__(self, producer: Producer, bootstrap: str) -> None:
        self._producer = producer
        self._bootstrap = bootstrap
        self._loop = asyncio.get_running_loop()
        self._due: dict[int, float] = {}  # send → when, oldest first
        self._count = itertools.count()
        self._acknowledged_s = self._loop.time()
        self._tried_s = 0.0  # when a send was last let through

    async def send(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes,
        partition: int,
        headers: Sequence[tuple[str, bytes]] = (),
        settled: Callable[[BrokerError | None], None],
    ) -> None:
        """Buffer a message; waits only while the buffer is full.

        settled: called with None once the broker has the message, or with the error. Raises BrokerUnavailable at once
        while the brokers are away, BrokerError if the message cannot be buffered.
        """
        now = self._loop.time()
        if self._due:
            silent_s = now - max(self._acknowledged_s, next(iter(self._due.values())))
            if silent_s > SILENT_S and now - self._tried_s < SILENT_S:
                raise BrokerUnavailable(
                    f"{self._bootstrap} has acknowledged nothing for {silent_s:.1f} s; {len(self._due)} messages wait"
                )
        self._tried_s = now
        number = next(self._count)
        self._due[number] = now
        try:
            sent = await self._producer.send(topic, value, key=key, partition=partition, headers=headers)
        except BaseException:
            del self._due[number]
            raise
        sent.add_done_callback(partial(self._settle, number, settled))

    def _settle(self, number: int, settled: Callable[[BrokerError | None], None], sent: asyncio.Future[int]) -> None:
        del self._due[number]
        error: BaseException | None
        if sent.cancelled():
            error = BrokerUnavailable("the producer was closed before the message was sent")
        else:
            error = sent.exception()
        if error is None:
            self._acknowledged_s = self._loop.time()
        settled(error if error is None or isinstance(error, BrokerError) else BrokerError(repr(error)))
