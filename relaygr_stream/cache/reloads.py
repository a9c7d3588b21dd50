"""What reloads from DRAM cost, learnt from those there were. Knows nothing of what was reloaded."""

from __future__ import annotations

from typing import Final

#: Until the first reload: half of what plain copies reach on the slowest machine measured (two CPU cores, 6 GB/s).
PRIOR_BYTES_PER_S: Final = 3e9
#: Weight of a reload after each further one: 0.95 keeps about the last twenty.
FORGETTING: Final = 0.95


class ReloadSpeed:
    """Bytes of HBM filled over the time it took, each reload weighing by its bytes."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0

    def took(self, nbytes: int, seconds: float) -> None:
        """A region of so many bytes came back in so long."""
        self._bytes = FORGETTING * self._bytes + nbytes
        self._seconds = FORGETTING * self._seconds + seconds

    def predict_ms(self, nbytes: int) -> float:
        """What a region of so many bytes is expected to take."""
        speed = self._bytes / self._seconds if self._seconds else PRIOR_BYTES_PER_S
        return nbytes / speed * 1e3
