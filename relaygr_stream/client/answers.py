"""Matches answers with the calls that wait for them, and chooses the partition on which answers arrive."""

from __future__ import annotations

import asyncio
import hmac
import math
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import structlog

from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.client.sender import Waits, may_be_lost
from relaygr_stream.errors import (
    DeadlineExceeded,
    DecodeError,
    Overloaded,
    Rejected,
    RelayError,
    RequestError,
    TopicError,
    WorkerFailed,
)
from relaygr_stream.telemetry.clocks import Clock
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import Outcome, ScoreReply, Status, Timings
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_SIGNATURE, Record, header, kind_of
from relaygr_stream.wire.signature import answer_signature

log = structlog.get_logger(__name__)
_limited = LogLimiter().limited

#: Random for each call: it keeps clients of one reply partition apart, and earlier ids do not reveal the next one. A
#: copy's correlation id is that of its call and the copy's number.
CORRELATION_BYTES: Final = 16
#: Most ended calls remembered, to tell duplicate and late answers from foreign ones: one second at 4,096 calls/s.
MAX_ENDED_CALLS: Final = 4096

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
    candidates: npt.NDArray[Any]  # (m,) item ids, uint32 or int64, in the order given; read-only
    scores: npt.NDArray[np.float32]  # (m, tasks), rows in the order of the candidates; read-only
    tasks: tuple[str, ...]  # names of the columns
    outcome: Outcome  # where the worker found the prefix KV
    latency_s: float  # from the call of rank() to the answer, by this process's clock
    timings: Timings  # on the worker, in milliseconds
    worker: str
    model_version: str
    admission: str = ""  # the trigger's decision: `admitted`, or the reason against; empty: unknown
    truncated_to: int = 0  # newest behaviours that were ranked with, outcome `truncated`; 0: with all

    def top(self, count: int, *, task: str | None = None) -> npt.NDArray[Any]:
        """The item ids of the best `count` candidates by one task's score, best first; equal scores keep their order.

        task: optional if the model has only one. Raises ValueError for an unknown task.
        """
        if task is None and len(self.tasks) == 1:
            task = self.tasks[0]
        if task not in self.tasks:
            raise ValueError(f"task {task!r}: the model scores {', '.join(map(repr, self.tasks))}; name one of these")
        column = self.scores[:, self.tasks.index(task)]
        return self.candidates[np.argsort(-column, kind="stable")[: max(0, count)]]


@dataclass(eq=False, slots=True)
class Call:
    """One ranking request in flight."""

    correlation: bytes
    request_id: str
    reply: asyncio.Future[ScoreReply]
    in_flight: set[bytes] = field(default_factory=set)  # correlation ids of copies that may still be answered
    fallback: ScoreReply | None = None  # the call's result if no other copy is answered with scores

    def new_copy(self, number: int) -> bytes:
        """The correlation id of a further copy, which is in flight from now on."""
        correlation = self.correlation + bytes([number])
        self.in_flight.add(correlation)
        return correlation

    def on_reply(self, copy: bytes, reply: ScoreReply) -> None:
        """Handle an answer to one copy; another one has answered it already if its worker ended before its commit.

        Scores and `rejected`, which every worker would repeat, complete the call. Any other status completes it only
        if no other copy is in flight.
        """
        self.in_flight.discard(copy)
        if not self.in_flight or reply.status in ("ok", "rejected"):
            self.reply.set_result(reply)
        else:
            self.fallback = reply

    def on_copy_failed(self, copy: bytes, error: RelayError) -> None:
        """One copy gets no answer. The last one to fail completes the call."""
        self.in_flight.discard(copy)
        if not self.in_flight:
            if self.fallback is not None and not self.reply.done():
                self.reply.set_result(self.fallback)
            self.fail(error)

    def fail(self, error: RelayError | TimeoutError) -> None:
        """Complete the call with an error, unless it is complete. TimeoutError: its time is over."""
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()  # marks it as retrieved: the caller may have stopped waiting


