"""The announced requests whose rankings are to come, and the head start that these usually leave."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from relaygr_stream.telemetry.tracing import Trace

#: Requests that are remembered: the oldest are dropped beyond it.
MOST: Final = 4096
#: By so much each ranking moves the usual head start. Half as long or twice as long is learned within 15 rankings, and
#: one that comes very late counts no more than others.
STEP: Final = 1.05
#: The least head start that is learned: from 0, no number of steps leads away.
LEAST_MS: Final = 1.0
#: A shorter head start is not stated. Its event takes 15 ms to a trigger (client.announce_linger_ms, and its way), and
#: owners learn of a delegate 30 ms later (trigger/delegation.py): whether the owner would be late no longer matters.
LEAST_STATED_MS: Final = 50.0


class _Request(NamedTuple):
    """An announced request. trace: the span of its announcement, if its ranking belongs there."""

    at_s: float
    trace: Trace | None


class Announced:
    """A client's announced requests, by keys. longest_ms: a ranking that follows later than this counts as this."""

    def __init__(self, longest_ms: float) -> None:
        self._longest_ms = longest_ms
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._median_ms = 0.0  # about, of the last; 0: unknown

    @property
    def usual_ms(self) -> float:
        """Milliseconds from an event to its ranking, about the median of the last; 0: unknown, or too short to tell."""
        return self._median_ms if self._median_ms >= LEAST_STATED_MS else 0.0

    def add(self, key: str, now_s: float, trace: Trace | None = None) -> None:
        """A request's event is sent; its first counts. trace: the span to which its ranking will belong."""
        if self._requests.setdefault(key, request := _Request(now_s, trace)) is request and len(self._requests) > MOST:
            self._requests.popitem(last=False)

    def ranked(self, key: str, now_s: float) -> Trace | None:
        """A ranking begins: learn from it if it is its request's first. Returns the span that it belongs to."""
        request = self._requests.pop(key, None)
        if request is None:
            return None
        took_ms = min((now_s - request.at_s) * 1e3, self._longest_ms)
        step = STEP if took_ms > self._median_ms else 1 / STEP
        learned_ms = self._median_ms * step if self._median_ms else took_ms
        self._median_ms = min(self._longest_ms, max(LEAST_MS, learned_ms))  # at most what a message may state
        return request.trace

    def cancelled(self, key: str) -> None:
        """No ranking will follow."""
        self._requests.pop(key, None)
