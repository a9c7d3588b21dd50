"""The owner of a process's background work: starts it, keeps its failures, ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Background work of a process; the first failure ends the process.

    `start` runs a coroutine until `end`. `fail` reports a failure from a callback or a thread. `until` raises the first
    failure.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._errors: list[BaseException] = []
        self._failed = asyncio.Event()

    def start(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        """Run `work` as a task of this owner; an exception is a failure, a cancellation is not."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.watch(task)
        return task

    def watch(self, *futures: asyncio.Future[Any]) -> None:
        """Treat an exception in one of these futures, which others own, as a failure."""
        for future in futures:
            future.add_done_callback(self._note_failure)

    def fail(self, error: BaseException) -> None:
        """Note a failure; call it on the loop."""
        self._errors.append(error)
        self._failed.set()

    def check(self) -> None:
        """Raise the first failure, if there is one."""
        if self._errors:
            raise self._errors[0]

    async def until(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and return its result; on the first failure, cancel it and raise the failure."""
        task = asyncio.get_running_loop().create_task(work)
        failure = asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait({task, failure}, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            return await task
        finally:
            failure.cancel()
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
