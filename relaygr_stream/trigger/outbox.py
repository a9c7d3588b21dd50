"""Carries out what the core decides: sends signals, delegated signals, and what owners are told; reports what became of
each to the core, and then completes its event.

A turn's signals are sent together, and acknowledged one by one.
Delegated signals go to `ranking`, on a lane of the delegate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import structlog
from msgspec import UNSET, UnsetType

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.producer import NO_LEADER, Outgoing, Producer
from relaygr_stream.errors import BrokerError, BrokerUnavailable
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.tracing import Trace, trace_headers
from relaygr_stream.trigger.core import Delegate, Signal, TriggerCore
from relaygr_stream.trigger.metrics import TriggerMetrics
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import PreInferSignal, RequestEvent, prefix_length, with_version
from relaygr_stream.wire.records import HEADER_KIND, KIND_DELEGATED, Record, RecordReader
from relaygr_stream.wire.refusals import KIND as REFUSALS
from relaygr_stream.wire.refusals import MAX_IDS, Refusal, encode_refusals
from relaygr_stream.wire.topic_files import TopicSet

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: Most requests reported to one owner per flush: 4096 / 0.02 s = 200,000 events/s. Further ones are not reported.
MAX_GATHERED: Final = 4096
#: Signals and notices wait so long for room in a lane's batch: the lane's later events are stale soon after.
SENDING_S: Final = 0.2


# ---- what owners are told ----


class RefusalNotices:
    """Gathers refusals by owner, and sends them on one of the owner's lanes, one record an owner every FLUSH_S.

    topic: of signals. background: runs the sending.
    """

    def __init__(self, topic: str, producer: Producer, background: Background) -> None:
        self._topic = topic
        self._producer = producer
        self._background = background
        self._gathered: dict[str, list[Refusal]] = {}
        self._lanes: dict[str, dict[int, None]] = {}  # owner → its lanes with something gathered, in order
        self._sending: dict[str, asyncio.Task[None]] = {}  # by owner

    def add(self, owner: str, lane: int, refusal: Refusal) -> None:
        """Gather a request for the next `flush`."""
        gathered = self._gathered.setdefault(owner, [])
        if len(gathered) < MAX_GATHERED:
            gathered.append(refusal)
            self._lanes.setdefault(owner, {})[lane] = None

    async def flush(self, within_s: float = 0.0) -> None:
        """Begin to hand everything to the producer, and wait so long at most. A hung broker holds up only the owners
        whose notices go to it."""
        for owner in self._gathered.keys() - self._sending.keys():
            self._sending[owner] = task = self._background.start(self._tell(owner))
            task.add_done_callback(partial(self._told, owner))
        if self._sending and within_s:
            await asyncio.wait(list(self._sending.values()), timeout=within_s)

    def _told(self, owner: str, _: asyncio.Task[None]) -> None:
        del self._sending[owner]

    async def _tell(self, owner: str) -> None:
        """Send an owner everything gathered for it, on a lane with a leader; without one, it is told nothing."""
        while refused := self._gathered.pop(owner, None):
            lanes = self._lanes.pop(owner)
            led = (lane for lane in lanes if self._producer.broker_of(self._topic, lane) != NO_LEADER)
            if (lane := next(led, None)) is None:
                continue
            for first in range(0, len(refused), MAX_IDS):
                if not await self._send(lane, encode_refusals(refused[first : first + MAX_IDS])):
                    break

    async def _send(self, lane: int, value: bytes) -> bool:
        """Whether the producer has room for it within SENDING_S."""
        headers = [(HEADER_KIND, REFUSALS.encode())]
        try:
            async with asyncio.timeout(SENDING_S):
                await self._producer.send(self._topic, value, partition=lane, headers=headers)
        except (TimeoutError, BrokerError):
            return False
        return True


# ---- signals ----


class SignalSending(NamedTuple):
    """An effect to carry out. record: of its event, completed with it; trace: the event's span, ends with the send."""

    effect: Signal | Delegate
    record: Record
    trace: Trace | None = None

    @property
    def context(self) -> list[tuple[str, bytes]]:
        """The headers with the trace context that the signal carries."""
        return trace_headers(self.record.headers) if self.trace is None else self.trace.headers


