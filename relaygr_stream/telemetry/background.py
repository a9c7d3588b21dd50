"""The owner of background work: starts it, keeps its first failure, ends it; and work that outlasts a broker's absence.

A process has one `Background`, whose failure ends it. A part with tasks of its own (a tail, a consumer, the device
thread) has one, too, and shows its `failed`, which the process watches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import cached_property
from itertools import chain, repeat
from typing import Any, TypeVar

import structlog

from relaygr_stream.errors import BrokerError
from relaygr_stream.telemetry.limiter import LogLimiter

T = TypeVar("T")

log = structlog.get_logger(__name__)
limited = LogLimiter().limited


class Background:
    """Tasks with one owner. All but the constructor runs on the event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @cached_property
    def failed(self) -> asyncio.Future[None]:
        """A future that completes only with the first failure. It may go unwatched."""
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())  # no warning if unused
        return failed

    def start(self, work: Coroutine[Any, Any, object], name: str | None = None) -> asyncio.Task[Any]:
        """Run `work` as a task until `end`; an exception is a failure, a cancellation is not."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.watch(task)
        return task

    def watch(self, *futures: asyncio.Future[Any]) -> None:
        """Treat an exception in one of these futures, which others own, as a failure."""
        for future in futures:
            future.add_done_callback(self._note_failure)

    def fail(self, error: BaseException) -> None:
        """Note a failure; the first one counts."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def check(self) -> None:
        """Raise the first failure, if there is one."""
        if self.failed.done():
            self.failed.result()

    async def until(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and return its result; on the first failure, cancel it and raise the failure."""
        task = asyncio.get_running_loop().create_task(work)
        try:
            ends: set[asyncio.Future[Any]] = {task, self.failed}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            return await task
        finally:
            task.cancel()

    async def end(self) -> None:
        """Cancel the started tasks and wait for their end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note_failure(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self.fail(error)


#: What is called, and awaited.
Work = Callable[[], Coroutine[Any, Any, None]]


async def periodically(
    seconds: float,
    work: Work,
    doing: str,
    skips: tuple[type[Exception], ...] = (BrokerError,),
) -> None:
    """Run `work` now and after every pause of `seconds`, for ever. An error of `skips` is logged, and skips one run.

    doing: what the work does, in words: "cannot … now".
    """
    while True:
        try:
            await work()
        except skips as error:
            limited(log.warning, doing)(f"cannot {doing} now", error=str(error) or type(error).__name__)
        await asyncio.sleep(seconds)


def endless(pauses: Sequence[float]) -> Iterator[float]:
    """The pauses between one try and the next: these, and then the last one for ever."""
    return chain(pauses, repeat(pauses[-1]))
