"""Request events on their way: gathered for a moment, then sent together, one batch for each lane.

Nobody waits for an event: it has the time that retrieval takes. What a message costs client, broker, trigger and worker
is mostly by the batch, and signals travel as their events did. Knows nothing of what it sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

#: Key and value.
Message = tuple[bytes | None, bytes]

#: A lane's events leave early once they are so many bytes: more does not travel in one batch (bus/producer.py).
FULL_BYTES: Final = 48 * 1024
#: A lane may gather so many bytes while what it sent before has not left: then announcing waits.
MOST_BYTES: Final = 1024 * 1024


class Announcements:
    """send(lane, events): hands events to the producer; may wait, raises nothing. linger_s: how long one waits for
    others."""

    def __init__(self, send: Callable[[int, list[Message]], Awaitable[None]], linger_s: float) -> None:
        self._send = send
        self._linger_s = linger_s
        self._lanes: dict[int, _Lane] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def add(self, number: int, key: bytes, value: bytes) -> None:
        """Gather an event of that lane; waits only while the lane's buffer is full."""
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = _Lane(partial(self._send, number))
        await lane.add(key, value)
        if lane.bytes >= FULL_BYTES:
            lane.leave()
        elif self._timer is None:
            # One timer for all lanes, so that the batches of those led by one broker leave in one request.
            self._timer = asyncio.get_running_loop().call_later(self._linger_s, self._leave)

    async def flush(self) -> None:
        """Hand everything to the producer now."""
        self._leave()
        await asyncio.gather(*(lane.leaving for lane in self._lanes.values() if lane.leaving is not None))

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for lane in self._lanes.values():
            lane.leave()


class _Lane:
    """One lane's events. What has not left holds up later ones of this lane, and of no other."""

    def __init__(self, send: Callable[[list[Message]], Awaitable[None]]) -> None:
        self._send = send
        self._events: list[Message] = []
        self._room = asyncio.Event()
        self.bytes = 0
        self.leaving: asyncio.Task[None] | None = None

    async def add(self, key: bytes, value: bytes) -> None:
        while self.bytes >= MOST_BYTES:
            self._room.clear()
            await self._room.wait()
        self._events.append((key, value))
        self.bytes += len(key) + len(value)

    def leave(self) -> None:
        """Send what there is, unless an earlier send has not come to its end: that one goes on with it."""
        if self._events and self.leaving is None:
            self.leaving = asyncio.create_task(self._go())

    async def _go(self) -> None:
        try:
            while self._events:
                events, self._events, self.bytes = self._events, [], 0
                self._room.set()
                await self._send(events)
        finally:
            self.leaving = None
