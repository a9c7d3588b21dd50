"""Learns the value of a DRAM copy: the speed of reloads, and the share of copies that are evicted before a reload."""

from __future__ import annotations

from typing import Final

#: The speed before the first reload: half of a plain copy's on the slowest measured machine (two CPU cores, 6 GB/s).
PRIOR_BYTES_PER_S: Final = 3e9
#: Factor on former reloads' weight at each further reload: 0.95 averages about the last 20.
SPEED_KEPT: Final = 0.95
#: The same for ends of copies: about the last 500, since an end is a single bit.
END_KEPT: Final = 0.998


class Reloads:
    """Statistics of DRAM copies whose entry was not in HBM: each is reloaded, or evicted to make room for others."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._ends = 1.0  # starts with one reload: a DRAM tier with free space evicts nothing
        self._evicted = 0.0

    def reloaded(self, nbytes: int, seconds: float) -> None:
        """Count the reload of a region of `nbytes` that took `seconds`."""
        self._bytes = SPEED_KEPT * self._bytes + nbytes
        self._seconds = SPEED_KEPT * self._seconds + seconds
        self._end(0.0)

    def evicted(self) -> None:
        """Count the eviction of a copy that was the last of its entry."""
        self._end(1.0)

    def predict_ms(self, nbytes: int) -> float:
        """Expected time of reloading a region of `nbytes`; past reloads are weighted by their bytes."""
        speed = self._bytes / self._seconds if self._seconds else PRIOR_BYTES_PER_S
        return nbytes / speed * 1e3

    @property
    def risk(self) -> float:
        """The share of copies that are evicted rather than reloaded."""
        return self._evicted / self._ends

    def _end(self, evicted: float) -> None:
        self._ends = END_KEPT * self._ends + 1.0
        self._evicted = END_KEPT * self._evicted + evicted
