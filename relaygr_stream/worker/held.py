"""Memory of what a worker has read: counted from the record until the answer has left, or the device has the signal."""

from __future__ import annotations

from collections.abc import Hashable


class HeldBytes:
    """Bytes of rankings without an acknowledged answer, and of signals that the device thread has not taken."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rankings: dict[Hashable, int] = {}
        self._ranking_bytes = 0
        self._signals_read = 0
        self._signals_taken = 0

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._ranking_bytes + self._signals_read - self._signals_taken

    def ranking(self, origin: Hashable, nbytes: int) -> bool:
        """Count a ranking that was read; False (nothing changed): there is no room for it."""
        if self.nbytes + nbytes > self.limit:
            return False
        self._rankings[origin] = nbytes
        self._ranking_bytes += nbytes
        return True

    def over(self, origin: Hashable) -> None:
        """Release a ranking that needs no more work; one that was never counted is no error."""
        self._ranking_bytes -= self._rankings.pop(origin, 0)

    def signal(self, nbytes: int) -> bool:
        """Count a signal that was read; False (nothing changed): there is no room for it."""
        if self.nbytes + nbytes > self.limit:
            return False
        self._signals_read += nbytes
        return True

    def signal_over(self, nbytes: int) -> None:
        """Release a signal that never comes to the device thread."""
        self._signals_read -= nbytes

    def on_taken(self, nbytes: int) -> None:
        """The device thread has taken signals of so many bytes so far: the cache bounds what those hold."""
        self._signals_taken = nbytes
