"""The thread that owns the device: takes what the loop hands in, steps the core, hands answers back.

Nothing but this thread touches core, cache and model once it runs. The loop hands in calls (`submit`), in order, and
reads plain numbers.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from relaygr_stream.errors import DeviceError
from relaygr_stream.worker.scheduler import RelayCore
from relaygr_stream.worker.tasks import Answer

#: The thread looks around at least this often, so that its pulse (`turns`) shows a hang, not idleness.
IDLE_WAIT_S: Final = 0.25

Call = Callable[[RelayCore, float], None]


class DeviceThread:
    """Runs a RelayCore; answers arrive on the loop through `on_answers`, a failure of the thread through `failed`.

    Answers given before a failure arrive before it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_answers: Callable[[list[Answer]], None]) -> None:
        self._loop = loop
        self._on_answers = on_answers
        self._inbox: deque[Call] = deque()
        self._outbox: deque[Answer] = deque()
        self._event = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._pulse = time.monotonic()
        self.turns = 0  # times the thread looked for work
        self.failed: asyncio.Future[None] = loop.create_future()
        self.failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())  # may go unwatched

    def start(self, make: Callable[[], RelayCore]) -> asyncio.Future[RelayCore]:
        """Start the thread; the future resolves to the core once `make` (model, memory, warm-up) has run there."""
        ready: asyncio.Future[RelayCore] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(make, ready), name="device", daemon=True)
        self._thread.start()
        return ready

    def deliver(self, answer: Answer) -> None:
        """Called by the core, on this thread."""
        answer.task.finished = time.monotonic()
        self._outbox.append(answer)

    def wake(self) -> None:
        """There may be something to do (a copy is over); callable from any thread."""
        self._event.set()

    def submit(self, call: Call) -> None:
        """Have `call(core, now)` run on the device thread before its next step, after those submitted before."""
        self._inbox.append(call)
        self._event.set()

    async def ask(self, question: Callable[[RelayCore, float], object]) -> None:
        """Run `question` on the device thread and wait until it has run; DeviceError if the thread has ended."""
        done: asyncio.Future[None] = self._loop.create_future()

        def run(core: RelayCore, now: float) -> None:
            question(core, now)
            self._loop.call_soon_threadsafe(_resolve, done, None)

        self.submit(run)
        await asyncio.wait({done, self.failed}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise DeviceError("the device thread has ended")

    @property
    def stalled_for(self) -> float:
        """Seconds since the thread last finished a step or looked for work."""
        return time.monotonic() - self._pulse

    async def stop(self, timeout: float) -> bool:
        """End the thread after what it is doing now; False if it hangs for longer than `timeout` seconds.

        A thread that ends in order closes its core, which checks the books: what that raises is in `failed`.
        """
        self._stopping = True
        self._event.set()
        thread = self._thread
        if thread is None:
            return True
        await asyncio.to_thread(thread.join, timeout)
        return not thread.is_alive()

    def _main(self, make: Callable[[], RelayCore], ready: asyncio.Future[RelayCore]) -> None:
        try:
            core = make()
        except BaseException as error:  # whatever it is, the loop must learn of it: it waits
            self._loop.call_soon_threadsafe(_fail, ready, error)
            return
        self._loop.call_soon_threadsafe(_resolve, ready, core)
        try:
            while not self._stopping:
                self._turn(core)
            core.close()
        except BaseException as error:  # as above
            self._flush()
            self._loop.call_soon_threadsafe(_fail, self.failed, error)
            with suppress(DeviceError):  # what failed has been told
                core.cache.close()

    def _turn(self, core: RelayCore) -> None:
        """Take what came in, run one step, deliver; wait when there was nothing to do."""
        self._event.clear()
        while self._inbox:
            self._inbox.popleft()(core, time.monotonic())
        worked = core.step(time.monotonic())
        self._flush()
        self._pulse = time.monotonic()
        self.turns += 1
        if not worked and not self._inbox:
            self._event.wait(_wait_s(core))

    def _flush(self) -> None:
        if self._outbox:
            answers = list(self._outbox)
            self._outbox.clear()
            self._loop.call_soon_threadsafe(self._on_answers, answers)


def _wait_s(core: RelayCore) -> float:
    timer = core.next_timer()
    return IDLE_WAIT_S if timer is None else min(IDLE_WAIT_S, max(0.0, timer - time.monotonic()))


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
