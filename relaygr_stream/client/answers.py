"""Calls that wait for their answer, and what an answer means. Knows nothing of how requests are sent."""

from __future__ import annotations

import asyncio
import hmac
import math
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import structlog

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
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.headers import HEADER_SIGNATURE, answer_signature, header
from relaygr_stream.wire.messages import (
    HEADER_CORRELATION,
    ITEM_DTYPE,
    Outcome,
    ScoreReply,
    Status,
    Timings,
    decode,
    kind_of,
)
from relaygr_stream.wire.records import Record

log = structlog.get_logger(__name__)
_limited = LogLimiter().limited

#: Random for each call: keeps clients of one reply partition apart, and who has seen ids cannot tell the next.
CORRELATION_BYTES: Final = 16
#: Ended calls remembered, to tell duplicate and late answers from foreign ones: a second's worth at some thousand a
#: second.
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
    candidates: npt.NDArray[np.uint32]  # (m,) item ids, as they were given; read-only
    scores: npt.NDArray[np.float32]  # (m, tasks), rows in the order of the candidates; read-only
    tasks: tuple[str, ...]  # names of the columns
    outcome: Outcome  # where the worker found the prefix KV
    latency_s: float  # from the call of rank() to the answer, by this process's clock
    timings: Timings  # on the worker
    worker: str
    model_version: str
    admission: str = ""  # what the trigger decided: `admitted`, or why not; empty: unknown

    def top(self, count: int, *, task: str | None = None) -> npt.NDArray[np.uint32]:
        """The item ids of the best `count` candidates by one task's score, best first; of equals, the earlier given.

        task: may be left out where there is only one. Raises ValueError for an unknown task.
        """
        if task is None and len(self.tasks) == 1:
            task = self.tasks[0]
        if task not in self.tasks:
            raise ValueError(f"task {task!r}: the model scores {', '.join(map(repr, self.tasks))}")
        column = self.scores[:, self.tasks.index(task)]
        return self.candidates[np.argsort(-column, kind="stable")[: max(0, count)]]


@dataclass(eq=False, slots=True)
class Call:
    """One ranking request under way."""

    correlation: bytes
    request_id: str
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
    """Matches answers with calls by correlation id; the first answer to a call counts.

    secret: answers that are not signed with it are dropped; empty: nobody signs. An answer that is not one to the call
    is dropped as well, and the call goes on waiting.
    """

    def __init__(self, metrics: ClientMetrics, max_bytes: int, secret: str = "") -> None:
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._secret = secret
        self._calls: dict[bytes, Call] = {}
        self._ended: OrderedDict[bytes, str] = OrderedDict()  # correlation → what an answer from now on is

    def __len__(self) -> int:
        """Calls under way."""
        return len(self._calls)

    def expect(self, request_id: str) -> Call:
        """A new call; the caller must `forget` it."""
        correlation = secrets.token_bytes(CORRELATION_BYTES)
        call = Call(correlation, request_id, asyncio.get_running_loop().create_future())
        self._calls[correlation] = call
        self._metrics.in_flight.set(len(self._calls))
        return call

    def forget(self, call: Call) -> None:
        """The caller waits no more; an answer from now on is late."""
        self._calls.pop(call.correlation, None)
        self._end(call.correlation, "late")
        self._metrics.in_flight.set(len(self._calls))

    def fail_all(self, error: RelayError) -> None:
        """End every call under way."""
        for call in self._calls.values():
            call.fail(copy(error))  # each caller's own traceback

    def on_records(self, records: Iterable[Record]) -> None:
        """Records of the reply partition."""
        for record in records:
            correlation = header(record.headers, HEADER_CORRELATION)
            call = self._calls.get(correlation)
            if call is None or call.reply.done():
                self._drop(self._ended.get(correlation, "foreign"))
            elif kind_of(record.headers):
                self._drop("kind")
            elif self._secret and not self._is_signed(record, correlation):
                self._drop("forged")
                _limited(log.warning, "forged")(
                    "an answer is not signed, or not with this relay.answer_secret; it is dropped",
                    partition=record.lane,
                    offset=record.offset,
                )
            else:
                self._take(call, record)

    def _take(self, call: Call, record: Record) -> None:
        try:
            reply = decode(ScoreReply, record.value, self._max_bytes)
            # One that could not read the request does not know its id.
            if reply.request_id != call.request_id and (reply.request_id or reply.status != "rejected"):
                self._drop("forged")
                return
            if not np.isfinite(reply.matrix()).all():
                raise DecodeError("invalid", f"worker {reply.worker or '?'} answered scores that are NaN or infinite")
            call.take(reply)
        except DecodeError as error:
            call.lost(WorkerFailed(f"the worker's answer cannot be read: {error}"))
        if call.reply.done():
            self._end(call.correlation, "duplicate")

    def _is_signed(self, record: Record, correlation: bytes) -> bool:
        expected = answer_signature(self._secret, correlation, record.value or b"")
        return hmac.compare_digest(header(record.headers, HEADER_SIGNATURE), expected)

    def _end(self, correlation: bytes, then: str) -> None:
        """An answer from now on is `then`, if it was not that of an earlier end."""
        self._ended.setdefault(correlation, then)
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _drop(self, reason: str) -> None:
        self._metrics.answers_dropped.labels(reason).inc()


