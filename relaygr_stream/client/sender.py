"""Sends messages without waiting for acknowledgements, and detects brokers that acknowledge nothing.

`Announcements` gathers request events for a moment and sends them as one batch for each lane: client, broker, trigger
and worker spend time mostly per batch, not per message.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from relaygr_stream.bus.producer import NO_LEADER, Outgoing, Producer, Settle
from relaygr_stream.errors import BrokerError, BrokerUnavailable
from relaygr_stream.telemetry.clocks import Clock

#: A broker that has acknowledged nothing for this long, although sends are due, counts as away: sends to the partitions
#: it leads then fail at once, until `probe` finds that it answers again. An acknowledgement takes milliseconds; a
#: broker's clean stop delays it by 1.1 s at most. A caller whose timeout is longer than the silence so far may still
#: see its end, so its send passes. Probes follow each other after this time.
SILENT_S: Final = 1.5
#: A partition is stuck if its broker has not acknowledged a send for this long: most likely the broker is gone. An
#: acknowledgement takes 5 ms (P99); a busy machine does not delay it a hundredfold.
STUCK_S: Final = 0.5
#: While a broker throttles this client, a message that may leave within this share of the time its caller waits is kept
#: for that; what remains is for the answer. Everything kept leaves at once, and the throttling that follows is for its
#: bytes: at twice the quota, half of the callers find it short enough. Messages that nobody waits for (events, cancels)
#: have LEAVE_S: without them, more rankings leave, each in full.
LEAVE_SHARE: Final = 0.5
LEAVE_S: Final = 0.1
#: Where no broker leads a partition, none can be asked: one call passes every SILENT_S, and after this long without a
#: send the silence is unknown and is measured anew.
SILENCE_EXPIRES_S: Final = 3 * SILENT_S


@dataclass(slots=True)
class _Silence:
    """How long one broker has acknowledged nothing."""

    since_s: float | None = None  # time of the first send since its last acknowledgement
    tried_s: float = 0.0  # when a send last passed
    answers: bool = False  # a probe since then was answered: a send is to show whether it acknowledges, too


#: Called once for each message: with None when a broker has it, else with the error.
Settled = Callable[[BrokerError | None], None]


class Sender:
    """A producer whose acknowledgements are watched, not awaited. clock: seconds."""

    def __init__(self, producer: Producer, bootstrap: str, clock: Clock = time.monotonic) -> None:
        self._producer = producer
        self._bootstrap = bootstrap
        self._clock = clock
        # Partition → number of each unacknowledged send → its time, oldest first.
        self._due: defaultdict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        self._count = itertools.count()
        self._silences: defaultdict[int | None, _Silence] = defaultdict(_Silence)  # by broker

    @property
    def trouble(self) -> str | None:
        """As `Producer.trouble`."""
        return self._producer.trouble

    async def connect(self, partitions: Mapping[str, int]) -> None:
        """Connect to the brokers that lead these topics' partitions, as far as they answer within SILENT_S. Else first
        messages would wait for it, which counts as the brokers' silence. partitions: how many each topic has."""
        every = ((topic, partition) for topic, count in partitions.items() for partition in range(count))
        brokers = {self._producer.broker_of(*each) for each in every} - {None, NO_LEADER}
        await asyncio.gather(*(self._producer.answers(broker, SILENT_S) for broker in brokers if broker is not None))

    def waits_s(self, topic: str, partitions: Iterable[int]) -> dict[int, float]:
        """Of each partition the age in seconds of the oldest send that its broker has not acknowledged; 0: there is
        none; infinite: no broker leads the partition. By the broker, so that no lane has to lose a request of its own;
        each broker is looked at once."""
        now, of_brokers, found = self._clock(), dict[int | None, float | None](), dict[int, float]()
        for partition in partitions:
            broker = self._producer.broker_of(topic, partition)
            if broker not in of_brokers:
                of_brokers[broker] = self._broker_waits_s(broker, topic, partition, now)
            if (waiting_s := of_brokers[broker]) is None:
                found[partition] = 0.0
            else:
                due = self._due.get((topic, partition))
                found[partition] = max(waiting_s, now - next(iter(due.values()))) if due else waiting_s
        return found

    def _broker_waits_s(self, broker: int | None, topic: str, partition: int, now: float) -> float | None:
        """How long the broker, which leads this partition, has acknowledged nothing; None: it is there, and would
        throttle a copy, too."""
        if broker == NO_LEADER:
            return math.inf
        if self._producer.throttled_s(topic, partition) > 0:
            return None
        silence = self._silences[broker]
        return 0.0 if silence.since_s is None or silence.answers else now - silence.since_s

    def broker_of(self, topic: str, partition: int) -> int | None:
        """As `Producer.broker_of`."""
        return self._producer.broker_of(topic, partition)

    def check(self, topic: str, partition: int, patience_s: float = 0.0) -> None:
        """Raise BrokerUnavailable while the partition's broker is away, or throttles this client for so long that the
        message would be late. A caller that passes must send: where `probe` had an answer, its send is the first.

        patience_s: how long the caller would wait for the broker.
        """
        now = self._clock()
        broker = self._producer.broker_of(topic, partition)
        silence = self._silences[broker]
        if throttled_s := self._producer.throttled_s(topic, partition):
            silence.since_s = None
            if throttled_s > max(LEAVE_S, LEAVE_SHARE * patience_s):
                raise BrokerUnavailable(
                    f"broker {broker} throttles this client by a quota, and takes nothing for another "
                    f"{throttled_s:.1f} s: send less, or raise producer_byte_rate of its client id or user"
                )
        idle_s, led = now - silence.tried_s, broker not in (None, NO_LEADER)
        if silence.since_s is None or (not led and idle_s > SILENCE_EXPIRES_S):
            silence.since_s = now
        silent_s = now - silence.since_s
        passes = silence.answers if led else idle_s >= SILENT_S
        if silent_s > max(SILENT_S, patience_s) and not passes:
            waiting = sum(map(len, self._due.values()))
            raise BrokerUnavailable(
                f"broker {'?' if broker is None else broker} of {self._bootstrap} has acknowledged nothing for "
                f"{silent_s:.1f} s; {waiting} messages wait: check that it runs and can be reached"
            )
        silence.tried_s, silence.answers = now, False

    async def probe(self) -> None:
        """Ask each broker that is away whether it answers; call it every SILENT_S. It takes no longer than that.

        So no caller has to wait out its timeout for it, however rare calls are.
        """
        now = self._clock()
        away = [
            (broker, silence)
            for broker, silence in self._silences.items()
            if broker is not None and broker != NO_LEADER and silence.since_s is not None
            if now - silence.since_s > SILENT_S
        ]
        found = await asyncio.gather(*(self._producer.answers(broker, SILENT_S) for broker, _ in away))
        for (_, silence), answers in zip(away, found, strict=True):
            silence.answers = answers

    def send(
        self, topic: str, message: Outgoing, *, partition: int, patience_s: float = 0.0, settled: Settled
    ) -> Coroutine[Any, Any, None] | None:
        """As `buffer`. patience_s: how long the caller would wait for the broker.

        Raises BrokerUnavailable at once while the broker is away.
        """
        self.check(topic, partition, patience_s)
        return self.buffer(topic, partition, [message], settled=settled)

    def buffer(
        self, topic: str, partition: int, messages: Sequence[Outgoing], *, settled: Settled
    ) -> Coroutine[Any, Any, None] | None:
        """Buffer messages of one partition; the caller has passed `check`. None: all are buffered; else the buffer is
        full, and what is returned buffers the rest as there is room.

        settled: called once for each message, with None once the broker has it, or with the error.
        """
        due, number, silence = self._due[topic, partition], next(self._count), self._silence(topic, partition)
        due[number] = self._clock()

        def settle(outcome: int | BrokerError) -> None:
            due.pop(number, None)
            error = outcome if isinstance(outcome, BrokerError) else None
            if not isinstance(error, BrokerUnavailable):  # a refusal is an answer, too
                silence.since_s = None
            settled(error)

        try:
            for index, (key, value, headers) in enumerate(messages):
                if not self._producer.send_now(topic, key, value, headers, partition, settle):
                    return self._buffer_rest(topic, partition, messages[index:], settle, number)
        except BaseException:  # a defect: what is not on its way must not count as unacknowledged for ever
            due.pop(number, None)
            raise
        return None

    async def _buffer_rest(
        self,
        topic: str,
        partition: int,
        messages: Sequence[Outgoing],
        settle: Settle,
        number: int,
    ) -> None:
        try:
            for message in messages:
                try:
                    await self._producer.send_together(
                        topic, [message], partition=partition, settled=lambda _, outcome: settle(outcome)
                    )
                except Exception as error:  # a defect, too, ends a call with its cause, not with its deadline
                    settle(BrokerError(repr(error)))
        except BaseException:
            self._due[topic, partition].pop(number, None)
            raise

    def _silence(self, topic: str, partition: int) -> _Silence:
        return self._silences[self._producer.broker_of(topic, partition)]