class Outbox:
    """Sends what the core decided. reader: of the events' records, which it has done."""

    def __init__(
        self,
        core: TriggerCore,
        topics: TopicSet,
        producer: Producer,
        notices: RefusalNotices,
        metrics: TriggerMetrics,
        reader: RecordReader,
    ) -> None:
        self._core = core
        self._topics = topics
        self._producer = producer
        self.notices: Final = notices
        self._metrics = metrics
        self._reader = reader

    async def send(self, lane: int, sending: Sequence[SignalSending]) -> None:
        """Hand one lane's signals to the producer; waits SENDING_S while an earlier batch of the lane is not sent.

        The lane's own go first: a delegate's lane may wait for a broker.
        """
        await self._send_signals(lane, [each for each in sending if isinstance(each.effect, Signal)])
        stuck: set[int | None] = set()  # brokers of delegates' lanes for which this call waited in vain
        for each in sending:
            if isinstance(each.effect, Delegate):
                await self._send_delegated(each, each.effect, stuck)

    async def _send_signals(self, lane: int, sending: Sequence[SignalSending]) -> None:
        if not sending:
            return
        producer, topic = self._producer, self._topics.pre_infer.name
        if producer.broker_of(topic, lane) == NO_LEADER:
            for each in sending:
                self._on_signal(each, BrokerUnavailable("no broker takes signals of the lane"))
            return
        messages = []
        for each in sending:
            event = each.effect.event
            value = encode(self._signal(event, each.effect.decision.rank_in_ms, UNSET))
            messages.append(Outgoing(event.user_id.encode(), value, each.context))

        def settled(index: int, outcome: int | BrokerError) -> None:
            self._on_signal(sending[index], outcome)

        await producer.send_together(topic, messages, partition=lane, settled=settled, within_s=SENDING_S)

    def _signal(self, event: RequestEvent, rank_in_ms: float, delegate: str | UnsetType) -> PreInferSignal:
        return PreInferSignal(
            request_id=event.request_id,
            user_id=event.user_id,
            prefix=event.prefix,
            admitted_ms=now_ms(),
            life_ms=self._core.policy.life_ms,
            rank_in_ms=rank_in_ms,
            tenant=event.tenant,
            columns=event.columns,
            delegate=delegate,
            scenario=event.scenario,
            **with_version(event.history, event.prefix),
        )

    def _on_signal(self, sending: SignalSending, outcome: int | BrokerError) -> None:
        error = outcome if isinstance(outcome, BrokerError) else None
        if error is not None:  # no retry: after the request timeout its ranking has passed
            self._failed("signal not sent", sending, error)
        self._complete(sending, "admitted", error)

    async def _send_delegated(self, sending: SignalSending, effect: Delegate, stuck: set[int | None]) -> None:
        """To the delegate; the owner is told once a broker has it.

        stuck: brokers not to wait for; the lane's joins them if it takes nothing within SENDING_S.
        """
        event, place, producer = effect.event, effect.decision.delegate, self._producer
        assert place is not None
        topic = self._topics.ranking.name
        broker = producer.broker_of(topic, place.lane)
        try:
            if broker == NO_LEADER:
                raise BrokerUnavailable("no broker takes messages for the delegate's lane")
            if broker in stuck:
                away = BrokerUnavailable("the delegate's broker takes nothing")
                self._on_delegated(sending, effect, away, tried=False)
                return
            async with asyncio.timeout(SENDING_S):
                sent = await producer.send(
                    topic,
                    encode(self._signal(event, effect.decision.rank_in_ms, effect.owner)),
                    key=event.user_id.encode(),
                    partition=place.lane,
                    headers=[(HEADER_KIND, KIND_DELEGATED.encode()), *sending.context],
                )
        except (TimeoutError, BrokerError) as error:
            if isinstance(error, TimeoutError):
                if broker is not None:
                    stuck.add(broker)
                error = BrokerUnavailable(f"the delegate's lane took nothing for {SENDING_S} s")
            self._on_delegated(sending, effect, error)
            return

        def settle(done: asyncio.Future[int]) -> None:
            if not done.cancelled():  # else the trigger stops, and the lane's next one decides again
                self._on_delegated(sending, effect, done.exception())

        sent.add_done_callback(settle)

    def _on_delegated(
        self, sending: SignalSending, effect: Delegate, error: BaseException | None, *, tried: bool = True
    ) -> None:
        told = self._core.on_delegated(effect, error, time.monotonic(), tried=tried)
        if error is not None:
            self._failed("delegated signal not sent", sending, error)
        self.notices.add(effect.owner, effect.lane, told)
        self._complete(sending, "delegated", error)

    def _failed(self, what: str, sending: SignalSending, error: BaseException) -> None:
        self._metrics.signals_failed.inc()
        event, place = sending.effect.event, sending.effect.decision.delegate
        limited(log.warning, what)(
            what,
            request_id=event.request_id,
            user_id=event.user_id,
            lane=sending.effect.lane,
            **({} if place is None else {"to": place.worker}),
            outcome="not_sent",
            error=str(error),
        )

    def _complete(self, sending: SignalSending, reason: str, error: BaseException | None) -> None:
        if sending.trace is not None:
            sending.trace.end(described(sending.effect.event, reason), error="" if error is None else str(error))
        self._reader.done(sending.record)


def described(event: RequestEvent, reason: str) -> dict[str, str | int]:
    """Attributes of a decision's span."""
    return {
        "relaygr.request_id": event.request_id,
        "relaygr.decision": reason,
        "relaygr.prefix_tokens": prefix_length(event),
        "relaygr.candidates": event.candidates,
        **({"relaygr.scenario": event.scenario} if event.scenario else {}),
    }
