"""Pins: what holds the prefix KV of admitted requests until their rankings come, and how many bytes of which lane.

Pins on other workers' behalf have bytes of their own (DELEGATED_LANE), beside those that the lanes' triggers divide.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from relaygr_stream.cache.entry import Entry, Source
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.engine.commands import DELEGATED_LANE
from relaygr_stream.engine.queue import TimerHeap

#: By so much each ranking moves the head start that requests usually have. Half as long or twice as long is learned
#: within 15 rankings, and one that comes very late counts no more than others.
HEAD_START_STEP: Final = 1.05
#: The least head start that is learned: from 0, no number of steps leads away.
LEAST_HEAD_START_MS: Final = 1.0


def source_of(lane: int) -> Source:
    """What a signal on this lane is to the entry that it asks for."""
    return Source.DELEGATED if lane == DELEGATED_LANE else Source.SIGNAL


@dataclass(slots=True, eq=False)
class Pin:
    """One admitted request's hold on an entry."""

    request_id: str
    entry: Entry
    lane: int
    nbytes: int
    since: float  # when its signal was read
    ranked: bool = False
    released: bool = False


class PinTable:
    """Pins by request id; each ends with its ranking or with its life window, whichever comes first."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._pins: dict[str, Pin] = {}
        self._ends: TimerHeap[Pin] = TimerHeap(lambda pin: pin.released)
        self._lane_bytes: defaultdict[int, int] = defaultdict(int)
        self._delegated: dict[Entry, tuple[int, int]] = {}  # entry → pins on other workers' behalf, bytes
        self.unheld: list[Entry] = []  # entries whose last pin ended while they were computed; the scheduler takes them
        self.expired = 0
        self.head_start_ms = 0.0  # from a signal to its ranking, about the median of the last; 0: unknown

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pins

    @property
    def next_end(self) -> float | None:
        """When the next life window ends."""
        first = self._ends.first()
        return None if first is None else first[0]

    def entry(self, request_id: str) -> Entry | None:
        """What the request pins; None: nothing."""
        pin = self._pins.get(request_id)
        return None if pin is None else pin.entry

    def source(self, request_id: str) -> Source:
        """On whose word the request asks for prefix KV: its own signal's, as long as that pins; else a ranking's."""
        pin = self._pins.get(request_id)
        return Source.RANKING if pin is None else source_of(pin.lane)

    def lane_bytes(self, lane: int) -> int:
        """Bytes that a lane's pinned requests were admitted for.

        As in the trigger's ledger: an entry held by two of them counts twice, and one that holds more tokens than
        asked for counts as asked for. What is physically held is the cache's pinned_bytes. No ledger counts
        DELEGATED_LANE, so an entry counts once there: a user who returns soon has several requests on their way.
        """
        return self._lane_bytes.get(lane, 0)

    def delegated_more(self, entry: Entry | None, nbytes: int) -> int:
        """Bytes of DELEGATED_LANE that another pin of this entry would add. nbytes: what it is admitted for."""
        return nbytes if entry is None else max(0, nbytes - self._delegated.get(entry, (0, 0))[1])

    def add(self, request_id: str, lane: int, entry: Entry, expires: float, nbytes: int, since: float) -> None:
        """Hold the entry for an admitted request; a request pins once. nbytes: what it was admitted for. since: when
        its signal was read."""
        assert request_id not in self._pins
        self._cache.pin(entry)
        pin = Pin(request_id, entry, lane, nbytes, since)
        self._pins[request_id] = pin
        if lane == DELEGATED_LANE:
            pins, held = self._delegated.get(entry, (0, 0))
            nbytes = self.delegated_more(entry, nbytes)
            self._delegated[entry] = pins + 1, held + nbytes
        self._lane_bytes[lane] += nbytes
        self._ends.add(expires, pin)

    def ranked(self, request_id: str, arrived: float) -> None:
        """A ranking came: learn its head start, if it is its request's first, and the request one of our own users."""
        pin = self._pins.get(request_id)
        if pin is None or pin.ranked or pin.lane == DELEGATED_LANE:
            return
        pin.ranked = True
        took_ms, usual_ms = max(LEAST_HEAD_START_MS, (arrived - pin.since) * 1e3), self.head_start_ms
        step = HEAD_START_STEP if took_ms > usual_ms else 1 / HEAD_START_STEP
        self.head_start_ms = usual_ms * step if usual_ms else took_ms

    def release(self, request_id: str) -> bool:
        """End the pin of a request whose ranking was answered; False if it had none."""
        pin = self._pins.pop(request_id, None)
        if pin is None:
            return False
        pin.released = True
        self._lane_bytes[pin.lane] -= self._freed(pin)
        self._cache.unpin(pin.entry)
        if pin.entry.computing and not pin.entry.pins:
            self.unheld.append(pin.entry)
        return True

    def _freed(self, pin: Pin) -> int:
        """Bytes of its lane that a pin's end frees."""
        if pin.lane != DELEGATED_LANE:
            return pin.nbytes
        pins, held = self._delegated.pop(pin.entry)
        if pins > 1:
            self._delegated[pin.entry] = pins - 1, held
        return held if pins == 1 else 0

    def release_lanes(self, lanes: Iterable[int]) -> None:
        """End the pins of lanes that have another owner now: their rankings will not come here."""
        gone = set(lanes)
        for request_id in [key for key, pin in self._pins.items() if pin.lane in gone]:
            self.release(request_id)

    def release_entry(self, entry: Entry) -> None:
        """End all pins of an entry that failed."""
        for request_id in [key for key, pin in self._pins.items() if pin.entry is entry]:
            self.release(request_id)

    def expire(self, now: float) -> None:
        """End the pins whose life window is over."""
        while (first := self._ends.first()) is not None and first[0] <= now:
            self.release(first[1].request_id)
            self.expired += 1

    def holds(self) -> Counter[Entry]:
        """How often each entry is pinned from here."""
        return Counter(pin.entry for pin in self._pins.values())
