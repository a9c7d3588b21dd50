"""One lane's trigger: a queue of events, and a task that has the core decide on them in order (core.py).

An event is complete once it is skipped, or once its signal or dead letter is acknowledged. The task may wait for a
broker; other lanes do not wait with it, and what becomes stale meanwhile is skipped.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

from relaygr_stream.bus.ages import AgeBounds, LogEnd, stated_age_ms
from relaygr_stream.trigger.core import Effect, Skip, TriggerCore
from relaygr_stream.trigger.intake import EventIntake, user_of
from relaygr_stream.trigger.metrics import TriggerTelemetry
from relaygr_stream.trigger.outbox import Outbox, SignalSending, described
from relaygr_stream.wire.erase import Erase, filter_named_users
from relaygr_stream.wire.messages import RequestEvent
from relaygr_stream.wire.records import Record, held_bytes

#: A lane's task yields to the others after this many events: a few milliseconds.
EVENTS_PER_TURN: Final = 64


class LaneTrigger:
    """Decides on one lane's events until `run` is cancelled. ages: bounds on the events' ages."""

    def __init__(
        self,
        number: int,
        core: TriggerCore,
        intake: EventIntake,
        outbox: Outbox,
        ages: AgeBounds,
        telemetry: TriggerTelemetry,
    ) -> None:
        self._number = number
        self._core = core
        self._intake = intake
        self._outbox = outbox
        self._ages = ages
        self._telemetry = telemetry
        self._events: deque[tuple[float, Record]] = deque()  # when they were read
        self.backlog_bytes = 0  # of events read and not yet decided
        self._arrived = asyncio.Event()

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
        while self._events and (now_s - self._events[0][0]) * 1e3 > self._core.policy.stale_ms:
            record = self._next()
            if self._intake.read(record) is not None:
                self._telemetry.metrics.decided("stale", 0.0)
                self._intake.reader.done(record)

    async def erase(self, erase: Erase) -> None:
        """Complete the waiting events of a user undecided."""
        waiting = list(self._events)
        whose = [user_of(record) for _, record in waiting]
        found = await filter_named_users(whose, erase)
        gone = {record.offset for user, (_, record) in zip(whose, waiting, strict=True) if user in found}
        for _ in range(len(self._events)):
            read_s, record = self._events.popleft()
            if record.offset in gone:
                self.backlog_bytes -= held_bytes(record)
                self._intake.reader.done(record)
            else:
                self._events.append((read_s, record))

    def sample_age(self, end: LogEnd) -> None:
        """Apply the end of the lane's event log, as just answered by a broker."""
        self._ages.sample(end)

    async def run(self) -> None:
        """Decide on events as they arrive; never returns."""
        while True:
            if not self._events:
                self._arrived.clear()
                await self._arrived.wait()
            await self._outbox.send(self._number, self._turn())
            await asyncio.sleep(0)

    def _turn(self) -> list[SignalSending]:
        """Decide on at most EVENTS_PER_TURN queued events; returns what is to be sent, in order."""
        sending = []
        tracing = self._telemetry.tracing
        for _ in range(min(len(self._events), EVENTS_PER_TURN)):
            record = self._next()
            if (event := self._intake.read(record)) is None:
                continue
            trace = tracing.receive("relaygr.decide", record) if tracing.on else None
            effect = self._decide(event, record)
            if not isinstance(effect, Skip):
                sending.append(SignalSending(effect, record, trace))
                continue
            if trace is not None:
                trace.end(described(event, effect.decision.reason))
            if effect.owner:
                self._outbox.notices.add(effect.owner, self._number, effect.refusal)
            self._intake.reader.done(record)
        return sending

    def _next(self) -> Record:
        _, record = self._events.popleft()
        self.backlog_bytes -= held_bytes(record)
        return record

    def _decide(self, event: RequestEvent, record: Record) -> Effect:
        started = time.perf_counter()
        now_s = time.monotonic()
        age_ms = self._age_ms(event, record.offset, now_s)
        decision = self._core.decide(self._number, event, age_ms, now_s)
        self._telemetry.decided(event, self._number, decision, time.perf_counter() - started)
        return self._core.book(self._number, event, decision, now_s)

    def _age_ms(self, event: RequestEvent, offset: int, now_s: float) -> float:
        age = self._ages.age(stated_age_ms(event.sent_ms), offset, now_s)
        if age.clock_off:
            self._telemetry.metrics.ages_clamped.inc()
        return age.sure_ms
