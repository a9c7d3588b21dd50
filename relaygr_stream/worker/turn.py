"""One turn of the device: take the commands that came in, then run one step. The device thread, `relaygr simulate` and
the tests all go through here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from relaygr_stream.worker.commands import Answer, Command, Placed, Prefill
from relaygr_stream.worker.scheduler import Scheduler


class Submitted(NamedTuple):
    """A command on its way to the scheduler. asked_by: who is told what `handle` returns; None: no one."""

    command: Command
    asked_by: Any = None


@dataclass(slots=True)
class Turn:
    """What a turn did."""

    worked: bool = False  # False: there was nothing to do
    answers: list[Answer] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    replies: list[tuple[Any, Any]] = field(default_factory=list)  # asked_by, what `handle` returned
    prefill_bytes: int = 0  # memory of the Prefill commands taken
    error: BaseException | None = None  # what ended the turn, and ends the scheduler


def take_turn(scheduler: Scheduler, inbox: deque[Submitted], clock: Callable[[], float]) -> Turn:
    """Handle every command in the inbox, then step. An error does not lose what was done before it."""
    turn = Turn()
    try:
        while inbox:
            command, asked_by = inbox.popleft()
            reply = scheduler.handle(command, clock())
            if asked_by is not None:
                turn.replies.append((asked_by, reply))
            if isinstance(command, Prefill):
                turn.prefill_bytes += command.task.nbytes
        turn.worked = scheduler.step(clock())
    except BaseException as error:  # a defect, or a device that always fails: the caller decides
        turn.error = error
    turn.answers = scheduler.take_answers()
    turn.placed = scheduler.take_placed()
    return turn
