"""The thread that owns the device: takes the loop's commands, steps the scheduler, hands its answers back.

Only this thread touches scheduler, cache and model once it runs. Commands go in as data (`submit`, `ask`), and the loop
reads plain numbers. `take_turn` is the thread's loop body, and that of `relaygr simulate`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from relaygr_stream.cache.transit import giving_back
from relaygr_stream.engine.build import WorkerRuntime
from relaygr_stream.engine.commands import Answer, Command, Placed, Prefill
from relaygr_stream.engine.scheduler import Scheduler
from relaygr_stream.errors import DeviceError
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.clocks import Clock

#: A turn handles commands for so long before it steps: signals that make room take up to a millisecond each, and
#: hundreds may come at once, of a lane that moved or a trigger that was away. Rankings wait for that.
HANDLING_S: Final = 0.005
#: The thread looks around at least this often, so that its pulse (`turns`) shows a hang, not idleness.
IDLE_WAIT_S: Final = 0.25


class Submitted(NamedTuple):
    """A command on its way to the scheduler. asked_by: who is told what `handle` returns; None: no one."""

    command: Command
    asked_by: Any = None


@dataclass(slots=True)
class Turn:
    """What half a turn did."""

    worked: bool = False  # False: there was nothing to do
    answers: list[Answer] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    replies: list[tuple[Any, Any]] = field(default_factory=list)  # asked_by, what `handle` returned
    prefill_bytes: int = 0  # memory of the Prefill commands taken
    error: BaseException | None = None  # what ended the turn, and ends the scheduler


def take_turn(scheduler: Scheduler, inbox: deque[Submitted], clock: Clock) -> Iterator[Turn]:
    """Handle the commands in the inbox, if there are any, for HANDLING_S at most, then step; yields what each half did.

    So what needs no device (refusals, passing on, questions) does not wait for a step. After a half with an error,
    which does not lose what was done before it, there is no other.
    """
    if inbox:
        turn, until = Turn(), clock() + HANDLING_S
        try:
            while inbox and clock() <= until:
                command, asked_by = inbox.popleft()
                reply = scheduler.handle(command, clock())
                if asked_by is not None:
                    turn.replies.append((asked_by, reply))
                if isinstance(command, Prefill):
                    turn.prefill_bytes += command.task.nbytes
        except BaseException as error:  # a defect: the caller decides
            turn.error = error
        turn.answers, turn.placed = scheduler.take_results()
        yield turn
        if turn.error is not None:
            return
    turn = Turn()
    try:
        turn.worked = scheduler.step(clock(), rankings_only=bool(inbox))
    except BaseException as error:  # a defect, or a device that always fails: the caller decides
        turn.error = error
    turn.answers, turn.placed = scheduler.take_results()
    yield turn


# ---- the thread ----


class HasScheduler(Protocol):
    """What the thread runs; WorkerRuntime is one."""

    @property
    def scheduler(self) -> Scheduler:
        """Stepped by the thread."""


R = TypeVar("R", bound=HasScheduler)
T = TypeVar("T")
#: Makes what the thread runs, on it.
Make = Callable[[], R]


class _Question(NamedTuple):
    """Who waits on the loop for what `handle` returns."""

    reply: asyncio.Future[Any]


class Device(NamedTuple):
    """A worker's device thread, and what it runs."""

    thread: DeviceThread
    runtime: WorkerRuntime


class Receiver(Protocol):
    """Takes what the device thread has done, on the loop."""

    def on_answers(self, answers: list[Answer]) -> None:
        """Rankings are answered."""

    def on_placed(self, placed: list[Placed]) -> None:
        """This became of signals whose origin is to be told."""


