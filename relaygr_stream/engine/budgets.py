"""What a worker states of its load: its lanes' parts of the bytes that may be pinned, and how busy its device is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

#: Long enough that single operations do not show, short enough that a rush of a few seconds does.
AVERAGE_S: Final = 1.0


def equal_parts(whole: int, lanes: Iterable[int]) -> dict[int, int]:
    """lane → its part of so many bytes; the parts add up to the whole, so that a prefix that just fits it fits."""
    owned = sorted(lanes)
    return {lane: (whole + number) // len(owned) for number, lane in enumerate(owned)}


class BusyShare:
    """The share of the device's time that some work takes, 0…1, averaged over AVERAGE_S.

    Of all work, it is what other workers must not count on when they forward; of ranking, what pre-inference must not.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._last_ms = 0.0

    def update(self, total_ms: float, seconds: float) -> float:
        """total_ms: of that work, ever; seconds: since the last call. Returns the share from now on."""
        busy = min(1.0, max(0.0, total_ms - self._last_ms) / (seconds * 1e3))
        self._last_ms = total_ms
        self.share += min(1.0, seconds / AVERAGE_S) * (busy - self.share)
        return self.share
