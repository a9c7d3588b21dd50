"""Signals: admitted requests on their way to pinned prefix KV, and the pins that hold it until their rankings come.

    find ─► HBM: pin | computing: pin | DRAM: load, pin | shorter: prefill the rest, pin | nothing: prefill, pin

A signal that waits for the beginning of its sequence pins what there is: the trigger's ledger counts its bytes from
when it was read. It lives as long as that pin.

Signals on other workers' behalf have bytes of their own, beside those that the lanes' triggers divide: whatever they
pin, an own signal finds the room that its trigger was promised.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from relaygr_stream.cache.entry import Coverage, Entry
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.engine.commands import DELEGATED_LANE, Placed, PrefillTask
from relaygr_stream.engine.prefill import PrefillJobs
from relaygr_stream.engine.queue import RecentIds, TimerHeap, Waiters

#: By so much each ranking moves the head start that requests usually have. Half as long or twice as long is learned
#: within 15 rankings, and one that comes very late counts no more than others.
HEAD_START_STEP: Final = 1.05
#: The least head start that is learned: from 0, no number of steps leads away.
LEAST_HEAD_START_MS: Final = 1.0
#: Results of signals that a prefill job computes, or that wait for a copy and are placed again.
COMPUTED: Final = ("computed", "extended")


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


@dataclass
class SignalCounters:
    """Running totals of signals by what became of them. One that had to wait counts again where it then goes."""

    signals: int = 0
    signal_computed: int = 0
    signal_extended: int = 0
    signal_hbm: int = 0
    signal_dram: int = 0
    signal_joined: int = 0
    signal_duplicate: int = 0
    signal_expired: int = 0
    signal_ranked: int = 0  # its ranking had been answered, or it had been cancelled, before it came
    signal_cancelled: int = 0  # its client cancelled it while it was pinned
    signal_over_footprint: int = 0
    signal_no_room: int = 0
    signal_delegated: int = 0  # of the pinned ones, those on another worker's behalf
    signal_over_delegated: int = 0  # beyond the bytes for those
    tokens_asked: int = 0  # of prefixes that were pinned for the lanes' own users
    tokens_computed: int = 0  # of these, not found in the cache


class Signals:
    """Places signals: finds, loads or computes their prefix KV, and pins it.

    footprint: bytes that may be held when a signal pins more, those of waiting rankings included. delegated: beside
    these, for signals on other workers' behalf. placed: takes what became of signals whose origin is to be told.
    """

    def __init__(
        self,
        cache: PrefixCache,
        jobs: PrefillJobs,
        waiters: Waiters,
        pins: PinTable,
        answered: RecentIds,
        placed: list[Placed],
        footprint: int,
        delegated: int = 0,
    ) -> None:
        self._placed = placed
        self._cache = cache
        self._jobs = jobs
        self._waiters = waiters
        self._pins = pins
        self._answered = answered
        self._footprint = footprint
        self._delegated = delegated
        self.counters = SignalCounters()

    def enqueue(self, task: PrefillTask, now: float) -> None:
        """Place a signal that came, unless it is a duplicate, expired, or behind its ranking or its cancel."""
        self.counters.signals += 1
        if task.request_key in self._pins:
            self._count("duplicate", task)
        elif task.request_key in self._answered:
            self._count("ranked", task)
        elif task.expires <= now:
            self._count("expired", task)
        else:
            self._place(task)

    def cancel(self, request_key: str) -> None:
        """End the request's pin, and drop its signal if that is still to come."""
        self._answered.add(request_key)
        if self._pins.release(request_key):
            self.counters.signal_cancelled += 1

    def again(self, task: PrefillTask) -> None:
        """Place a signal whose wait is over. If its pin is gone (expired, ranked, cancelled, lane lost), so is it."""
        if self._pins.release(task.request_key):
            self._place(task)
        else:
            self._tell(task, "unpinned")

    def _place(self, task: PrefillTask) -> None:
        entry, coverage = self._cache.find(task.user_key, task.tokens)
        delegated = self._pins.lane_bytes(DELEGATED_LANE)
        if task.lane == DELEGATED_LANE:
            pinned = entry if coverage is Coverage.COVERS else None  # one that is extended may stay beside the new one
            if delegated + self._pins.delegated_more(pinned, self._cache.nbytes(len(task.tokens))) > self._delegated:
                self._count("over_delegated", task)
                return
        elif self._cache.pinned_bytes + self._more(task, entry, coverage) > self._footprint + delegated:
            # The trigger's bound comes first, unless waiting rankings hold memory that it does not count.
            self._count("over_footprint", task)
            return
        if entry is not None and coverage is Coverage.COVERS:
            self._use(task, entry)
        elif entry is not None and coverage is Coverage.PREFIX and self._continue(task, entry):
            self._count("extended", task)
        elif (fresh := self._cache.open(task.user_key, task.tokens)) is not None:
            self._count("computed", task)
            self._compute(task, fresh)
        else:
            self._count("no_room", task)

    def _use(self, task: PrefillTask, entry: Entry) -> None:
        """Pin an entry that has, or will have, the whole prefix."""
        if entry.ready:
            self._count("hbm", task)
        elif entry.computing or entry.load is not None:
            self._count("joined", task)
        elif self._cache.load(entry):
            self._count("dram", task)
        else:
            self._count("no_room", task)
            return
        self._asked(task, computed=0)
        self._pin(task, entry)

    def _continue(self, task: PrefillTask, entry: Entry) -> bool:
        """Extend the user's shorter entry, now or as soon as it is loaded."""
        if entry.ready:
            grown = self._cache.extend(entry, task.tokens)
            if grown is not None:
                self._compute(task, grown)
            return grown is not None
        if entry.region is None and not self._cache.load(entry):
            return False
        self._pin(task, entry)
        self._waiters.add(entry, task)
        return True

    def _compute(self, task: PrefillTask, entry: Entry) -> None:
        assert entry.region is not None
        self._asked(task, computed=len(task.tokens) - entry.region.length)
        self._jobs.start(entry, task.due, task)
        self._pin(task, entry)

    def _count(self, result: str, task: PrefillTask) -> None:
        name = f"signal_{result}"
        setattr(self.counters, name, getattr(self.counters, name) + 1)
        if result not in COMPUTED:  # of those, their job tells
            self._tell(task, result)

    def _tell(self, task: PrefillTask, result: str) -> None:
        if task.origin is not None:
            self._placed.append(Placed(task, result))

    def _pin(self, task: PrefillTask, entry: Entry) -> None:
        if task.lane == DELEGATED_LANE:
            self.counters.signal_delegated += 1
        nbytes = self._cache.nbytes(len(task.tokens))
        self._pins.add(task.request_key, task.lane, entry, task.expires, nbytes, task.arrived)

    def _asked(self, task: PrefillTask, computed: int) -> None:
        """Count tokens, once a signal: what own users ask for says what admissions of theirs cost."""
        if task.lane != DELEGATED_LANE:
            self.counters.tokens_asked += len(task.tokens)
            self.counters.tokens_computed += computed

    def _more(self, task: PrefillTask, entry: Entry | None, coverage: Coverage) -> int:
        """HBM bytes that pinning this signal's prefix would add to what is held."""
        fresh = self._cache.nbytes(len(task.tokens))
        if entry is None or coverage is Coverage.NONE:
            return fresh
        there = self._cache.entry_bytes(entry)
        if coverage is Coverage.COVERS or fresh <= there:
            return 0 if entry.held else there
        return fresh