def ranking_of(reply: ScoreReply, candidates: bytes, latency_s: float) -> Ranking:
    """The answer as the caller gets it; an answer without scores raises its RequestError."""
    if reply.status != "ok":
        raise _ERRORS[reply.status](reply.detail or f"worker {reply.worker or '?'} answered {reply.status}")
    scores, items = reply.matrix(), np.frombuffer(candidates, ITEM_DTYPE)
    if reply.outcome is None or len(scores) != len(items):
        raise WorkerFailed(
            f"worker {reply.worker or '?'} answered {len(scores)} rows for {len(items)} candidates, "
            f"outcome {reply.outcome}"
        )
    return Ranking(
        request_id=reply.request_id,
        candidates=items,
        scores=scores,
        tasks=reply.tasks,
        outcome=reply.outcome,
        latency_s=latency_s,
        timings=reply.timings,
        worker=reply.worker,
        model_version=reply.model_version,
        admission=reply.admission,
    )


# Where our answers are to come to: of two partitions of `scores`, another when nothing comes by the present one. A
# partition with one copy is served by one broker, and with it every answer of a client would stay away. Knows nothing
# of what is answered.


#: Requests are out and nothing has come by the present partition for this long: the next ones name the other. Several
#: times what an answer takes, and half of client.silence_ms: where the workers are the cause, changing costs nothing.
UNHEARD_S: Final = 0.5
#: What is known against the partition that is not the present one is forgotten so long after it was last named: its
#: broker may be back. Until then a slow answer by the present one is no reason to try what was silent for longer.
FORGOTTEN_S: Final = 2.0


class ReplyRoute:
    """partitions: the present one first, then perhaps another."""

    def __init__(self, partitions: Sequence[int], clock: Callable[[], float] = time.monotonic) -> None:
        self.partitions: Final = tuple(partitions)
        self._clock = clock
        self._present, self._other = partitions[0], partitions[-1]
        self._since: dict[int, float] = {}  # partition → the oldest request since something came by it
        self._named: dict[int, float] = {}  # partition → the latest request

    def choose(self) -> int:
        """For a new request."""
        self._forget()
        silent_s = self._waiting_s(self._present)
        if silent_s > UNHEARD_S and self._waiting_s(self._other) < silent_s:
            self._present, self._other = self._other, self._present
        return self._name(self._present)

    def choose_again(self) -> int:
        """For a copy of a request that has got no answer: the one by which something came later, or is due for less
        long."""
        self._forget()
        return self._name(min(self._present, self._other, key=self._waiting_s))

    def heard(self, partition: int) -> None:
        """A record came by it."""
        self._since.pop(partition, None)

    def _forget(self) -> None:
        if self._clock() - self._named.get(self._other, math.inf) > FORGOTTEN_S:
            self._since.pop(self._other, None)

    def _name(self, partition: int) -> int:
        self._named[partition] = now = self._clock()
        self._since.setdefault(partition, now)
        return partition

    def _waiting_s(self, partition: int) -> float:
        return self._clock() - self._since.get(partition, math.inf)


def reply_partitions(leaders: Mapping[int, int], chosen: int | None) -> list[int]:
    """The chosen partition, or any that has a leader, and one that another broker leads, if there is one.

    leaders: partition → broker; -1: nobody.
    """
    led = [partition for partition, broker in leaders.items() if broker >= 0] or list(leaders)
    first = random.choice(led) if chosen is None else chosen
    apart = [partition for partition in led if leaders[partition] != leaders[first]]
    return [first, random.choice(apart)] if apart else [first]
