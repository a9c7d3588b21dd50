"""Calls that wait for their answer, and what an answer means. Knows nothing of how requests are sent."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr_stream.bus.records import Record
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.errors import (
    DeadlineExceeded,
    DecodeError,
    Overloaded,
    Rejected,
    RelayError,
    RequestError,
    WorkerFailed,
)
from relaygr_stream.messages import HEADER_CORRELATION, Outcome, ScoreReply, Status, Timings, decode

#: Correlation ids are this client's nonce and a counter; 8 random bytes keep clients of one reply partition apart.
NONCE_BYTES: Final = 8
COUNTER_BYTES: Final = 8
#: Answered calls remembered, to tell a duplicate answer from a late one: a second's worth at some thousand a second.
REMEMBERED: Final = 4096

_ERRORS: Final[dict[Status, type[RequestError]]] = {
    "deadline_exceeded": DeadlineExceeded,
    "overloaded": Overloaded,
    "rejected": Rejected,
    "failed": WorkerFailed,
}


@dataclass(frozen=True)
class Ranking:
    """The scores of one ranking request."""

    request_id: str
    scores: npt.NDArray[np.float32]  # (m, tasks), rows in the order of the candidates; read-only
    tasks: tuple[str, ...]  # names of the columns
    outcome: Outcome  # where the worker found the prefix KV
    latency_ms: float  # from the call of rank() to the answer, by this process's clock
    timings: Timings  # on the worker
    worker: str
    model_version: str


@dataclass(eq=False, slots=True)
class Call:
    """One ranking request under way."""

    correlation: bytes
    reply: asyncio.Future[ScoreReply]
    attempts: int = 0  # copies that may still bring an answer
    settled_for: ScoreReply | None = None  # what it ends with if no other attempt brings scores

    def take(self, reply: ScoreReply) -> None:
        """An answer came. Scores end the call, and so does a refusal that every worker would repeat; anything else only
        if no other copy is under way."""
        self.attempts -= 1
        if self.attempts <= 0 or reply.status in ("ok", "rejected"):
            self.reply.set_result(reply)
        else:
            self.settled_for = reply

    def lost(self, error: RelayError) -> None:
        """A copy will bring no answer; the call ends with that where it was the last."""
        self.attempts -= 1
        if self.attempts <= 0:
            if self.settled_for is not None and not self.reply.done():
                self.reply.set_result(self.settled_for)
            self.fail(error)

    def fail(self, error: RelayError) -> None:
        """End the call with an error, unless it has ended."""
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()  # the caller may be past waiting for it


class Answers:
    """Matches answers with calls by correlation id; the first answer to a call counts."""

    def __init__(self, metrics: ClientMetrics, max_bytes: int) -> None:
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._count = itertools.count()
        self._calls: dict[bytes, Call] = {}
        self._answered: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        """Calls under way."""
        return len(self._calls)

    def expect(self) -> Call:
        """A new call; the caller must `forget` it."""
        correlation = self._nonce + next(self._count).to_bytes(COUNTER_BYTES, "big")
        call = Call(correlation, asyncio.get_running_loop().create_future())
        self._calls[correlation] = call
        self._metrics.in_flight.set(len(self._calls))
        return call

    def forget(self, call: Call) -> None:
        """The caller waits no more; an answer from now on is late."""
        self._calls.pop(call.correlation, None)
        self._metrics.in_flight.set(len(self._calls))

    def fail_all(self, error: RelayError) -> None:
        """End every call under way."""
        for call in self._calls.values():
            call.fail(copy(error))  # each caller's own traceback

    def on_records(self, records: Iterable[Record]) -> None:
        """Records of the reply partition."""
        for record in records:
            found = (value for name, value in record.headers if name == HEADER_CORRELATION)
            correlation = next(found, b"") or b""  # Kafka allows null for a header's value
            call = self._calls.get(correlation)
            if call is None or call.reply.done():
                self._metrics.answers_dropped.labels(self._why_unexpected(correlation)).inc()
                continue
            try:
                call.take(decode(ScoreReply, record.value, self._max_bytes))
            except DecodeError as error:
                call.lost(WorkerFailed(f"the worker's answer cannot be read: {error}"))
            if call.reply.done():
                self._answered[correlation] = None
                if len(self._answered) > REMEMBERED:
                    self._answered.popitem(last=False)

    def _why_unexpected(self, correlation: bytes) -> str:
        if not correlation.startswith(self._nonce):
            return "foreign"
        return "duplicate" if correlation in self._answered else "late"


def ranking_of(reply: ScoreReply, candidates: int, latency_ms: float) -> Ranking:
    """The answer as the caller gets it; an answer without scores raises its RequestError."""
    if reply.status != "ok":
        raise _ERRORS[reply.status](reply.detail or f"worker {reply.worker or '?'} answered {reply.status}")
    scores = reply.matrix()
    if reply.outcome is None or len(scores) != candidates:
        raise WorkerFailed(
            f"worker {reply.worker or '?'} answered {len(scores)} rows for {candidates} candidates, "
            f"outcome {reply.outcome}"
        )
    return Ranking(
        request_id=reply.request_id,
        scores=scores,
        tasks=reply.tasks,
        outcome=reply.outcome,
        latency_ms=latency_ms,
        timings=reply.timings,
        worker=reply.worker,
        model_version=reply.model_version,
    )
