"""Which admitted requests hold which entries, and until when."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from relaygr_stream.cache.entry import Entry
from relaygr_stream.cache.prefix_cache import PrefixCache


@dataclass(slots=True, eq=False)
class Pin:
    """One admitted request's hold on an entry."""

    entry: Entry
    lane: int
    nbytes: int


class PinTable:
    """Pins by request id; each ends with its ranking or with its life window, whichever comes first."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._pins: dict[str, Pin] = {}
        self._ends: list[tuple[float, str]] = []
        self._lane_bytes: defaultdict[int, int] = defaultdict(int)
        self.expired = 0

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pins

    @property
    def next_end(self) -> float | None:
        """When the next life window ends."""
        return self._ends[0][0] if self._ends else None

    def lane_bytes(self, lane: int) -> int:
        """Bytes pinned by a lane's requests; an entry held by two of them counts twice, as in the trigger's ledger."""
        return self._lane_bytes[lane]

    def add(self, request_id: str, lane: int, entry: Entry, expires: float) -> None:
        """Hold the entry for an admitted request; a request pins once."""
        assert request_id not in self._pins
        self._cache.pin(entry)
        nbytes = self._cache.nbytes(len(entry.tokens))
        self._pins[request_id] = Pin(entry, lane, nbytes)
        self._lane_bytes[lane] += nbytes
        heapq.heappush(self._ends, (expires, request_id))

    def release(self, request_id: str) -> bool:
        """The request's ranking was answered; False if nothing was pinned for it."""
        pin = self._pins.pop(request_id, None)
        if pin is None:
            return False
        self._lane_bytes[pin.lane] -= pin.nbytes
        self._cache.unpin(pin.entry)
        return True

    def release_lanes(self, lanes: Iterable[int]) -> None:
        """These lanes have another owner now: their rankings will not come here."""
        gone = set(lanes)
        for request_id in [key for key, pin in self._pins.items() if pin.lane in gone]:
            self.release(request_id)

    def expire(self, now: float) -> None:
        """End the life windows that are over."""
        while self._ends and self._ends[0][0] <= now:
            if self.release(heapq.heappop(self._ends)[1]):
                self.expired += 1
