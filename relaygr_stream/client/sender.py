"""Sends without waiting for acknowledgements, and notices when none come any more.

Knows nothing of what it sends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from relaygr_stream.bus.producer import Producer, Sent
from relaygr_stream.errors import BrokerError, BrokerUnavailable

#: No acknowledgement for this long, although some are due, means that a broker is away: sends to the partitions that it
#: leads then fail at once, but for one in as long a time, which finds out whether it is back. An acknowledgement takes
#: milliseconds; a broker's clean stop holds them up for 1.1 s at most (DESIGN §5). Who has more patience than the
#: silence has lasted may well see its end, and waits.
SILENT_S: Final = 1.5
#: After so long without a call nobody knows whether the silence went on, and it counts anew: while calls come, one is
#: let through every SILENT_S.
FORGOTTEN_S: Final = 3 * SILENT_S
#: A partition whose oldest send is due this long is stuck: most likely its leader is gone. An acknowledgement takes
#: 5 ms (P99, DESIGN §5); a hundred times that is no crowded machine's doing.
STUCK_S: Final = 0.5


@dataclass(slots=True)
class _Silence:
    """Of one broker."""

    since_s: float | None = None  # the first send after which it has answered none
    tried_s: float = 0.0  # when a send was last let through


class Sender:
    """A producer whose acknowledgements are watched, not waited for."""

    def __init__(self, producer: Producer, bootstrap: str) -> None:
        self._producer = producer
        self._bootstrap = bootstrap
        self._loop = asyncio.get_running_loop()
        # Partition → the sends due there → when each was made, oldest first.
        self._due: defaultdict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        self._count = itertools.count()
        self._silences: defaultdict[int | None, _Silence] = defaultdict(_Silence)  # by broker

    def stuck(self, topic: str, partition: int) -> bool:
        """Whether what was sent there waits for its acknowledgement for too long."""
        due = self._due.get((topic, partition))
        return due is not None and len(due) > 0 and self._loop.time() - next(iter(due.values())) > STUCK_S

    def check(self, topic: str, partition: int, patience_s: float = 0.0) -> None:
        """Raise BrokerUnavailable while the partition's broker is away, but once in a while: who passes must send.

        patience_s: how long the caller would wait for it.
        """
        now = self._loop.time()
        broker = self._producer.broker_of(topic, partition)
        silence = self._silences[broker]
        if silence.since_s is None or now - silence.tried_s > FORGOTTEN_S:
            silence.since_s = now
        silent_s = now - silence.since_s
        if silent_s > max(SILENT_S, patience_s) and now - silence.tried_s < SILENT_S:
            waiting = sum(map(len, self._due.values()))
            raise BrokerUnavailable(
                f"broker {'?' if broker is None else broker} of {self._bootstrap} has acknowledged nothing for "
                f"{silent_s:.1f} s; {waiting} messages wait"
            )
        silence.tried_s = now

    async def send(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes,
        partition: int,
        headers: Sequence[tuple[str, bytes]] = (),
        patience_s: float = 0.0,
        settled: Callable[[BrokerError | None], None],
    ) -> None:
        """Buffer a message; waits only while the buffer is full.

        patience_s: how long the caller would wait for its broker. settled: called with None once the broker has the
        message, or with the error. Raises BrokerUnavailable at once while that is away, BrokerError if the
        message cannot be buffered.
        """
        self.check(topic, partition, patience_s)
        number, due = self._begin(topic, partition)
        silence = self._silence(topic, partition)
        try:
            sent = await self._producer.send(topic, value, key=key, partition=partition, headers=headers)
        except BaseException:
            del due[number]
            raise
        sent.add_done_callback(partial(self._settle, due, number, silence, settled))

    async def send_events(
        self,
        topic: str,
        partition: int,
        messages: Sequence[tuple[bytes | None, bytes]],
        *,
        settled: Callable[[BrokerError | None], None],
    ) -> None:
        """Buffer messages (key, value) of one partition in as few batches as hold them; each is settled as by `send`.

        Waits where an earlier batch of the partition has not left yet. For what has passed `check`; raises nothing.
        """
        number, due = self._begin(topic, partition)
        silence = self._silence(topic, partition)

        def each(_: int, outcome: Sent | BrokerError) -> None:
            due.pop(number, None)
            self._answered(outcome if isinstance(outcome, BrokerError) else None, silence, settled)

        await self._producer.send_together(topic, messages, partition=partition, settled=each)

    def _begin(self, topic: str, partition: int) -> tuple[int, dict[int, float]]:
        """Note a send: its number, and where it is noted."""
        number, due = next(self._count), self._due[topic, partition]
        due[number] = self._loop.time()
        return number, due

    def _silence(self, topic: str, partition: int) -> _Silence:
        return self._silences[self._producer.broker_of(topic, partition)]

    def _settle(
        self,
        due: dict[int, float],
        number: int,
        silence: _Silence,
        settled: Callable[[BrokerError | None], None],
        sent: asyncio.Future[int],
    ) -> None:
        del due[number]
        error: BaseException | None
        if sent.cancelled():
            error = BrokerUnavailable("the producer was closed before the message was sent")
        else:
            error = sent.exception()
        told = error if error is None or isinstance(error, BrokerError) else BrokerError(repr(error))
        self._answered(told, silence, settled)

    def _answered(
        self, error: BrokerError | None, silence: _Silence, settled: Callable[[BrokerError | None], None]
    ) -> None:
        if not isinstance(error, BrokerUnavailable):  # a refusal is an answer, too
            silence.since_s = None
        settled(error)


# Request events on their way: gathered for a moment, then sent together, one batch for each lane. Nobody waits for an
# event: it has the time that retrieval takes. What a message costs client, broker, trigger and worker is mostly by
# the batch, and signals travel as their events did. Knows nothing of what it sends.


#: Key and value.
Message = tuple[bytes | None, bytes]

#: A lane's events leave early once they are so many bytes: more does not travel in one batch (bus/producer.py).
FULL_BYTES: Final = 48 * 1024
#: A lane may gather so many bytes while what it sent before has not left: then announcing waits.
MOST_BYTES: Final = 1024 * 1024


class Announcements:
    """send(lane, events): hands events to the producer; may wait, raises nothing. linger_s: how long one waits for
    others."""

    def __init__(self, send: Callable[[int, list[Message]], Awaitable[None]], linger_s: float) -> None:
        self._send = send
        self._linger_s = linger_s
        self._lanes: dict[int, _Lane] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def add(self, number: int, key: bytes, value: bytes) -> None:
        """Gather an event of that lane; waits only while the lane's buffer is full."""
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = _Lane(partial(self._send, number))
        await lane.add(key, value)
        if lane.bytes >= FULL_BYTES:
            lane.leave()
        elif self._timer is None:
            # One timer for all lanes, so that the batches of those led by one broker leave in one request.
            self._timer = asyncio.get_running_loop().call_later(self._linger_s, self._leave)

    async def flush(self) -> None:
        """Hand everything to the producer now."""
        self._leave()
        await asyncio.gather(*(lane.leaving for lane in self._lanes.values() if lane.leaving is not None))

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for lane in self._lanes.values():
            lane.leave()


class _Lane:
    """One lane's events. What has not left holds up later ones of this lane, and of no other."""

    def __init__(self, send: Callable[[list[Message]], Awaitable[None]]) -> None:
        self._send = send
        self._events: list[Message] = []
        self._room = asyncio.Event()
        self.bytes = 0
        self.leaving: asyncio.Task[None] | None = None

    async def add(self, key: bytes, value: bytes) -> None:
        while self.bytes >= MOST_BYTES:
            self._room.clear()
            await self._room.wait()
        self._events.append((key, value))
        self.bytes += len(key) + len(value)

    def leave(self) -> None:
        """Send what there is, unless an earlier send has not come to its end: that one goes on with it."""
        if self._events and self.leaving is None:
            self.leaving = asyncio.create_task(self._go())

    async def _go(self) -> None:
        try:
            while self._events:
                events, self._events, self.bytes = self._events, [], 0
                self._room.set()
                await self._send(events)
        finally:
            self.leaving = None