class Waits(Protocol):
    """Knows of one topic's partitions which brokers lead them, and how long these have acknowledged nothing."""

    def waits_s(self, partitions: Iterable[int]) -> Mapping[int, float]:
        """Seconds, of each partition; 0: its broker acknowledges; infinite: it has no leader."""

    def broker_of(self, partition: int) -> int | None:
        """The broker's id; NO_LEADER; None: not known."""


def may_be_lost(waits: Waits | None, partition: int, broker: int | None) -> bool:
    """Whether a message that this broker has acknowledged may be lost with it: it acknowledges nothing more, or another
    one, which need not have had the message, leads the partition. broker: None: not known."""
    if waits is None:
        return False
    return waits.waits_s([partition])[partition] > STUCK_S or broker not in (None, waits.broker_of(partition))


class TopicWaits:
    """Waits, as a sender knows them."""

    def __init__(self, sender: Sender, topic: str) -> None:
        self._sender = sender
        self._topic = topic

    def waits_s(self, partitions: Iterable[int]) -> dict[int, float]:
        """As `Sender.waits_s`."""
        return self._sender.waits_s(self._topic, partitions)

    def broker_of(self, partition: int) -> int | None:
        """As `Producer.broker_of`."""
        return self._sender.broker_of(self._topic, partition)


