"""Replies: answers, forwards, refusals and dead letters leave the worker here.

A record is done once one of these is acknowledged, or once its answer is given up (ANSWER_S).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import msgspec
import structlog

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.dead_letter import RETRY_S, DeadLetters
from relaygr_stream.bus.producer import Producer
from relaygr_stream.engine.commands import Answer, Rank
from relaygr_stream.errors import CRASHED, BrokerError, ConfigError, DecodeError
from relaygr_stream.models.api import RankingModel
from relaygr_stream.telemetry.background import Background, endless
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.logs import request_log_fields
from relaygr_stream.telemetry.tracing import TRACE_HEADERS, trace_headers
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import SCORE_DTYPE, WITHHELD, ScoreReply, Status, Timings
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_SIGNATURE, Record
from relaygr_stream.wire.refusals import Reasons
from relaygr_stream.wire.signature import answer_signature
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.worker.forwarding import WHY, Forwarding, instead, next_hop, time_left_ms
from relaygr_stream.worker.intake import Origin, TooMuch
from relaygr_stream.worker.metrics import WorkerMetrics
from relaygr_stream.worker.traces import ranking_attributes, ranking_parts

log = structlog.get_logger(__name__)

#: An answer is given up after this long, or when its client waits no more if that is later, at most after MOST_S: until
#: then it holds its request in memory and its lane's commits back. One try alone may take kafka.request_timeout_ms.
ANSWER_S: Final = 8.0
MOST_S: Final = 60.0
#: With this many refusals under way the process counts as stuck, as with many dead letters: they hold none of
#: worker.max_waiting_bytes, and while `scores` is away each record that is read may add one. 50 MB.
REFUSALS_LIMIT: Final = 10_000
#: Bytes of a key that are kept and logged: an id has 256 characters of up to 4 bytes.
MAX_ID_BYTES: Final = 1024
WITHHELD_DETAIL: Final = "the worker's log has the reason, its answers withhold it (worker.withhold_outcomes)"
#: What an answer has beside scores, their columns' names and the model's version: an id (256 characters of up to
#: 4 bytes), the worker's name, headers, the record batch's own.
REST_BYTES: Final = 2048


class Outbox:
    """Produces answers on `scores`, forwards and dead letters, and marks records done.

    forwarding: finds other workers for rankings that are refused here; None: they are answered `overloaded` at once.
    again: takes a ranking back that could not be passed on to the worker that has its prefix KV.
    secret: signs answers; empty: they are not signed. withhold: answers do not tell what was found. background: runs
    the sending, and learns of a defect in it.
    """

    def __init__(
        self,
        topics: TopicSet,
        scores: Producer,
        others: Producer,
        metrics: WorkerMetrics,
        worker: str,
        model: RankingModel,
        done: Callable[[Record], None],
        again: Callable[[Rank], None],
        background: Background,
        forwarding: Forwarding | None = None,
        secret: str = "",
        reasons: Reasons | None = None,
        keep_letters: bool = False,
        withhold: bool = False,
    ) -> None:
        self._topics = topics
        self._scores = scores
        self._others = others
        self._metrics = metrics
        self._worker = worker
        self._reasons = reasons or Reasons(0.0)
        self._model = model
        self._done = done
        self._again = again
        self._background = background
        self._forwarding = forwarding
        self._secret = secret
        self._withhold = withhold
        self._under_way: set[asyncio.Task[None]] = set()
        self._refusals: set[asyncio.Task[None]] = set()  # those under way of which `Held` counts no bytes
        self.letters: Final = DeadLetters(
            others, topics.dead_letter, done, metrics.dead_letters_waiting, background, keep_values=keep_letters
        )
        self._closed = False
        self._limiter = LogLimiter()

    def deliver(self, answer: Answer) -> None:
        """Send the scheduler's answer; a ranking that it refused goes to a worker that is in time, if there is one."""
        pass_to = answer.rank.pass_to
        if answer.status == "overloaded" and pass_to is not None:
            self._spawn(self._forward(answer, pass_to))
            return
        if self._forwarding is not None:
            lane = instead(self._forwarding, answer, time.monotonic())
            if isinstance(lane, int):
                self._spawn(self._forward(answer, lane))
                return
            if lane is not None:
                self._metrics.forwards.labels(lane).inc()
                answer.detail = f"{answer.detail}; {WHY[lane]}"
        self._answer(answer)

    def pass_on(self, record: Record, lane: int) -> None:
        """Copy a cancel to that lane. A lost copy is harmless: the pin ends with its life window."""
        self._spawn(self._copy(record, lane))

    def decline(self, rank: Rank, why: str) -> None:
        """Answer a ranking for which there is no memory `overloaded`, here and now: nothing of it is kept."""
        self._answer(Answer(rank, "overloaded", detail=why), refusal=True)

    def _answer(self, answer: Answer, *, refusal: bool = False) -> None:
        task, measured, now = answer.task, answer.measured, time.monotonic()
        queued = max(0.0, (measured.started or now) - task.arrived)
        outcome = measured.outcome if answer.status == "ok" else None
        reply = ScoreReply(
            request_id=task.request_id,
            status=answer.status,
            outcome=outcome,
            scores=b"" if answer.scores is None else answer.scores.astype(SCORE_DTYPE).tobytes(),
            tasks=self._model.tasks if answer.scores is not None else (),
            detail=answer.detail,
            model_version=self._model.version,
            worker=self._worker,
            admission=self._reasons.admission(task.request_key),
            truncated_to=measured.truncated_to if outcome == "truncated" else 0,
            timings=Timings(
                inbound_ms=task.times.inbound_ms,
                queued_ms=queued * 1e3,
                device_ms=measured.device_ms,
                worker_ms=((measured.finished or now) - task.arrived) * 1e3,
                computed_tokens=measured.computed_tokens,
            ),
        )
        if outcome is None:
            self._metrics.answer(answer.status)
        else:
            self._metrics.ranked(outcome, now - task.arrived, queued)
        write = log.debug if answer.status == "ok" else self._limiter.limited(log.warning, answer.status)
        write(
            "answered",
            **request_log_fields(task.request_id, task.user_id, task.lane, outcome or answer.status),
            detail=answer.detail,
        )
        origin = task.origin
        assert isinstance(origin, Origin)
        if origin.trace is not None:
            ranking_parts(origin.trace, answer)
            origin.trace.describe(ranking_attributes(answer, self._worker))
        waits_s = task.arrived + (task.times.timeout_ms - task.times.age_ms) / 1e3 - now
        within_s = min(MOST_S, max(ANSWER_S, waits_s))
        if refusal:
            origin = _without_request(origin)
        self._spawn(self._send(origin, reply, within_s=within_s), refusal=refusal)

    def refuse(self, origin: Origin, cause: TooMuch) -> None:
        """Answer a well-formed request that is more than this worker takes; its record is done with that."""
        self._limiter.limited(log.warning, "rejected")(
            "refused",
            **request_log_fields(cause.request_id, cause.user_id, origin.record.lane, "rejected"),
            detail=str(cause),
        )
        self._reject(origin, cause.request_id, str(cause), done=True)

    def dead_letter(self, record: Record, error: DecodeError, origin: Origin | None = None) -> None:
        """Dead-letter a record that cannot be read, and tell its sender where its headers allow that."""
        self._metrics.dead_letters.labels(error.reason).inc()
        self._limiter.limited(log.warning, error.reason)(
            "dead letter",
            **request_log_fields("", user_of(record), record.lane, "rejected"),
            topic=record.topic,
            offset=record.offset,
            detail=str(error),
        )
        if origin is not None:
            # The dead letter finishes the record.
            self._reject(origin, "", str(error), done=False, status="failed" if error.reason == CRASHED else "rejected")
        if not self._closed:
            self.letters.send(record, error)

    @property
    def full(self) -> bool:
        """Whether so many dead letters or refusals wait that the process should read no more records."""
        return self.letters.full or len(self._refusals) >= REFUSALS_LIMIT

    @property
    def sending(self) -> frozenset[asyncio.Task[None]]:
        """Answers and copies of requests that are on their way to a broker."""
        return frozenset(self._under_way)

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything handed in so far has left, or the time is over."""
        letters = asyncio.ensure_future(self.letters.flush(timeout_s))
        await asyncio.wait({letters, *self._under_way}, timeout=timeout_s)

    def close(self) -> None:
        """Send nothing more, and cancel what is under way; those records are not done, so they are read again."""
        self._closed = True
        self.letters.close()
        for task in self._under_way:
            task.cancel()

    def _reject(self, origin: Origin, request_id: str, detail: str, *, done: bool, status: Status = "rejected") -> None:
        self._metrics.answer(status)
        reply = ScoreReply(
            request_id=request_id,
            status=status,
            detail=detail,
            model_version=self._model.version,
            worker=self._worker,
        )
        self._spawn(self._send(_without_request(origin), reply, within_s=ANSWER_S, done=done), refusal=True)

    def _spawn(self, work: Coroutine[Any, Any, None], *, refusal: bool = False) -> None:
        if self._closed:
            work.close()
            return
        # A defect in it would hold up the lane's commits for ever: it ends the process.
        task = self._background.start(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        if refusal:
            self._refusals.add(task)
            task.add_done_callback(self._refusals.discard)

    async def _send(self, origin: Origin, reply: ScoreReply, *, within_s: float, done: bool = True) -> None:
        error = "" if reply.status == "ok" else reply.detail or reply.status
        try:
            async with asyncio.timeout(within_s):
                await self._deliver(origin, reply)
        except TimeoutError:
            error = f"answer given up after {within_s:.1f} s"
            self._limiter.limited(log.warning, "given up")(
                "answer given up", **self._about(origin, reply), after_s=round(within_s, 1)
            )
        if origin.trace is not None:
            outcome = reply.outcome or reply.status
            origin.trace.end({"relaygr.request_id": reply.request_id, "relaygr.outcome": outcome}, error=error)
        if done:
            self._done(origin.record)

    async def _deliver(self, origin: Origin, reply: ScoreReply) -> None:
        value = encode(withheld(reply) if self._withhold else reply)
        context = trace_headers(origin.record.headers) if origin.trace is None else origin.trace.headers
        headers = [(HEADER_CORRELATION, origin.correlation), *context]
        if self._secret:
            headers.append((HEADER_SIGNATURE, answer_signature(self._secret, origin.correlation, value)))
        for pause in endless(RETRY_S):
            try:
                await self._scores.send_and_wait(
                    self._topics.scores.name, value, partition=origin.reply_partition, headers=headers
                )
                return
            except BrokerError as error:
                self._metrics.reply_failures.inc()
                self._limiter.limited(log.warning, "reply")(
                    "answer not delivered yet", **self._about(origin, reply), error=str(error)
                )
                await asyncio.sleep(pause)

    async def _copy(self, record: Record, lane: int) -> None:
        with suppress(BrokerError):
            await self._others.send_and_wait(
                record.topic, record.value, key=record.key, partition=lane, headers=record.headers
            )

    def _about(self, origin: Origin, reply: ScoreReply) -> dict[str, Any]:
        return request_log_fields(reply.request_id, user_of(origin.record), origin.record.lane, reply.status)

    async def _forward(self, answer: Answer, lane: int) -> None:
        """Forward to that lane, with one hop more and the time that is left. If no broker takes it within that time, or
        it cannot be encoded again, it is refused here."""
        rank, task, record, now = answer.rank, answer.task, answer.task.origin.record, time.monotonic()
        headers, trace = record.headers, answer.task.origin.trace
        if trace is not None:
            headers = (*(each for each in headers if each[0] not in TRACE_HEADERS), *trace.headers)
        left_ms = time_left_ms(task, now)
        fields = request_log_fields(task.request_id, task.user_id, task.lane, "forwarded")
        try:
            async with asyncio.timeout(task.deadline - now):
                await self._others.send_and_wait(
                    self._topics.ranking.name,
                    next_hop(record.value, task.hops + 1, now_ms(), left_ms),
                    key=record.key,
                    partition=lane,
                    headers=headers,
                )
        except (BrokerError, DecodeError, TimeoutError) as error:
            why = str(error) or "no broker took it in its time"
            self._metrics.forwards.labels("unsent").inc()
            self._limiter.limited(log.warning, "forward")("not forwarded", **fields, to=lane, error=why)
            if rank.pass_to is None:
                self._answer(answer)
            else:
                tried_s = time.monotonic() - now  # no delay of the device
                self._again(rank._replace(pass_to=None, waited_s=rank.waited_s + tried_s))
            return
        self._metrics.forwards.labels("sent" if rank.pass_to is None else "delegate").inc()
        if rank.pass_to is not None:
            self._reasons.passed_on(task.request_key)
        log.debug("forwarded", **fields, to=lane, detail=answer.detail)
        if trace is not None:
            trace.part("forward", now, time.monotonic(), {"relaygr.to_lane": lane})
            trace.end({**ranking_attributes(answer, self._worker), "relaygr.outcome": "forwarded"})
        self._done(record)


def withheld(reply: ScoreReply) -> ScoreReply:
    """The answer without what tells whether prefix KV were found: the outcome, what goes with it, the times of the
    device, the worker, which another one replaces on a miss, and the reason of a refusal, which may name a forecast.

    A rejection depends on the request alone, and stays as it is.
    """
    if reply.status == "rejected":
        return reply
    return msgspec.structs.replace(
        reply,
        outcome=None if reply.outcome is None else WITHHELD,
        detail=reply.detail and WITHHELD_DETAIL,
        worker="",
        timings=Timings(inbound_ms=reply.timings.inbound_ms),
        admission="",
        truncated_to=0,
    )


def check_answers_fit(topics: TopicSet, candidates: int, model: RankingModel) -> None:
    """Check that the largest answer fits its topic. Raises ConfigError: a larger one could never be delivered.

    candidates: the most in a request.
    """
    scores = bytes(SCORE_DTYPE.itemsize * candidates * len(model.tasks))
    largest = ScoreReply(request_id="", status="ok", scores=scores, tasks=model.tasks, model_version=model.version)
    needed, takes = len(encode(largest)) + REST_BYTES, topics.scores.max_message_bytes
    if needed > takes:
        raise ConfigError(
            f"topic {topics.scores.name} takes {takes} bytes, the scores of {candidates} candidates "
            f"(relay.max_candidates) in {len(model.tasks)} columns (model {model.version}) up to {needed}; raise "
            f"max_message_bytes of the former, or lower relay.max_candidates"
        )


def _without_request(origin: Origin) -> Origin:
    """What an answer needs of it: a request may be a megabyte, and answers wait for brokers that are away."""
    key, headers = (origin.record.key or b"")[:MAX_ID_BYTES], tuple(trace_headers(origin.record.headers))
    return replace(origin, record=origin.record._replace(key=key, value=None, headers=headers))


def user_of(record: Record) -> str:
    """The user id that a record's key states, for a log line."""
    return (record.key or b"")[:MAX_ID_BYTES].decode("utf-8", errors="replace")