class Answers:
    """Matches answers with calls by correlation id; the first answer to a call counts.

    An answer with another request's id is dropped, and the call continues to wait.

    max_bytes: longest answer that is decoded. answer_secrets: answers that are not signed with one of them are dropped;
    all empty: answers are not signed.
    """

    def __init__(self, metrics: ClientMetrics, max_bytes: int, answer_secrets: Iterable[str] = ()) -> None:
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._answer_secrets = tuple(secret for secret in answer_secrets if secret)
        self._calls: dict[bytes, Call] = {}
        metrics.in_flight.set_function(lambda: len(self._calls))
        self._ended: OrderedDict[bytes, str] = OrderedDict()  # correlation → why a further answer is dropped

    def __len__(self) -> int:
        """Calls in flight."""
        return len(self._calls)

    def expect(self, request_id: str) -> Call:
        """Register a new call; the caller must `release` it."""
        correlation = secrets.token_bytes(CORRELATION_BYTES)
        call = Call(correlation, request_id, asyncio.get_running_loop().create_future())
        self._calls[correlation] = call
        return call

    def release(self, call: Call) -> None:
        """Remove a call whose caller has stopped waiting; a further answer to it is late."""
        self._calls.pop(call.correlation, None)
        self._remember_ended(call.correlation, "late")

    def fail_all(self, error: RelayError) -> None:
        """Complete every call in flight with an error."""
        for call in self._calls.values():
            call.fail(copy(error))  # each caller gets its own traceback

    def on_records(self, records: Iterable[Record]) -> None:
        """Handle records of the reply partition."""
        for record in records:
            correlation = header(record.headers, HEADER_CORRELATION)
            of_call = correlation[:CORRELATION_BYTES]
            call = self._calls.get(of_call)
            if call is None or call.reply.done():
                # A call whose time is over is released one turn of the loop later.
                self._drop(self._ended.get(of_call, "foreign" if call is None else "late"))
            elif kind_of(record.headers):
                self._drop("kind")
            elif self._answer_secrets and not self._is_signed(record, correlation):
                self._drop("forged")
                _limited(log.warning, "forged")(
                    "dropped an answer that is not signed with relay.answer_secret",
                    partition=record.lane,
                    offset=record.offset,
                )
            else:
                self._on_reply(call, correlation, record)

    def _on_reply(self, call: Call, copy: bytes, record: Record) -> None:
        try:
            reply = decode(ScoreReply, record.value, self._max_bytes)
            # A worker that could not read the request, or must not, answers without its id.
            if reply.request_id != call.request_id and (reply.request_id or reply.status not in ("rejected", "failed")):
                self._drop("forged")
                return
            if not np.isfinite(reply.matrix()).all():
                raise DecodeError("invalid", f"worker {reply.worker or '?'} answered scores that are NaN or infinite")
            call.on_reply(copy, reply)
        except DecodeError as error:
            call.on_copy_failed(copy, WorkerFailed(f"the worker's answer cannot be read: {error}"))
        if call.reply.done():
            self._remember_ended(call.correlation, "duplicate")

    def _is_signed(self, record: Record, correlation: bytes) -> bool:
        stated = header(record.headers, HEADER_SIGNATURE)
        return any(
            hmac.compare_digest(stated, answer_signature(secret, correlation, record.value or b""))
            for secret in self._answer_secrets
        )

    def _remember_ended(self, correlation: bytes, then: str) -> None:
        """Drop further answers to this call for the reason `then`; the first reason stays."""
        self._ended.setdefault(correlation, then)
        if len(self._ended) > MAX_ENDED_CALLS:
            self._ended.popitem(last=False)

    def _drop(self, reason: str) -> None:
        self._metrics.answers_dropped.labels(reason).inc()


def ranking_of(reply: ScoreReply, items: npt.NDArray[Any], latency_s: float) -> Ranking:
    """The answer as a Ranking. An answer without scores raises the RequestError of its status.

    items: (m,), the candidates' ids. latency_s: seconds from the call of rank() to the answer.
    """
    if reply.status != "ok":
        raise _ERRORS[reply.status](reply.detail or f"worker {reply.worker or '?'} answered {reply.status}")
    scores = reply.matrix()
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
        truncated_to=reply.truncated_to,
    )


# The reply partition.

#: New requests name the other reply partition after this long without an answer on the current one, while requests are
#: in flight. Several times the time of an answer. Below client.silence_ms: if the workers are the cause, the change
#: costs nothing.
SWITCH_AFTER_S: Final = 0.5
#: The silence of the other partition expires this long after the last request that named it: its broker may be back.
#: Until then, a slow answer on the current partition is no reason to return to one that was silent for longer. A
#: restart of a broker takes about as long; where requests are hedged, a copy's answer ends the silence earlier.
PARTITION_SILENCE_EXPIRES_S: Final = 10.0


