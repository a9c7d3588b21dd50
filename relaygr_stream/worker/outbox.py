"""What leaves a worker about single requests: answers, refusals, dead letters. A record is done once its answer, or
its dead letter, is acknowledged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from itertools import chain, repeat
from typing import Final

import structlog

from relaygr_stream.bus.dead_letter import dead_letter_headers
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.records import Record
from relaygr_stream.errors import BrokerError, DecodeError
from relaygr_stream.messages import HEADER_CORRELATION, SCORE_DTYPE, ScoreReply, Status, Timings, encode
from relaygr_stream.models.protocol import RankingModel
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.topics import TopicSet
from relaygr_stream.worker.intake import Origin
from relaygr_stream.worker.metrics import WorkerMetrics
from relaygr_stream.worker.tasks import Answer

log = structlog.get_logger(__name__)

#: Pauses between tries to get an answer or a dead letter out, in seconds; the last one repeats for dead letters. An
#: answer is given up after these: by then (7.75 s) its client has timed out.
RETRY_S: Final = (0.25, 0.5, 1.0, 2.0, 4.0)


class Outbox:
    """Produces answers on `scores` and dead letters, and marks records done."""

    done: Callable[[Record], None]

    def __init__(
        self,
        topics: TopicSet,
        scores: Producer,
        others: Producer,
        metrics: WorkerMetrics,
        worker: str,
        model: RankingModel,
    ) -> None:
        self._topics = topics
        self._scores = scores
        self._others = others
        self._metrics = metrics
        self._worker = worker
        self._model = model
        self._under_way: set[asyncio.Task[None]] = set()
        self._limiter = LogLimiter()

    def answer(self, answer: Answer) -> None:
        """Send what the device has to say to a ranking."""
        task, now = answer.task, time.monotonic()
        queued = max(0.0, (task.started or now) - task.arrived)
        outcome = task.outcome if answer.status == "ok" else None
        reply = ScoreReply(
            request_id=task.request_id,
            status=answer.status,
            outcome=outcome,
            scores=b"" if answer.scores is None else answer.scores.astype(SCORE_DTYPE).tobytes(),
            tasks=self._model.tasks if answer.scores is not None else (),
            detail=answer.detail,
            model_version=self._model.version,
            worker=self._worker,
            timings=Timings(queued_ms=queued * 1e3, device_ms=task.device_ms, computed_tokens=task.computed_tokens),
        )
        self._metrics.answers.labels(answer.status, outcome or "none").inc()
        if answer.status == "ok":
            self._metrics.ranking_seconds.labels(outcome).observe(now - task.arrived)
            self._metrics.queued_seconds.observe(queued)
        write = log.debug if answer.status == "ok" else self._limiter.limited(log.warning, answer.status)
        write(
            "answered",
            request_id=task.request_id,
            user_id=task.user_id,
            lane=task.lane,
            outcome=outcome or answer.status,
            detail=answer.detail,
        )
        assert isinstance(task.origin, Origin)
        self._spawn(self._send(task.origin, reply))

    def refuse(self, origin: Origin, status: Status, detail: str, *, done: bool = True) -> None:
        """Answer a request that never became a task; done=False leaves its record to its dead letter."""
        self._metrics.answers.labels(status, "none").inc()
        self._limiter.limited(log.warning, status)("refused", lane=origin.record.lane, outcome=status, detail=detail)
        reply = ScoreReply(
            request_id="", status=status, detail=detail, model_version=self._model.version, worker=self._worker
        )
        self._spawn(self._send(origin, reply, done=done))

    def dead_letter(self, record: Record, error: DecodeError, origin: Origin | None) -> None:
        """Put a record that cannot be read where an operator finds it; its sender, if it can be told, is told."""
        self._metrics.dead_letters.labels(error.reason).inc()
        self._limiter.limited(log.warning, error.reason)(
            "dead letter",
            topic=record.topic,
            lane=record.lane,
            offset=record.offset,
            outcome="rejected",
            detail=str(error),
        )
        if origin is not None:
            self.refuse(origin, "rejected", str(error), done=False)
        self._spawn(self._bury(record, error))

    def cancel(self) -> None:
        """Give up what is still under way; its records are not done, so another worker reads them again."""
        for task in self._under_way:
            task.cancel()

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _send(self, origin: Origin, reply: ScoreReply, *, done: bool = True) -> None:
        value = encode(reply)
        headers = [(HEADER_CORRELATION, origin.correlation)]
        for pause in RETRY_S:
            try:
                await self._scores.send_and_wait(
                    self._topics.scores.name, value, partition=origin.reply_partition, headers=headers
                )
                break
            except BrokerError as error:
                self._metrics.reply_failures.inc()
                self._limiter.limited(log.warning, "reply")("answer not delivered yet", error=str(error))
                await asyncio.sleep(pause)
        if done:
            self.done(origin.record)

    async def _bury(self, record: Record, error: DecodeError) -> None:
        """Until it is acknowledged: the lane's committed offset waits for it, so nothing is skipped silently."""
        pauses = chain(RETRY_S, repeat(RETRY_S[-1]))
        while True:
            try:
                await self._others.send_and_wait(
                    self._topics.dead_letter.name,
                    record.value if record.value is not None else b"",
                    key=record.key,
                    headers=dead_letter_headers(record, error),
                )
                break
            except BrokerError as failure:
                self._limiter.limited(log.error, "dead letter")("dead letter not delivered yet", error=str(failure))
                await asyncio.sleep(next(pauses))
        self.done(record)
