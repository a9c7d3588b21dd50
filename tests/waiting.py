"""Waiting for what other tasks, threads or processes bring about; and a clock that moves when a test says so."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

WHAT = "what was waited for"
#: A bound against hanging, not a claim of speed: beside twenty processes that want the two cores a test takes minutes.
WITHIN_S = 300.0
PAUSE_S = 0.01


async def until(condition: Callable[[], object], what: str = WHAT, seconds: float = WITHIN_S) -> None:
    """Wait for a condition, which may be a coroutine function, or fail saying what did not come."""
    deadline = time.monotonic() + seconds
    while not await _holds(condition):
        assert time.monotonic() < deadline, f"within {seconds:.0f} s: not {what}"
        await asyncio.sleep(PAUSE_S)


async def _holds(condition: Callable[[], object]) -> object:
    found = condition()
    return await found if inspect.isawaitable(found) else found


def until_blocking(condition: Callable[[], object], what: str = WHAT, seconds: float = WITHIN_S) -> None:
    """As until, where no event loop runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"within {seconds:.0f} s: not {what}"
        time.sleep(PAUSE_S)


class Clock:
    """Seconds, for what takes its clock as an argument."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        """In place of asyncio.sleep."""
        self.now += seconds