# Batches of request events.

#: A lane's events are sent early once they have this many bytes: one batch holds no more (bus/producer.py).
BATCH_BYTES: Final = 48 * 1024
#: Most bytes that a lane gathers while its earlier send is not complete: beyond this, `add` waits.
MAX_LANE_BYTES: Final = 1024 * 1024


class LaneSender(Protocol):
    """Sends request events."""

    def send_lane(self, lane: int, events: Sequence[Outgoing]) -> Coroutine[Any, Any, None] | None:
        """Hand one lane's events to the producer. None: it has them; else what is returned hands it the rest, as there
        is room. Neither raises."""


class Announcements:
    """Gathers request events and sends them as one batch for each lane.

    linger_s: how long an event waits for others.
    """

    def __init__(self, sender: LaneSender, linger_s: float) -> None:
        self._sender = sender
        self._linger_s = linger_s
        self._lanes: dict[int, _Lane] = {}
        self._gathered: dict[int, _Lane] = {}  # those with an event since the last turn
        self._timer: asyncio.TimerHandle | None = None

    def has_room(self, number: int) -> bool:
        """Whether lane `number` takes an event now."""
        return (lane := self._lanes.get(number)) is None or lane.has_room

    async def room(self, number: int) -> None:
        """Wait until lane `number` takes an event."""
        if number in self._lanes:
            await self._lanes[number].room()

    def add(self, number: int, message: Outgoing) -> None:
        """Enqueue an event of lane `number`, which has room."""
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = _Lane(self._sender, number)
        lane.add(message)
        self._gathered[number] = lane
        if lane.bytes >= BATCH_BYTES:
            lane.send()
        elif self._timer is None:
            # One timer for all lanes, so that batches to one broker are sent in one request.
            self._timer = asyncio.get_running_loop().call_later(self._linger_s, self._send_all)

    async def flush(self) -> None:
        """Hand everything to the producer now."""
        self._send_all()
        await asyncio.gather(*(lane.sending for lane in self._lanes.values() if lane.sending is not None))

    def _send_all(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gathered, self._gathered = self._gathered, {}
        for lane in gathered.values():
            lane.send()


class _Lane:
    """One lane's events. An unfinished send holds up later events of this lane, and of no other."""

    def __init__(self, sender: LaneSender, number: int) -> None:
        self._sender = sender
        self._number = number
        self._events: list[Outgoing] = []
        self._emptied = asyncio.Event()
        self.bytes = 0
        self.sending: asyncio.Task[None] | None = None

    @property
    def has_room(self) -> bool:
        return self.bytes < MAX_LANE_BYTES

    async def room(self) -> None:
        while not self.has_room:
            self._emptied.clear()
            await self._emptied.wait()

    def add(self, message: Outgoing) -> None:
        self._events.append(message)
        self.bytes += len(message.key or b"") + len(message.value)

    def send(self) -> None:
        """Send all events; a send in progress takes them over."""
        if self._events and self.sending is None and (rest := self._hand_over()) is not None:
            self.sending = asyncio.create_task(self._send_until_empty(rest))

    def _hand_over(self) -> Coroutine[Any, Any, None] | None:
        events, self._events, self.bytes = self._events, [], 0
        self._emptied.set()
        return self._sender.send_lane(self._number, events)

    async def _send_until_empty(self, rest: Coroutine[Any, Any, None] | None) -> None:
        try:
            while rest is not None:
                await rest
                rest = self._hand_over() if self._events else None
        finally:
            self.sending = None
