"""How a command that owns something (children, a broker, folders) is stopped: cancelled once, cleaned up, one line.

Long-running processes of the relay have their own manners (telemetry/process.py): they finish what they accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, Final, NoReturn, TypeVar

T = TypeVar("T")

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
#: As shells say it of a process that a signal ended.
EXIT_SIGNAL: Final = 128
#: Until 3.12, asyncio.wait_for loses a cancellation that comes with its result (aiokafka uses it everywhere), so
#: what goes on is cancelled again: after children have had their 15 s to end (children.py), not in the middle of that.
AGAIN_S: Final = 20.0


def run_until_stopped(
    work: Coroutine[Any, Any, T],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    *,
    line: str = "stopped; nothing is left behind",
    exit_code: int | None = None,
) -> T:
    """The coroutine's result. The first SIGINT or SIGTERM cancels it, a second one ends the process at once.

    Cancelled, the process says `line` and exits; exit_code None: with 130 or 143.
    """
    seen: list[int] = []

    def on_signal(task: asyncio.Task[T], number: int) -> None:
        if seen:
            os._exit(EXIT_SIGNAL + number)
        seen.append(number)
        cancel(task)

    def cancel(task: asyncio.Task[T]) -> None:
        task.cancel()
        asyncio.get_running_loop().call_later(AGAIN_S, cancel, task)

    async def whole() -> T:
        task = asyncio.ensure_future(work)
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, on_signal, task, number)
        return await task

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(whole())
    except asyncio.CancelledError:
        if not seen:
            raise
        stopped(line, seen[0], exit_code)


def stopped(line: str, number: int = signal.SIGINT, exit_code: int | None = None) -> NoReturn:
    """Say so, and exit as the signal's victims do."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
    sys.exit(EXIT_SIGNAL + number if exit_code is None else exit_code)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within, SIGINT and SIGTERM kill multiprocessing's children, who have nothing to put in order and are waited for
    otherwise, and raise KeyboardInterrupt(number)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        for child in multiprocessing.active_children():
            child.kill()
        raise KeyboardInterrupt(number)

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """Within, signals wait; processes started within never see a Ctrl-C on the terminal, which is for their parent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
