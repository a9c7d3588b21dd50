"""Which admitted requests hold which entries, and until when."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from relaygr_stream.cache.entry import Entry
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.worker.agenda import Agenda


@dataclass(slots=True, eq=False)
class Pin:
    """One admitted request's hold on an entry."""

    request_id: str
    entry: Entry
    lane: int
    nbytes: int
    released: bool = False


class PinTable:
    """Pins by request id; each ends with its ranking or with its life window, whichever comes first."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._pins: dict[str, Pin] = {}
        self._ends: Agenda[Pin] = Agenda(lambda pin: pin.released)
        self._lane_bytes: defaultdict[int, int] = defaultdict(int)
        self.expired = 0

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pins

    @property
    def next_end(self) -> float | None:
        """When the next life window ends."""
        first = self._ends.first()
        return None if first is None else first[0]

    def lane_bytes(self, lane: int) -> int:
        """Bytes that a lane's pinned requests were admitted for.

        As in the trigger's ledger: an entry held by two of them counts twice, and one that holds more tokens than
        asked for counts as asked for. What is physically held is the cache's pinned_bytes.
        """
        return self._lane_bytes.get(lane, 0)

    def add(self, request_id: str, lane: int, entry: Entry, expires: float, nbytes: int) -> None:
        """Hold the entry for an admitted request; a request pins once. nbytes: what it was admitted for."""
        assert request_id not in self._pins
        self._cache.pin(entry)
        pin = Pin(request_id, entry, lane, nbytes)
        self._pins[request_id] = pin
        self._lane_bytes[lane] += pin.nbytes
        self._ends.add(expires, pin)

    def release(self, request_id: str) -> bool:
        """The request's ranking was answered; False if nothing was pinned for it."""
        pin = self._pins.pop(request_id, None)
        if pin is None:
            return False
        pin.released = True
        self._lane_bytes[pin.lane] -= pin.nbytes
        self._cache.unpin(pin.entry)
        return True

    def release_lanes(self, lanes: Iterable[int]) -> None:
        """These lanes have another owner now: their rankings will not come here."""
        gone = set(lanes)
        for request_id in [key for key, pin in self._pins.items() if pin.lane in gone]:
            self.release(request_id)

    def release_entry(self, entry: Entry) -> None:
        """The entry failed: it holds nothing that would be worth its memory."""
        for request_id in [key for key, pin in self._pins.items() if pin.entry is entry]:
            self.release(request_id)

    def expire(self, now: float) -> None:
        """End the life windows that are over."""
        while (first := self._ends.first()) is not None and first[0] <= now:
            self.release(first[1].request_id)
            self.expired += 1

    def holds(self) -> Counter[Entry]:
        """How often each entry is pinned from here."""
        return Counter(pin.entry for pin in self._pins.values())
