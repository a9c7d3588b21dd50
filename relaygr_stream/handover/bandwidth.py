"""A bound on bytes per second: a token bucket. Knows nothing of what the bytes are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class Bandwidth:
    """`take` returns when so many bytes may go. burst: bytes that may go at once after a pause.

    Those who wait are served in turn of asking; the bound is on all of them together. clock: seconds.
    """

    def __init__(
        self,
        bytes_per_s: float,
        burst: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._rate = bytes_per_s
        self._burst = burst
        self._clock = clock
        self._sleep = sleep
        self._level = float(burst)
        self._at = clock()

    async def take(self, nbytes: int) -> None:
        """Wait for nbytes of the bandwidth. What is taken stays taken, if the waiting is cancelled too."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        self._level -= nbytes
        if self._level < 0:
            await self._sleep(-self._level / self._rate)
