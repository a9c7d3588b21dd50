"""One lane's trigger: a queue of events, and a task that decides on them in order (decision.py).

An event is complete once it is skipped, or once its signal or dead letter is acknowledged. The task may wait for the
end of the lane's log, or for a broker; other lanes do not wait with it, and what becomes stale meanwhile is skipped.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

import structlog

from relaygr_stream.bus.ages import AgeBounds, LogEnd, stated_age_ms
from relaygr_stream.errors import BrokerError, DecodeError
from relaygr_stream.telemetry.background import endless
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.trigger.decision import Decision, LaneState
from relaygr_stream.trigger.signals import NOT_REPORTED, LaneContext, LaneSignals, described
from relaygr_stream.wire.behaviours import check_times
from relaygr_stream.wire.codec import decode_record
from relaygr_stream.wire.messages import RequestEvent, RequestEventInPlace
from relaygr_stream.wire.records import Record, held_bytes, kind_of
from relaygr_stream.wire.refusals import Refusal
from relaygr_stream.wire.topic_files import TopicSet, lane_of

log = structlog.get_logger(__name__)
limited = LogLimiter().limited

#: A lane's task yields to the others after this many events: a few milliseconds.
EVENTS_PER_TURN: Final = 64
#: Pauses between attempts to ask for the end of the signal log, in seconds; the last one repeats.
RETRY_S: Final = (0.1, 0.2, 0.4, 0.8, 1.6, 2.0)


class LaneTrigger:
    """Decides on one lane's events until `run` is cancelled."""

    def __init__(self, number: int, shared: LaneContext) -> None:
        self._number = number
        self._shared = shared
        self._events: deque[tuple[float, Record]] = deque()  # when they were read
        self.backlog_bytes = 0  # of events read and not yet decided
        self._arrived = asyncio.Event()
        self._ages = AgeBounds(shared.lag)
        self.state: LaneState | None = None  # None until the end of the lane's log is known

    @property
    def backlog(self) -> int:
        """Events read and not yet decided."""
        return len(self._events)

    def put(self, record: Record) -> None:
        """Enqueue an event."""
        self._events.append((time.monotonic(), record))
        self.backlog_bytes += held_bytes(record)
        self._arrived.set()

    def skip_stale(self, now_s: float) -> None:
        """Complete the events that have waited here for so long that they are stale, whatever their age when read."""
        while self._events and (now_s - self._events[0][0]) * 1e3 > self._shared.policy.stale_ms:
            record = self._next()
            if self._read(record) is not None:
                self._shared.metrics.decided("stale", 0.0)
                self._shared.done(record)

    def sample_age(self, end: LogEnd) -> None:
        """Apply the end of the lane's event log, as just answered by a broker."""
        self._ages.sample(end)

    def reconcile(self, end: LogEnd) -> None:
        """Apply the end of the lane's signal log, as just answered by a broker."""
        if self.state is not None:
            lost = self.state.ledger.reconcile(end.offset, end.asked_s)
            self._shared.metrics.signals_lost.inc(lost)
            self.state.observe(self._shared.owners.owner(self._number), time.monotonic())

    async def run(self) -> None:
        """Decide on events as they arrive; never returns."""
        pre_infer = self._shared.topics.pre_infer
        end = await self._signal_log_end(pre_infer.name)
        self.state = LaneState(
            self._shared.policy,
            end.offset,
            pre_infer.retention_ms / 1000,
            end.answered_s,
            self._number,
            self._shared.loads,
            self._shared.delegation,
        )
        signals = LaneSignals(self._number, self._shared, self.state.ledger)
        while True:
            if not self._events:
                self._arrived.clear()
                await self._arrived.wait()
            await self._turn(self.state, signals)
            await asyncio.sleep(0)

    async def _turn(self, state: LaneState, signals: LaneSignals) -> None:
        """Decide on at most EVENTS_PER_TURN queued events, and send their signals together."""
        for _ in range(min(len(self._events), EVENTS_PER_TURN)):
            record = self._next()
            tracing = self._shared.tracing
            if (event := self._read(record)) is None:
                continue
            trace = tracing.receive("relaygr.decide", record) if tracing.on else None
            decision = self._decide(event, record, state)
            if decision.admit:
                signals.add(event, record, decision, state.admit(event, decision, time.monotonic()), trace)
            elif decision.delegate is not None:
                state.delegate(event, decision, time.monotonic())
                signals.delegate(event, record, decision, state.owner, trace)
            else:
                if trace is not None:
                    trace.end(described(event, decision.reason))
                if state.owner and decision.reason not in NOT_REPORTED:
                    refusal = Refusal(event.request_id, decision.reason, event.tenant)
                    self._shared.refused.add(state.owner, self._number, state.ledger, refusal)
                self._shared.done(record)
        await signals.flush()

    def _next(self) -> Record:
        _, record = self._events.popleft()
        self.backlog_bytes -= held_bytes(record)
        return record

    def _read(self, record: Record) -> RequestEvent | None:
        """The event; None: it is dead-lettered or skipped, and complete with that."""
        try:
            event = read_event(RequestEventInPlace, record, self._shared.topics)
        except DecodeError as error:
            self._dead_letter(record, error)
            return None
        if event is None:
            self._shared.metrics.records_skipped.inc()
            self._shared.done(record)
        return event

    def _decide(self, event: RequestEvent, record: Record, state: LaneState) -> Decision:
        started = time.perf_counter()
        now_s = time.monotonic()
        state.observe(self._shared.owners.owner(self._number), now_s)
        age_ms = self._age_ms(event, record.offset, now_s)
        decision = self._shared.decide(event, state, age_ms=age_ms, now_s=now_s)
        self._shared.metrics.decided(decision.reason, time.perf_counter() - started)
        if self._shared.log_decisions:
            log.debug(
                "decided",
                request_id=event.request_id,
                user_id=event.user_id,
                lane=self._number,
                outcome=decision.reason,
                tokens=decision.tokens,
                age_ms=round(age_ms, 1),
                predicted_ms=round(decision.predicted_ms, 2),
                delegate="" if decision.delegate is None else decision.delegate.worker,
            )
        return decision

    def _age_ms(self, event: RequestEvent, offset: int, now_s: float) -> float:
        age = self._ages.age(stated_age_ms(event.sent_ms), offset, now_s)
        if age.clock_off:
            self._shared.metrics.ages_clamped.inc()
        return age.sure_ms

    def _dead_letter(self, record: Record, error: DecodeError) -> None:
        self._shared.dead_letters.send(record, error)
        self._shared.metrics.dead_letters.labels(error.reason).inc()
        limited(log.warning, error.reason)(
            "event unreadable", lane=self._number, offset=record.offset, outcome=error.reason, detail=error.detail
        )

    async def _signal_log_end(self, topic: str) -> LogEnd:
        """Where the lane's signal log ends. Asks until a broker answers; meanwhile events wait, or are skipped."""
        for pause in endless(RETRY_S):
            try:
                return (await self._shared.ends.ask(topic, [self._number]))[self._number]
            except BrokerError as error:
                doing = "ask for the end of the lane's signal log"
                limited(log.warning, doing)(f"cannot {doing}, will retry", lane=self._number, error=str(error))
            await asyncio.sleep(pause)
        raise AssertionError("endless")


def read_event(shape: type[RequestEvent], record: Record, topics: TopicSet) -> RequestEvent | None:
    """The event of a record of `retrieval`; None: the record is of a kind of a later release. Raises DecodeError."""
    if kind_of(record.headers):
        return None
    event = decode_record(shape, record, topics.retrieval.max_message_bytes)
    check_times(event.prefix, "prefix")  # else the worker would dead-letter its signal
    lane = lane_of(event.user_id, topics.lanes)
    if lane != record.lane:  # bounds are per lane, and its signal goes there
        raise DecodeError(
            "invalid",
            f"this user belongs on partition {lane} of {topics.lanes}, the event came on {record.lane}; "
            f"set the key to the user id and the partitioner to murmur2",
        )
    return event
