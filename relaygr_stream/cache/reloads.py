"""What having a copy in DRAM is worth, learnt: how fast copies come back, and how many do at all.

Knows nothing of entries.
"""

from __future__ import annotations

from typing import Final

#: Until the first reload: half of what plain copies reach on the slowest machine measured (two CPU cores, 6 GB/s).
PRIOR_BYTES_PER_S: Final = 3e9
#: Weight of a reload's speed after each further one: 0.95 keeps about the last twenty.
SPEED_KEPT: Final = 0.95
#: Of a copy's end, likewise: the last five hundred, since an end is only yes or no.
END_KEPT: Final = 0.998


class Reloads:
    """Copies that were all that was left of their entry: reloaded, or forgotten to make room for others."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._ends = 1.0  # one that was reloaded: a DRAM tier with room left forgets nothing
        self._forgotten = 0.0

    def reloaded(self, nbytes: int, seconds: float) -> None:
        """A region of so many bytes came back in so long."""
        self._bytes = SPEED_KEPT * self._bytes + nbytes
        self._seconds = SPEED_KEPT * self._seconds + seconds
        self._end(0.0)

    def forgotten(self) -> None:
        """A copy was dropped; its user will find nothing."""
        self._end(1.0)

    def predict_ms(self, nbytes: int) -> float:
        """What a region of so many bytes is expected to take to come back; each reload weighs by its bytes."""
        speed = self._bytes / self._seconds if self._seconds else PRIOR_BYTES_PER_S
        return nbytes / speed * 1e3

    @property
    def risk(self) -> float:
        """Share of copies that are forgotten rather than reloaded."""
        return self._forgotten / self._ends

    def _end(self, forgotten: float) -> None:
        self._ends = END_KEPT * self._ends + 1.0
        self._forgotten = END_KEPT * self._forgotten + forgotten
