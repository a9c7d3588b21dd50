"""The announced requests whose rankings are to come, and the head start that these usually leave."""

from __future__ import annotations

from typing import Final, NamedTuple

from relaygr_stream.telemetry.tracing import Trace

#: Requests that are remembered: the oldest are dropped beyond it.
MOST: Final = 4096
#: By so much each ranking moves the usual head start. Half as long or twice as long is learned within 15 rankings, and
#: one that comes very late counts no more than others.
STEP: Final = 1.05
#: The least head start that is learned: from 0, no number of steps leads away.
LEAST_MS: Final = 1.0


class _Request(NamedTuple):
    """One of them. trace: the span of its announcement, if its ranking belongs there."""

    at_s: float
    trace: Trace | None


class Announced:
    """A client's announced requests. longest_ms: a ranking that follows later than this counts as this."""

    def __init__(self, longest_ms: float) -> None:
        self._longest_ms = longest_ms
        self._requests: dict[str, _Request] = {}
        self.usual_ms = 0.0  # milliseconds from an event to its ranking: about the median of the last; 0: unknown

    def add(self, request_id: str, now_s: float, trace: Trace | None = None) -> None:
        """A request's event is sent. trace: the span to which its ranking will belong."""
        if len(self._requests) >= MOST:
            del self._requests[next(iter(self._requests))]
        self._requests[request_id] = _Request(now_s, trace)

    def ranked(self, request_id: str, now_s: float) -> Trace | None:
        """A ranking begins: learn from it if it is its request's first. Returns the span that it belongs to."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        took_ms = min((now_s - request.at_s) * 1e3, self._longest_ms)
        step = STEP if took_ms > self.usual_ms else 1 / STEP
        self.usual_ms = max(LEAST_MS, self.usual_ms * step if self.usual_ms else took_ms)
        return request.trace

    def cancelled(self, request_id: str) -> None:
        """No ranking will follow."""
        self._requests.pop(request_id, None)
