"""Stops commands that own children, a broker or folders: cancels once, lets them clean up, prints one line.

The relay's long-running processes stop differently (telemetry/process.py): they complete accepted work.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

if TYPE_CHECKING:
    from relaygr_stream.telemetry.process import LoopFactory

T = TypeVar("T")

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
#: Plus the signal's number: the exit code that shells give a process that a signal ended.
EXIT_SIGNAL: Final = 128
#: Seconds after which a cancellation is repeated. Before Python 3.12, asyncio.wait_for, which aiokafka uses everywhere,
#: loses a cancellation that arrives together with its result. Longer than the 15 s that children have to end
#: (children.py).
AGAIN_S: Final = 20.0


def run_until_stopped(
    work: Coroutine[Any, Any, T],
    loop_factory: LoopFactory | None = None,
    *,
    line: str = "stopped; nothing is left behind",
    exit_code: int | None = None,
) -> T:
    """Run `work` and return its result. The first SIGINT or SIGTERM cancels it, a second one exits at once.

    After a cancellation, the process prints `line` and exits with exit_code; None: with 130 or 143.
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
        if threading.current_thread() is threading.main_thread():  # others get no signals
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
    """Print `line` to stderr and exit; exit_code None: with the code of a process that the signal ended."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
    sys.exit(EXIT_SIGNAL + number if exit_code is None else exit_code)


class Interrupted(BaseException):
    """SIGINT or SIGTERM came within `interruptible`.

    Not a KeyboardInterrupt: one that passes through `exec` of a text, as in imports that define a dataclass, makes
    CPython die of SIGINT at its end, although it was handled (pythonrun.c, unhandled_keyboard_interrupt).
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within, SIGINT and SIGTERM kill multiprocessing's children and raise Interrupted.

    The children have nothing to clean up, and the exit would otherwise wait for them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        for child in multiprocessing.active_children():
            child.kill()
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """Within, signals are blocked; processes started within inherit this, so that Ctrl-C reaches only their parent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
