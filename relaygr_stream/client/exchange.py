"""One ranking request under way: sent on its user's lane, and elsewhere where that lane does not answer.

All attempts have one correlation id, and the first scores count (DESIGN §5). Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from relaygr_stream.client.answers import Call
from relaygr_stream.client.hedges import Hedges
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.errors import BrokerError
from relaygr_stream.messages import ScoreReply

#: Attempts in all: the user's lane and two others. A third way that fails as well is no matter of one worker.
MOST: Final = 3

#: Sends one copy: (lane, hops, settled).
Send = Callable[[int, int, Callable[[BrokerError | None], None]], "asyncio.Task[None]"]


class Exchange:
    """send: starts sending one copy of the request. hedge_s: patience before the next attempt; 0: for ever."""

    def __init__(
        self, call: Call, lane: int, send: Send, hedges: Hedges, hedge_s: float, metrics: ClientMetrics
    ) -> None:
        self._call = call
        self._send = send
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
        hops = 0 if lane == self._lane else 1
        self._tried.append(lane)
        self._call.attempts += 1
        self._sending.append(self._send(lane, hops, self._settled))

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
