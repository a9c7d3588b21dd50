"""What a worker's core decides is to be done: its caller carries these out, in their order (core.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

from relaygr_stream.engine.commands import Answer, Cancel, LanesLost, Placed, Prefill, Rank
from relaygr_stream.errors import DecodeError
from relaygr_stream.wire.messages import Status


class Submit(NamedTuple):
    """Hand the command to the device. record: done once the device has taken it; None: none waits for that."""

    command: Rank | Prefill | Cancel | LanesLost
    record: Any = None


class Fetch(NamedTuple):
    """Find the history that the command refers to, and report it to `on_history`.

    stored: read it from the store unless it is kept; False: it must be kept.
    """

    command: Rank | Prefill
    stored: bool = True


class Reply(NamedTuple):
    """Send this answer, and report that to `on_replied`. admission: what the trigger decided on the request.

    declined: nothing of the request is counted, so nothing of it may be kept.
    """

    answer: Answer
    admission: str
    declined: bool = False


class Reject(NamedTuple):
    """Answer a record that became no task. done: the record is done with that, not with its dead letter. scenario: as
    of a task."""

    origin: Any
    status: Status
    detail: str
    request_id: str = ""
    done: bool = True
    scenario: str = ""


class Forward(NamedTuple):
    """Send the ranking to this lane, with one hop more, and report to `on_forwarded` or `on_not_forwarded`.

    answer: what the ranking gets here if no broker takes it.
    """

    answer: Answer
    lane: int


class Release(NamedTuple):
    """Tell the worker that owns this lane that no ranking of the request will come there.

    cancel: the client's record, to be passed on; None: one of our own is sent. A lost one is harmless: the pin ends
    with its life window.
    """

    request_key: str
    lane: int
    cancel: Any = None


class DeadLetter(NamedTuple):
    """Dead-letter the record, which is done with that."""

    record: Any
    error: DecodeError


class SignalOver(NamedTuple):
    """A signal has come to this: its span ends, and its record is done if it is not yet."""

    placed: Placed


class Done(NamedTuple):
    """The record is done, so that its offset may be committed."""

    record: Any


class CountForward(NamedTuple):
    """Count what became of a ranking that was to go elsewhere: `sent`, `delegate`, or why it did not go."""

    result: str


Effect = Submit | Fetch | Reply | Reject | Forward | Release | DeadLetter | SignalOver | Done | CountForward
Effects = list[Effect]


class Missing(NamedTuple):
    """Why a command gets no history."""

    status: Status
    detail: str
