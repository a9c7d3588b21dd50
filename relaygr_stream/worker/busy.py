"""How much of the device's time is used, averaged over about a second: what other workers may not count on."""

from __future__ import annotations

from typing import Final

#: Long enough that single operations do not show, short enough that a rush of a few seconds does.
AVERAGE_S: Final = 1.0


class BusyShare:
    """A share, 0…1, from a running total of device time."""

    def __init__(self) -> None:
        self.share = 0.0
        self._last_ms = 0.0

    def update(self, total_ms: float, seconds: float) -> float:
        """total_ms: of all work, ever; seconds: since the last call. Returns the share from now on."""
        busy = min(1.0, max(0.0, total_ms - self._last_ms) / (seconds * 1e3))
        self._last_ms = total_ms
        self.share += min(1.0, seconds / AVERAGE_S) * (busy - self.share)
        return self.share