class DeviceThread:
    """Runs a Scheduler; what it has done arrives at the receiver, on the loop, and a failure of the thread in `failed`.

    Answers given before a failure arrive before it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, receiver: Receiver | None = None) -> None:
        self._loop = loop
        self._receiver = receiver
        self._inbox: deque[Submitted] = deque()
        self._event = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._pulse = time.monotonic()
        self.turns = 0  # halves of turns that are over
        self.prefill_bytes = 0  # memory of all Prefill commands taken so far
        self._background = Background()
        #: The result of a coroutine; raises what the thread failed with, if that comes first.
        self.until: Final = self._background.until

    @property
    def failed(self) -> asyncio.Future[None]:
        """A future that completes, with the error, only if the thread fails."""
        return self._background.failed

    def start(self, make: Make[R]) -> asyncio.Future[R]:
        """Start the thread; the future resolves to what `make` (model, memory, warm-up) has made there."""
        ready: asyncio.Future[R] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(make, ready), name="device", daemon=True)
        self._thread.start()
        return ready

    def deliver_to(self, receiver: Receiver) -> None:
        """From now on, this takes what the thread has done; the parts that do are made once it runs."""
        self._receiver = receiver

    def wake(self) -> None:
        """Have the thread look for work, because a copy is over; callable from any thread."""
        self._event.set()

    def submit(self, *commands: Command) -> None:
        """Have these handled in order, after those submitted before."""
        self._inbox.extend(map(Submitted, commands))
        self._event.set()

    async def ask(self, command: Command) -> Any:
        """What `Scheduler.handle` returns for this command; DeviceError if the thread has ended.

        What a cancelled question got is given back (cache/transit.py: giving_back).
        """
        reply: asyncio.Future[Any] = self._loop.create_future()
        question = _Question(reply)
        self._inbox.append(Submitted(command, question))
        self._event.set()
        try:
            await asyncio.wait({reply, self.failed}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if reply.done():
                self._take_back(reply.result())
            else:
                reply.cancel()  # taken back when it comes
            raise
        if not reply.done():
            raise DeviceError("the device thread has ended")
        return reply.result()

    @property
    def stalled_for(self) -> float:
        """Seconds since the thread last finished a step or looked for work."""
        return time.monotonic() - self._pulse

    async def stop(self, timeout: float) -> bool:
        """End the thread after what it is doing now; False if it hangs for longer than `timeout` seconds.

        A thread that ends in order closes its scheduler, which checks the books: what that raises is in `failed`.
        """
        self._stopping = True
        self._event.set()
        thread = self._thread
        if thread is None:
            return True
        await asyncio.to_thread(thread.join, timeout)
        return not thread.is_alive()

    # ---- on the device thread ----

    def _main(self, make: Make[R], ready: asyncio.Future[R]) -> None:
        try:
            made = make()
        except BaseException as error:  # whatever it is, the loop must learn of it: it waits
            self._loop.call_soon_threadsafe(_fail, ready, error)
            return
        self._loop.call_soon_threadsafe(_resolve, ready, made)
        scheduler = made.scheduler
        try:
            while not self._stopping:
                self._event.clear()
                for turn in take_turn(scheduler, self._inbox, time.monotonic):
                    self._pulse = now = time.monotonic()
                    self.prefill_bytes += turn.prefill_bytes
                    for answer in turn.answers:
                        answer.measured.finished = now
                    if turn.answers or turn.replies or turn.placed:
                        self._loop.call_soon_threadsafe(self._deliver, turn)
                    self.turns += 1
                    if turn.error is not None:
                        raise turn.error
                if not turn.worked and not self._inbox:
                    self._wait(scheduler.next_timer())
            scheduler.close()
        except BaseException as error:  # as above
            self._loop.call_soon_threadsafe(self._background.fail, _typed(error))
            with suppress(DeviceError):  # what failed has been told
                scheduler.cache.close()

    def _wait(self, until: float | None) -> None:
        """For a command, for `wake`, or until this time; not for longer than IDLE_WAIT_S."""
        seconds = IDLE_WAIT_S if until is None else until - time.monotonic()
        self._event.wait(min(IDLE_WAIT_S, max(0.0, seconds)))

    # ---- on the loop ----

    def _deliver(self, turn: Turn) -> None:
        for question, reply in turn.replies:
            if question.reply.cancelled():
                self._take_back(reply)
            else:
                question.reply.set_result(reply)
        if self._receiver is not None and turn.answers:
            self._receiver.on_answers(turn.answers)
        if self._receiver is not None and turn.placed:
            self._receiver.on_placed(turn.placed)

    def _take_back(self, reply: Any) -> None:
        if (command := giving_back(reply)) is not None:
            self.submit(command)


def _typed(error: BaseException) -> BaseException:
    """torch raises RuntimeError for what happens to a device outside of a request's work."""
    if not isinstance(error, RuntimeError):
        return error
    typed = DeviceError(f"the device thread failed: {error}")
    typed.__cause__ = error
    return typed


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
