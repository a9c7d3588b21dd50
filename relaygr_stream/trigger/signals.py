"""What a trigger sends: a lane's signals, and to the owners why requests were not admitted, or to whom they were
delegated.

Signals are gathered over a turn, sent together, and acknowledged one by one.

In a batch, a message costs about 8 µs less than alone. The ledger counts a signal before it is added here (ledger.py).
Delegated signals go to `ranking`, on a lane of the delegate. On `pre-infer`, that lane's trigger could not tell their
size, and would hold its lane until they were read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import structlog
from msgspec import UNSET, UnsetType

from relaygr_stream.bus.ages import LogEnds, SenderLag, now_ms
from relaygr_stream.bus.dead_letter import DeadLetters
from relaygr_stream.bus.producer import NO_LEADER, NotTaken, Outgoing, Producer, Sent
from relaygr_stream.errors import BrokerError, BrokerUnavailable, MessageTooLarge
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.tracing import OFF, Trace, Tracing, trace_headers
from relaygr_stream.trigger.decision import Decide, Decision, Policy, decide
from relaygr_stream.trigger.delegation import Delegation
from relaygr_stream.trigger.ledger import LaneLedger, Pending
from relaygr_stream.trigger.load import OwnerLoads
from relaygr_stream.trigger.metrics import TriggerMetrics
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.fleet import OwnerDirectory
from relaygr_stream.wire.messages import PreInferSignal, RequestEvent, prefix_length, with_version
from relaygr_stream.wire.records import HEADER_KIND, KIND_DELEGATED, Record
from relaygr_stream.wire.refusals import KIND as REFUSALS
from relaygr_stream.wire.refusals import MAX_IDS, Refusal, encode_refusals
from relaygr_stream.wire.topic_files import TopicSet

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: Most requests reported to one owner per flush: 4096 / 0.02 s = 200,000 events/s. Further ones are not reported.
MAX_GATHERED: Final = 4096
#: Signals and notices wait so long for room in a lane's batch: the lane's later events are stale soon after.
SENDING_S: Final = 0.2
#: Reasons that are not reported: there is no owner, or the request was admitted before.
NOT_REPORTED: Final = frozenset({"no_owner", "duplicate"})


# ---- what was refused ----


class RefusalNotices:
    """Gathers refusals by owner, and sends them on one of the owner's lanes, one record an owner every FLUSH_S.

    The record occupies an offset of a lane's signal log, so the lane's ledger counts it as a signal of 0 bytes.
    background: runs the sending.
    """

    def __init__(self, topic: str, producer: Producer, background: Background) -> None:
        self._topic = topic
        self._producer = producer
        self._background = background
        self._gathered: dict[str, list[Refusal]] = {}
        self._lanes: dict[str, dict[int, LaneLedger]] = {}  # owner → its lanes with something gathered
        self._sending: dict[str, asyncio.Task[None]] = {}  # by owner

    def add(self, owner: str, lane: int, ledger: LaneLedger, refusal: Refusal) -> None:
        """Gather a request for the next `flush`."""
        gathered = self._gathered.setdefault(owner, [])
        if len(gathered) < MAX_GATHERED:
            gathered.append(refusal)
            self._lanes.setdefault(owner, {})[lane] = ledger

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
                if not await self._send(lane, lanes[lane], encode_refusals(refused[first : first + MAX_IDS])):
                    break

    async def _send(self, lane: int, ledger: LaneLedger, value: bytes) -> bool:
        """Whether the producer has room for it within SENDING_S."""
        pending = ledger.admit(0)
        headers = [(HEADER_KIND, REFUSALS.encode())]
        try:
            async with asyncio.timeout(SENDING_S):
                sent = await self._producer.send(self._topic, value, partition=lane, headers=headers)
        except (TimeoutError, BrokerError):
            ledger.withdrawn(pending)
            return False
        sent.add_done_callback(partial(_note, ledger, pending))
        return True


def _note(ledger: LaneLedger, pending: Pending, sent: asyncio.Future[int]) -> None:
    if sent.cancelled() or sent.exception() is not None:
        ledger.failed(pending, time.monotonic())
    else:
        ledger.acknowledged(pending, sent.result(), time.monotonic())


# ---- signals ----


@dataclass(frozen=True)
class LaneContext:
    """The parts that all lanes of a trigger share."""

    policy: Policy
    topics: TopicSet
    owners: OwnerDirectory
    producer: Producer
    dead_letters: DeadLetters
    ends: LogEnds
    metrics: TriggerMetrics
    done: Callable[[Record], None]
    refused: RefusalNotices
    # A trigger believes stated ages until it has measured the clocks: events from before its start are old, and a fresh
    # event that a wrong clock makes stale only loses a pre-inference. A worker does not: it would lose an answer.
    lag: SenderLag = field(default_factory=partial(SenderLag, 0.0))
    loads: OwnerLoads = field(default_factory=OwnerLoads)
    decide: Decide = decide
    delegation: Delegation | None = None
    tracing: Tracing = OFF
    log_decisions: bool = False  # off by default: a log line costs more than a decision, even one below the level


class _Signal(NamedTuple):
    event: RequestEvent
    record: Record
    pending: Pending
    trace: Trace | None


class _Delegated(NamedTuple):
    event: RequestEvent
    record: Record
    decision: Decision
    owner: str
    trace: Trace | None


class LaneSignals:
    """Sends the signals of one lane; tells `ledger` the outcome of each, and then completes its event."""

    def __init__(self, lane: int, shared: LaneContext, ledger: LaneLedger) -> None:
        self._lane = lane
        self._shared = shared
        self._ledger = ledger
        self._signals: list[_Signal] = []
        self._messages: list[Outgoing] = []
        self._delegated: list[_Delegated] = []

    def add(
        self, event: RequestEvent, record: Record, decision: Decision, pending: Pending, trace: Trace | None = None
    ) -> None:
        """Gather a signal for the next `flush`; trace: the event's span, which ends with the signal's send."""
        value = encode(self._signal(event, decision.rank_in_ms, UNSET))
        self._signals.append(_Signal(event, record, pending, trace))
        self._messages.append(Outgoing(event.user_id.encode(), value, _context(record, trace)))

    def delegate(
        self, event: RequestEvent, record: Record, decision: Decision, owner: str, trace: Trace | None = None
    ) -> None:
        """Gather a signal for a delegate of the owner; trace: as in `add`."""
        self._delegated.append(_Delegated(event, record, decision, owner, trace))

    def _signal(self, event: RequestEvent, rank_in_ms: float, delegate: str | UnsetType) -> PreInferSignal:
        return PreInferSignal(
            request_id=event.request_id,
            user_id=event.user_id,
            prefix=event.prefix,
            admitted_ms=now_ms(),
            life_ms=self._shared.policy.life_ms,
            rank_in_ms=rank_in_ms,
            tenant=event.tenant,
            columns=event.columns,
            delegate=delegate,
            **with_version(event.history),
        )

    async def flush(self) -> None:
        """Hand the gathered signals to the producer; waits SENDING_S while an earlier batch of the lane is not sent.

        The lane's own go first: a delegate's lane may wait for a broker.
        """
        signals, messages, delegated = self._signals, self._messages, self._delegated
        self._signals, self._messages, self._delegated = [], [], []

        def settled(index: int, outcome: Sent | BrokerError) -> None:
            self._settled(signals[index], outcome)

        producer, topic = self._shared.producer, self._shared.topics.pre_infer.name
        if signals and producer.broker_of(topic, self._lane) == NO_LEADER:
            for signal in signals:
                self._settled(signal, NotTaken("no broker takes signals of the lane"))
        elif signals:
            await producer.send_together(topic, messages, partition=self._lane, settled=settled, within_s=SENDING_S)
        stuck: set[int | None] = set()  # brokers of delegates' lanes for which this call waited in vain
        for one in delegated:
            await self._send_delegated(one, stuck)

    def _settled(self, signal: _Signal, outcome: Sent | BrokerError) -> None:
        if isinstance(outcome, BrokerError):  # no retry: after the request timeout its ranking has passed
            if isinstance(outcome, NotTaken):
                self._ledger.withdrawn(signal.pending)
            else:
                self._ledger.failed(signal.pending, time.monotonic())
            self._shared.metrics.signals_failed.inc()
            limited(log.warning, "signal not sent")(
                "signal not sent",
                request_id=signal.event.request_id,
                user_id=signal.event.user_id,
                lane=self._lane,
                outcome="not_sent",
                error=str(outcome),
            )
        else:
            self._ledger.acknowledged(signal.pending, outcome.offset, time.monotonic(), outcome.batch)
        if signal.trace is not None:
            error = str(outcome) if isinstance(outcome, BrokerError) else ""
            signal.trace.end(described(signal.event, "admitted"), error=error)
        self._shared.done(signal.record)

    async def _send_delegated(self, one: _Delegated, stuck: set[int | None]) -> None:
        """To the delegate; the owner is told once a broker has it.

        stuck: brokers not to wait for; the lane's joins them if it takes nothing within SENDING_S.
        """
        event, place, producer = one.event, one.decision.delegate, self._shared.producer
        assert place is not None
        topic = self._shared.topics.ranking.name
        broker = producer.broker_of(topic, place.lane)
        try:
            if broker == NO_LEADER:
                raise BrokerUnavailable("no broker takes messages for the delegate's lane")
            if broker in stuck:
                self._settled_delegated(one, BrokerUnavailable("the delegate's broker takes nothing"), tried=False)
                return
            async with asyncio.timeout(SENDING_S):
                sent = await producer.send(
                    topic,
                    encode(self._signal(event, one.decision.rank_in_ms, one.owner)),
                    key=event.user_id.encode(),
                    partition=place.lane,
                    headers=[(HEADER_KIND, KIND_DELEGATED.encode()), *_context(one.record, one.trace)],
                )
        except (TimeoutError, BrokerError) as error:
            if isinstance(error, TimeoutError):
                if broker is not None:
                    stuck.add(broker)
                error = BrokerUnavailable(f"the delegate's lane took nothing for {SENDING_S} s")
            self._settled_delegated(one, error)
            return

        def settle(done: asyncio.Future[int]) -> None:
            if not done.cancelled():  # else the trigger stops, and the lane's next one decides again
                self._settled_delegated(one, done.exception())

        sent.add_done_callback(settle)

    def _settled_delegated(self, one: _Delegated, error: BaseException | None, *, tried: bool = True) -> None:
        event, place, shared = one.event, one.decision.delegate, self._shared
        assert place is not None
        told = Refusal(event.request_id, "delegated", event.tenant, place.worker)
        if error is not None:  # its owner infers it in full
            told = Refusal(event.request_id, "delegated", event.tenant)
            shared.metrics.signals_failed.inc()
            too_large = isinstance(error, MessageTooLarge)  # says nothing of other messages
            if tried and shared.delegation is not None and not too_large:
                # A refusal is of the topic; a broker that is away has some of its lanes.
                lane = place.lane if isinstance(error, BrokerUnavailable) else None
                shared.delegation.not_sent(time.monotonic(), lane)
            limited(log.warning, "delegated signal not sent")(
                "delegated signal not sent",
                request_id=event.request_id,
                user_id=event.user_id,
                lane=self._lane,
                to=place.worker,
                outcome="not_sent",
                error=str(error),
            )
        if one.trace is not None:
            one.trace.end(described(event, "delegated"), error="" if error is None else str(error))
        shared.refused.add(one.owner, self._lane, self._ledger, told)
        shared.done(one.record)


def described(event: RequestEvent, reason: str) -> dict[str, str | int]:
    """Attributes of a decision's span."""
    return {
        "relaygr.request_id": event.request_id,
        "relaygr.decision": reason,
        "relaygr.prefix_tokens": prefix_length(event),
        "relaygr.candidates": event.candidates,
    }


def _context(record: Record, trace: Trace | None) -> list[tuple[str, bytes]]:
    """The trace context that a signal of this event carries."""
    return trace_headers(record.headers) if trace is None else trace.headers
