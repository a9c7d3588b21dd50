"""Waiting for what other tasks, threads or processes bring about; and a clock that moves when a test says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], what: str = "what was waited for", seconds: float = 120.0) -> None:
    """Wait for a condition, or fail saying what did not; seconds: a bound against hanging, not a claim of speed."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"within {seconds:.0f} s: not {what}"
        await asyncio.sleep(0.01)


class Clock:
    """Seconds, for what takes its clock as an argument."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        """In place of asyncio.sleep."""
        self.now += seconds
