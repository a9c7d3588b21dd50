"""Sends without waiting for acknowledgements, and notices when none come any more.

Knows nothing of what it sends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
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

    async def send_together(
        self,
        topic: str,
        messages: Sequence[tuple[bytes | None, bytes]],
        *,
        partition: int,
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