class ReplyRoute:
    """Chooses the partition of `scores` on which a request is answered, of two on different brokers.

    A partition with one copy depends on one broker: with a single reply partition, that broker's failure would hold up
    every answer of a client.

    topic: of the answers. partitions: the first choice, then optionally a second. waits: of the topic's partitions;
    None: each has a broker that acknowledges.
    """

    def __init__(
        self,
        topic: str,
        partitions: Sequence[int],
        waits: Waits | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.partitions: Final = tuple(partitions)
        self._topic = topic
        self._waits = waits
        self.clock: Final = clock
        self._gone: str | None = None  # why no answer can come
        self._current, self._other = partitions[0], partitions[-1]
        self._awaited_since: dict[int, float] = {}  # partition → time of the oldest request since its last record
        self._received: dict[int, float] = {}  # partition → time of its last record
        self._used: dict[int, float] = {}  # partition → time of the latest request

    def _unacknowledged_s(self, partition: int) -> float:
        return 0.0 if self._waits is None else self._waits.waits_s([partition])[partition]

    def _led(self, partition: int) -> bool:
        return self._unacknowledged_s(partition) < math.inf

    def broker_of(self, partition: int) -> int | None:
        """The broker that leads the partition; None: not known."""
        return None if self._waits is None else self._waits.broker_of(partition)

    def may_be_lost(self, partition: int, broker: int | None) -> bool:
        """Whether an answer to a request that was sent while this broker led the partition may be lost."""
        return may_be_lost(self._waits, partition, broker)

    def counted(self, count: int) -> None:
        """Note how many partitions the topic has now: fewer than before if it was deleted and made anew."""
        there = [partition for partition in self.partitions if partition < count]
        self._gone = None
        if not there:
            self._gone = (
                f"topic {self._topic} has {count} partitions now, and the answers of this client came on "
                f"{' and '.join(map(str, self.partitions))}: it was made anew with fewer; open a new client"
            )
        elif self._current not in there or self._other not in there or self._current == self._other:
            self._current, self._other = there[0], there[-1]

    @property
    def gone(self) -> TopicError | None:
        """Why no answer can come; None if one can."""
        return None if self._gone is None else TopicError(self._gone)

    def choose(self) -> int:
        """The reply partition of a new request. Raises TopicError if none of them exists any more."""
        if (gone := self.gone) is not None:
            raise gone
        if self.clock() - self._used.get(self._other, math.inf) > PARTITION_SILENCE_EXPIRES_S:
            self._awaited_since.pop(self._other, None)
        silent_s = self._waiting_s(self._current)
        silent = silent_s > SWITCH_AFTER_S and self._waiting_s(self._other) < silent_s
        if (silent or not self._led(self._current)) and self._led(self._other):
            self._current, self._other = self._other, self._current
        return self._use(self._current)

    def choose_again(self, unanswered: Mapping[int, int], since_s: float) -> int:
        """The reply partition of a further copy of a request that has no answer yet.

        A partition that brought answers since the copy before works, so this request's answer is missing for another
        reason. Else it is the one that fewer copies named in vain, then the one whose broker acknowledges. unanswered:
        partition → copies that named it and that a broker has; a copy that no broker has says nothing of its partition.
        since_s: when the copy before was sent, by this clock.
        """
        both = [self._current, self._other]
        named = [each for each in both if self._led(each)] or both
        heard = [each for each in named if self._received.get(each, -math.inf) >= since_s]
        if heard:
            return self._use(heard[0])
        return self._use(min(named, key=lambda each: (unanswered.get(each, 0), self._unacknowledged_s(each))))

    def received(self, partition: int) -> None:
        """Note a record on this partition."""
        self._awaited_since.pop(partition, None)
        self._received[partition] = self.clock()

    def _use(self, partition: int) -> int:
        self._used[partition] = now = self.clock()
        self._awaited_since.setdefault(partition, now)
        return partition

    def _waiting_s(self, partition: int) -> float:
        return self.clock() - self._awaited_since.get(partition, math.inf)


def reply_partitions(leaders: Mapping[int, int], chosen: int | None) -> list[int]:
    """The chosen partition, or a random one with a leader; then one that another broker leads, if there is one.

    leaders: partition → broker; -1: no leader.
    """
    led = [partition for partition, broker in leaders.items() if broker >= 0] or list(leaders)
    first = random.choice(led) if chosen is None else chosen
    apart = [partition for partition in led if leaders[partition] != leaders[first]]
    return [first, random.choice(apart)] if apart else [first]
