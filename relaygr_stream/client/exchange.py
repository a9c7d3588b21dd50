"""One ranking request under way: sent on its user's lane, and elsewhere where that lane does not answer.

All attempts have one correlation id, and the first scores count . Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Collection
from typing import Final, Literal

import msgspec

from relaygr_stream.client.answers import Call, ReplyRoute
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.client.sender import Sender
from relaygr_stream.errors import BrokerError
from relaygr_stream.wire.fleet import OwnerDirectory
from relaygr_stream.wire.messages import (
    HEADER_CORRELATION,
    HEADER_REPLY_PARTITION,
    RankingRequest,
    ScoreReply,
    WorkerStatus,
    encode,
)

# Where a ranking request may go when its lane does not answer: to a lane of another worker that lives and has time. A
# hedge is answered in full there, so it costs device time that nobody planned: slow answers are hedged within a
# budget, and nobody is sent what would only wait. Knows nothing of how requests are sent.


#: Of requests whose owner lives, this share may be hedged, and so many at once after a quiet time. Hedging the slowest
#: twentieth is what bounds a tail (Dean & Barroso, The Tail at Scale) at a few percent more load.
SLOW_SHARE: Final = 0.05
SLOW_BURST: Final = 20.0
#: For so long what workers stated last is gone by when all are silent: a dead broker is fenced within 9 s by default
#: (`broker.session.timeout.ms`), and until then a topic of three copies takes nothing.
LAST_WORDS_MS: Final = 15_000.0


class Hedges:
    """What the statuses of the workers say about other ways. busy_ms: a worker whose queue is longer gets no hedges.
    stuck(lane): no broker takes what is sent there. silence_ms: an owner that was not heard in so long a time of
    listening is silent; one that was not heard yet may speak any moment.
    """

    def __init__(
        self,
        owners: OwnerDirectory,
        busy_ms: float,
        seed: int | None = None,
        stuck: Callable[[int], bool] = lambda lane: False,
        silence_ms: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._all_heard_s = clock() + silence_ms / 1000.0
        self._owners = owners
        self._busy_ms = busy_ms
        self._stuck = stuck
        self._random = random.Random(seed)
        self._slow = SLOW_BURST

    def request(self) -> None:
        """A request was made: it adds its share to the budget."""
        self._slow = min(SLOW_BURST, self._slow + SLOW_SHARE)

    def cut_off(self, lane: int) -> Literal["silent", "unsent"] | None:
        """Why nothing sent on the lane would be answered: nobody speaks for it, though other workers do, or no broker
        takes it. None: it is as good as any."""
        if self._owners.owner(lane, self._patience_ms) is None and self._known(lane) and self._serving():
            return "silent"
        return "unsent" if self._stuck(lane) else None

    def _known(self, lane: int) -> bool:
        return self._clock() >= self._all_heard_s or self._owners.owner(lane, math.inf) is not None

    def elsewhere(self, tried: Collection[int]) -> int | None:
        """A lane of a worker that lives, has time and owns none of the lanes tried; None where there is none."""
        owners = (self._owners.owner(lane, self._patience_ms) for lane in tried)
        but = {claim.worker.name for claim in owners if claim is not None}
        ways = [
            (status.queue_ms, lanes)
            for status in self._serving()
            if status.name not in but
            and status.queue_ms <= self._busy_ms
            and (lanes := [lane.lane for lane in status.lanes if not self._stuck(lane.lane)])
        ]
        if not ways:
            return None
        # The better of two at random: the best of all would get everybody's hedges until its next status. Of two that
        # are idle either: by their lanes, the one with the highest would never be asked.
        _, lanes = min(self._random.sample(ways, min(2, len(ways))), key=lambda way: way[0])
        return self._random.choice(lanes)

    def spend(self) -> bool:
        """Take a slow hedge from the budget; False where it is used up."""
        if self._slow < 1:
            return False
        self._slow -= 1
        return True

    @property
    def _patience_ms(self) -> float | None:
        """Where everybody falls silent at once, it is the topic that stands still, not the workers: what they stated
        last is worth more than nothing."""
        return None if self._owners.speaking else LAST_WORDS_MS

    def _serving(self) -> list[WorkerStatus]:
        return [s for s in self._owners.workers(self._patience_ms).values() if s.state == "serving" and s.lanes]


#: Attempts in all: the user's lane and two others. A third way that fails as well is no matter of one worker.
MOST: Final = 3

#: Told what became of a copy: None: the broker has it.
Settled = Callable[[BrokerError | None], None]


class Copies:
    """One ranking request as it is sent: as it is on its own lane, with a hop and the time that is left elsewhere."""

    def __init__(
        self,
        sender: Sender,
        route: ReplyRoute,
        topic: str,
        request: RankingRequest,
        key: bytes,
        value: bytes,
        correlation: bytes,
    ) -> None:
        self._sender = sender
        self._route = route
        self._topic = topic
        self._request = request
        self._key = key
        self._value = value
        self._correlation = correlation
        self._reply_to = route.choose()
        self._began_s = time.perf_counter()

    async def send(self, lane: int, *, hedge: bool, settled: Settled) -> None:
        """Send a copy; `settled` is called once, be it before this returns."""
        value, reply_to = self._value, self._reply_to
        if hedge:  # a worker knows its age since now alone: it is told the time that is left
            spent_ms = (time.perf_counter() - self._began_s) * 1000
            left_ms = max(1.0, self._request.timeout_ms - spent_ms)
            again = msgspec.structs.replace(self._request, hops=1, sent_ms=now_ms(), timeout_ms=left_ms)
            value, reply_to = encode(again), self._route.choose_again()
        headers = [(HEADER_CORRELATION, self._correlation), (HEADER_REPLY_PARTITION, str(reply_to).encode())]
        try:
            await self._sender.send(
                self._topic,
                value,
                key=self._key,
                partition=lane,
                headers=headers,
                patience_s=self._request.timeout_ms / 1000,
                settled=settled,
            )
        except BrokerError as error:
            settled(error)


def now_ms() -> int:
    """Unix time in milliseconds, as messages carry it."""
    return int(time.time() * 1000)


class Exchange:
    """hedge_s: patience before the next attempt; 0: for ever."""

    def __init__(
        self, call: Call, lane: int, copies: Copies, hedges: Hedges, hedge_s: float, metrics: ClientMetrics
    ) -> None:
        self._call = call
        self._copies = copies
        self._hedges = hedges
        self._hedge_s = hedge_s
        self._metrics = metrics
        self._lane = lane
        self._tried: list[int] = []
        self._sending: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> ScoreReply:
        """The answer. Raises BrokerError where no copy could be sent; cancelled, it sends nothing more."""
        self._hedges.request()
        if not (self._hedge_s and (why := self._hedges.cut_off(self._lane)) and self._hedge(why)):
            self._attempt(self._lane)
        self._rearm()
        try:
            return await self._call.reply
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for sending in self._sending:
                sending.cancel()

    def _attempt(self, lane: int) -> None:
        self._tried.append(lane)
        self._call.attempts += 1
        sending = self._copies.send(lane, hedge=lane != self._lane, settled=self._settled)
        self._sending.append(asyncio.create_task(sending))

    def _settled(self, error: BrokerError | None) -> None:
        """The broker has a copy, or it will not get it: then another way is tried at once, if there is one."""
        if error is not None and not self._call.reply.done():
            if self._hedge_s:
                self._hedge("unsent")
            self._call.lost(error)

    def _rearm(self) -> None:
        if self._hedge_s and len(self._tried) < MOST:
            self._timer = asyncio.get_running_loop().call_later(self._hedge_s, self._slow)

    def _slow(self) -> None:
        """No answer yet: where the owner or the lane's broker is gone a hedge costs nobody anything, else it comes out
        of the budget."""
        if self._call.reply.done():
            return
        self._hedge(self._hedges.cut_off(self._tried[-1]) or "slow")
        self._rearm()

    def _hedge(self, reason: str) -> bool:
        if len(self._tried) >= MOST or (lane := self._hedges.elsewhere([*self._tried, self._lane])) is None:
            return False
        if reason == "slow" and not self._hedges.spend():
            return False
        self._metrics.hedges.labels(reason).inc()
        self._attempt(lane)
        return True
