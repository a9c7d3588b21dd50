"""A heartbeat on an asyncio loop: measures how late the loop runs its callbacks, and detects that it is stuck.

Other threads read it, since a stuck loop cannot report itself.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, Histogram

from relaygr_stream.telemetry.limiter import flush_limiters

#: One timer every 100 ms costs the loop about 10 µs a second, and a stall of half a second shows as five missed beats.
BEAT_S: Final = 0.1
#: Seconds between flushes of the log limiters.
FLUSH_S: Final = 1.0
_LAG_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class LoopWatch:
    """Beats on the running loop between `start` and `stop`; both must be called on that loop."""

    def __init__(self, registry: CollectorRegistry, stall_s: float) -> None:
        self._stall_s = stall_s
        self._handle: asyncio.TimerHandle | None = None
        self._due = self._beat_at = self._flush_at = time.monotonic()
        self._lag = Histogram(
            "relaygr_loop_lag_seconds",
            "How much later than due the event loop ran its heartbeat",
            buckets=_LAG_BUCKETS,
            registry=registry,
        )
        Gauge(
            "relaygr_loop_silence_seconds",
            "Time since the event loop last ran its heartbeat; grows while the loop is stuck",
            registry=registry,
        ).set_function(self.silence_s)

    def start(self) -> None:
        """Beat from now on."""
        self._beat_at = time.monotonic()
        self._next()

    def stop(self) -> None:
        """Stop beating; `stalled` then reports a stuck loop after stall_s."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def silence_s(self) -> float:
        """Seconds since the last beat. Any thread may call it."""
        return max(0.0, time.monotonic() - self._beat_at)

    def stalled(self) -> str | None:
        """Why the loop counts as stuck, or None while it runs. Any thread may call it."""
        silence = self.silence_s()
        if silence <= self._stall_s:
            return None
        return f"the event loop has not run for {silence:.1f} s (limit {self._stall_s:g} s)"

    def _next(self) -> None:
        self._due = time.monotonic() + BEAT_S
        self._handle = asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        now = time.monotonic()
        self._beat_at = now
        # uvloop counts whole milliseconds and may run a callback a fraction early.
        self._lag.observe(max(0.0, now - self._due))
        if now >= self._flush_at:
            self._flush_at = now + FLUSH_S
            flush_limiters()
        self._next()
