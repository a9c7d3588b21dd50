"""What a worker's core remembers of the requests that it has read: what the trigger decided on them, by signals and by
the notices of wire/refusals.py, and the memory that they hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, NamedTuple, TypeVar

from relaygr_stream.engine.queue import RecentIds
from relaygr_stream.engine.scheduler import RECENT_ANSWERS
from relaygr_stream.wire.refusals import Refusals

T = TypeVar("T")

#: Most requests whose admission a worker keeps: some seconds of traffic, 3 MB at 200 bytes for an id and its entry.
MAX_REQUESTS: Final = 16_384


class _Delegate(NamedTuple):
    worker: str
    until: float  # end of the life window
    pins: bool = True  # no ranking went there, which would end its pin


class Decisions:
    """What the trigger decided: why a request was not admitted, and which worker is its delegate.

    By request (tenant_key); beyond MAX_REQUESTS the oldest are dropped. Times are seconds of one monotonic clock.

    late_ms: the life window. A notice that is older is ignored, and a delegate counts no longer.
    """

    def __init__(self, late_ms: float) -> None:
        self._late_ms = late_ms
        self._reasons: OrderedDict[str, str] = OrderedDict()
        self._delegates: OrderedDict[str, _Delegate] = OrderedDict()
        self._answered = RecentIds(RECENT_ANSWERS)  # for notices that come behind the answer

    def admitted(self, request_key: str, *, delegated: bool = False) -> None:
        """Note that a signal for this request was read; delegated: on another worker's behalf."""
        _put(self._reasons, request_key, "delegated" if delegated else "admitted")

    def note(self, refusals: Refusals, age_ms: float, now: float) -> list[str]:
        """Note the refusals of a record of this age; returns the keys of delegated requests."""
        left_s = (self._late_ms - age_ms) / 1e3
        if left_s < 0:
            return []
        for reason, keys in refusals.reasons.items():
            for key in keys:
                _put(self._reasons, key, reason)
        delegates = {key: worker for worker, keys in (refusals.delegates or {}).items() for key in keys}
        for key, worker in delegates.items():
            _put(self._delegates, key, _Delegate(worker, now + left_s))
        return list(delegates)

    def admission(self, request_key: str) -> str:
        """The trigger's decision on a request; empty: unknown. A request may be ranked several times."""
        return self._reasons.get(request_key, "")

    def delegate(self, request_key: str, now: float) -> str:
        """The worker that has the request's prefix KV; empty: none, or its life window is over."""
        found = self._delegates.get(request_key)
        return found.worker if found is not None and now <= found.until else ""

    def passed_on(self, request_key: str) -> None:
        """A broker has taken a ranking of the request to its delegate."""
        if (found := self._delegates.get(request_key)) is not None:
            self._delegates[request_key] = found._replace(pins=False)

    def drop_delegate(self, request_key: str, now: float) -> str:
        """Forget the request's delegate. Returns the worker if it pins the prefix KV and no ranking went there."""
        worker, found = self.delegate(request_key, now), self._delegates.pop(request_key, None)
        return worker if found is not None and found.pins else ""

    def answered(self, request_key: str) -> None:
        """The request has its final answer."""
        self._answered.add(request_key)

    def is_answered(self, request_key: str) -> bool:
        """Whether it had its final answer lately."""
        return request_key in self._answered


def _put(table: OrderedDict[str, T], key: str, value: T) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > MAX_REQUESTS:
        table.popitem(last=False)


class HeldBytes:
    """Bytes of rankings, each from its record until its answer has left, and of signals that the device thread has not
    taken."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0  # of signals that the device thread has taken so far; the cache bounds what those hold
        self._rankings: dict[Hashable, int] = {}
        self._read = 0  # of rankings, and of all signals

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._read - self.taken

    def ranking(self, origin: Hashable, nbytes: int) -> bool:
        """Count a ranking that was read; False (nothing changed): there is no room for it."""
        if self._read - self.taken + nbytes > self.limit:
            return False
        self._rankings[origin] = nbytes
        self._read += nbytes
        return True

    def release(self, origin: Hashable) -> None:
        """Release a ranking that needs no more work; one that was never counted is no error."""
        self._read -= self._rankings.pop(origin, 0)

    def signal(self, nbytes: int) -> bool:
        """Count a signal that was read; False (nothing changed): there is no room for it."""
        if self._read - self.taken + nbytes > self.limit:
            return False
        self._read += nbytes
        return True

    def signal_over(self, nbytes: int) -> None:
        """Release a signal that never comes to the device thread."""
        self._read -= nbytes
