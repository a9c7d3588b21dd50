"""The outbox: answers, forwards and releases leave the worker here. It carries out what the core decides (core.py)."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec
import structlog

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.dead_letter import RETRY_S
from relaygr_stream.engine.commands import Answer
from relaygr_stream.errors import BrokerError, ConfigError, DecodeError
from relaygr_stream.models.api import RankingModel
from relaygr_stream.telemetry.background import endless
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.logs import request_log_fields
from relaygr_stream.telemetry.tracing import TRACE_HEADERS, trace_headers
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import SCORE_DTYPE, WITHHELD, Cancel, ScoreReply, Timings, split_tenant_key
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_KIND, HEADER_SIGNATURE, KIND_CANCEL, Record
from relaygr_stream.wire.signature import answer_signature
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.worker.context import WorkerConnections, WorkerContext
from relaygr_stream.worker.effects import Forward, Reject, Release, Reply
from relaygr_stream.worker.forwarding import next_hop, time_left_ms
from relaygr_stream.worker.intake import Origin
from relaygr_stream.worker.traces import ranking_attributes, ranking_parts

log = structlog.get_logger(__name__)

#: An answer is given up after this long, or when its client waits no more if that is later, at most after MOST_S: until
#: then it holds its request in memory and its lane's commits back. One try alone may take kafka.request_timeout_ms.
ANSWER_S: Final = 8.0
MOST_S: Final = 60.0
#: Bytes of a key that are kept and logged: an id has 256 characters of up to 4 bytes.
MAX_ID_BYTES: Final = 1024
WITHHELD_DETAIL: Final = "the worker's log has the reason, its answers withhold it (worker.withhold_outcomes)"
#: What an answer has beside scores, their columns' names and the model's version: an id (256 characters of up to
#: 4 bytes), the worker's name, headers, the record batch's own.
REST_BYTES: Final = 2048


class Sending(NamedTuple):
    """An answer on its way. within_s: it is given up after this long. since: when the device was done with it."""

    origin: Origin
    reply: ScoreReply
    within_s: float
    since: float


class Outbox:
    """Sends what the core decided, by a worker's producers. model: whose version and columns answers state."""

    def __init__(self, context: WorkerContext, connections: WorkerConnections, model: RankingModel) -> None:
        self._worker = context.name
        self._metrics = context.metrics
        self._secret = context.settings.relay.answer_secret
        self._withhold = context.settings.worker.withhold_outcomes
        self._topics = connections.topics
        self._scores = connections.scores
        self._others = connections.others
        self._model = model
        self._limiter = LogLimiter()

    # ---- answers ----

    def reply(self, effect: Reply) -> Sending:
        """The answer to a ranking; counts and logs it."""
        answer = effect.answer
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
            admission=effect.admission,
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
            self._metrics.answer(answer.status, task.scenario)
        else:
            self._metrics.ranked(outcome, now - task.arrived, queued, task.scenario)
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
        if effect.declined:
            origin = _without_request(origin)
        return Sending(origin, reply, _within_s(answer, now), measured.finished or now)

    def reject(self, effect: Reject) -> Sending:
        """The answer to a record that became no task; counts it."""
        self._metrics.answer(effect.status, effect.scenario)
        reply = ScoreReply(
            request_id=effect.request_id,
            status=effect.status,
            detail=effect.detail,
            model_version=self._model.version,
            worker=self._worker,
        )
        return Sending(_without_request(effect.origin), reply, ANSWER_S, time.monotonic())

    async def send(self, sending: Sending) -> None:
        """Send an answer until a broker has it, or its time is over."""
        origin, reply, within_s, _ = sending
        error = "" if reply.status == "ok" else reply.detail or reply.status
        try:
            async with asyncio.timeout(within_s):
                await self._deliver(origin, reply)
        except TimeoutError:
            error = f"answer given up after {within_s:.1f} s"
            self._limiter.limited(log.warning, "given up")(
                "answer given up", **_about(origin, reply), after_s=round(within_s, 1)
            )
        if origin.trace is not None:
            outcome = reply.outcome or reply.status
            origin.trace.end({"relaygr.request_id": reply.request_id, "relaygr.outcome": outcome}, error=error)

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
                    "answer not delivered yet", **_about(origin, reply), error=str(error)
                )
                await asyncio.sleep(pause)

    # ---- to other workers ----

    async def forward(self, effect: Forward) -> bool:
        """Send a ranking on, with one hop more and the time that is left. False: no broker took it within that time, or
        it cannot be encoded again."""
        (answer, lane), now = effect, time.monotonic()
        task, record = answer.task, answer.task.origin.record
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
            self._limiter.limited(log.warning, "forward")("not forwarded", **fields, to=lane, error=why)
            return False
        log.debug("forwarded", **fields, to=lane, detail=answer.detail)
        if trace is not None:
            trace.part("forward", now, time.monotonic(), {"relaygr.to_lane": lane})
            trace.end({**ranking_attributes(answer, self._worker), "relaygr.outcome": "forwarded"})
        return True

    async def release(self, effect: Release) -> None:
        """Send a cancel to a delegate, once."""
        record = effect.cancel
        if record is None:
            tenant, request_id = split_tenant_key(effect.request_key)
            value = encode(Cancel(request_id=request_id, tenant=tenant))
            headers = ((HEADER_KIND, KIND_CANCEL.encode()),)
            record = Record(self._topics.ranking.name, effect.lane, 0, 0, b"", value, headers)
        with suppress(BrokerError):
            await self._others.send_and_wait(
                record.topic, record.value, key=record.key, partition=effect.lane, headers=record.headers
            )


def _within_s(answer: Answer, now: float) -> float:
    """Until its client waits no more, between ANSWER_S and MOST_S."""
    times = answer.task.times
    waits_s = times.arrived + (times.timeout_ms - times.age_ms) / 1e3 - now
    return min(MOST_S, max(ANSWER_S, waits_s))


def _about(origin: Origin, reply: ScoreReply) -> dict[str, Any]:
    return request_log_fields(reply.request_id, user_of(origin.record), origin.record.lane, reply.status)


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
    return msgspec.structs.replace(origin, record=origin.record._replace(key=key, value=None, headers=headers))


def user_of(record: Record) -> str:
    """The user id that a record's key states, for a log line."""
    return (record.key or b"")[:MAX_ID_BYTES].decode("utf-8", errors="replace")
