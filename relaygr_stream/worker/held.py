"""Memory of what was read and is not over: the bound that no sender, backlog or hanging device can pass.

    read ─► held ─► device thread ─► answer or forward acknowledged ─► let go
             └── too much ─► `overloaded` at once, and nothing of the request is kept

Used by the event loop; only `taken` is called by the device thread. Knows nothing of what the bytes are.
"""

from __future__ import annotations

from typing import Final

#: Of worker.waiting_bytes, rankings that wait in the core may have this share, in which the client with the most gives
#: way to others. The rest is for what the device thread has not taken yet and for answers on their way.
CORE_SHARE: Final = 0.75


class Held:
    """Bytes of rankings without an acknowledged answer, and of signals that the device thread has not taken."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rankings: dict[tuple[int, int], int] = {}
        self._ranking_bytes = 0
        # Two totals, each written by one thread: no lock is needed.
        self._signals_read = 0
        self._signals_taken = 0

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self._ranking_bytes + self._signals_read - self._signals_taken

    def ranking(self, lane: int, offset: int, nbytes: int) -> bool:
        """A ranking was read; False (nothing changed): it is too much.

        A lane that was lost and regained may bring one again whose first copy is not over: they count together, and
        end together, with the first of them.
        """
        if self.nbytes + nbytes > self.limit:
            return False
        key = (lane, offset)
        self._rankings[key] = self._rankings.get(key, 0) + nbytes
        self._ranking_bytes += nbytes
        return True

    def over(self, lane: int, offset: int) -> None:
        """The ranking needs no more work; one that was never held is no error."""
        self._ranking_bytes -= self._rankings.pop((lane, offset), 0)

    def signal(self, nbytes: int) -> bool:
        """A signal was read; False (nothing changed): it is too much."""
        if self.nbytes + nbytes > self.limit:
            return False
        self._signals_read += nbytes
        return True

    def taken(self, nbytes: int) -> None:
        """The device thread took signals of so many bytes: from now on the cache bounds what they hold."""
        self._signals_taken += nbytes
