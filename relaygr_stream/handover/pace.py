"""How fast copies go: as fast as the wire while this worker ranks nothing, and else without being felt."""

from __future__ import annotations

import threading
import time
from typing import Final, Protocol

#: Of one processor's time, what copies are sure of. Time without a ranking counts: where there is enough, they take
#: nothing beside one (bench-change measures what it feels).
SHARE: Final = 0.05
#: But they wait no longer than this: most rankings take less.
PATIENCE_S: Final = 0.25
#: What may go at once after a pause, in seconds of the rate.
BURST_S: Final = 1 / 30


class Computing(Protocol):
    """What copies give way to: a scheduler."""

    @property
    def works(self) -> bool:
        """Whether there is a ranking, or a prefix that one will need, to compute. The threads that copy ask."""


class Bandwidth:
    """A token bucket that bounds an amount per second over all its callers, in the order of their calls.

    burst: what may go at once after a pause. now_s: seconds of one monotonic clock.
    """

    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        self._rate = per_s
        self._burst = burst
        self._level = float(burst)
        self._at = now_s

    def take(self, amount: float, now_s: float) -> float:
        """Seconds until this amount may be sent. It is used up, sent or not."""
        self._level = min(self._burst, self._level + (now_s - self._at) * self._rate) - amount
        self._at = now_s
        return max(0.0, -self._level / self._rate)


class CopyPace:
    """The pace of all copies of one worker, for the threads that make them.

    beside: what they give way to; None: nothing. bytes_per_s: a bound; 0: none. slice_bytes: of a slice.
    """

    def __init__(self, beside: Computing | None = None, bytes_per_s: float = 0.0, slice_bytes: int = 0) -> None:
        self._beside = beside
        now = time.monotonic()
        self._cpu = Bandwidth(SHARE, SHARE * BURST_S, now)
        self._alone_at = now  # since when there has been no ranking; 0: there was one
        burst = max(slice_bytes, bytes_per_s * BURST_S)
        self._bytes = Bandwidth(bytes_per_s, burst, now) if bytes_per_s else None
        self._lock = threading.Lock()

    @property
    def works(self) -> bool:
        """Whether copies give way now."""
        return self._beside is not None and self._beside.works

    def wait_s(self, nbytes: int) -> float:
        """Seconds to wait before the next slice, of so many bytes; 0: of one asked about before."""
        if not (works := self.works):
            self._alone_at = self._alone_at or time.monotonic()
            if self._bytes is None:
                return 0.0
        with self._lock:
            now = time.monotonic()
            bound_s = 0.0 if self._bytes is None else self._bytes.take(nbytes, now)
            if not works:
                return bound_s
            wait_s = self._cpu.take(0.0, now)
            if self._alone_at:
                most_s = SHARE * max(0.0, PATIENCE_S - wait_s)
                wait_s, self._alone_at = self._cpu.take(min(now - self._alone_at, most_s), now), 0.0
            return max(bound_s, wait_s)

    def spent(self, cpu_s: float) -> None:
        """A slice beside the computing took so many seconds of a processor."""
        with self._lock:
            self._cpu.take(cpu_s, time.monotonic())
