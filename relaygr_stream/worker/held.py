"""Memory of what a worker has read: counted from the record until the answer has left, or the device has the signal."""

from __future__ import annotations

from collections.abc import Hashable


class HeldBytes:
    """Bytes of rankings without an acknowledged answer, and of signals that the device thread has not taken."""

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
