"""Prefix KV being computed: one flight per entry, chunk by chunk, for everyone who waits for it.

Knows nothing of why a flight was started, nor what its waiters do when it is over.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from relaygr_stream.cache.entry import Coverage, Entry
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.models.api import Tokens
from relaygr_stream.worker.executor import Engine, Extension, describe
from relaygr_stream.worker.forecast import Calibration
from relaygr_stream.worker.queue import Agenda, Parked, RecentIds, WorkQueue
from relaygr_stream.worker.tasks import Flight, PreInferTask, RankTask

# Which admitted requests hold which entries, and until when.


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


@dataclass
class FlightCounters:
    """Running totals of pre-inferences by how they ended; joined: those that a ranking came for before that."""

    flight_finished: int = 0  # by when their ranking was expected
    flight_late: int = 0  # later
    flight_starved: int = 0  # life window, ranking or lane over before they were finished
    flight_failed: int = 0
    flight_joined: int = 0


class Flights:
    """What is being computed. bound_ms: how long the device may be kept from a ranking that comes meanwhile."""

    def __init__(self, engine: Engine, cache: PrefixCache, queue: WorkQueue, bound_ms: float) -> None:
        self._engine = engine
        self._cache = cache
        self._queue = queue
        self._bound_ms = bound_ms
        self.counters = FlightCounters()
        self.calibration = Calibration()
        self._by_entry: dict[Entry, Flight] = {}

    def start(self, entry: Entry, due: float, *, pre_infer: bool) -> None:
        """Compute what the entry lacks; its place in the queue is by `due` until a ranking joins.

        pre_infer: for a signal, not for a ranking that is here.
        """
        assert entry.region is not None
        flight = Flight(Extension(self._engine, entry.region, entry.tokens), due, entry, pre_infer)
        flight.expected_ms = self._predicted_ms(flight)
        self._by_entry[entry] = flight
        self._queue.flight(flight)

    def start_in_scratch(self, task: RankTask, tokens: Tokens) -> None:
        """Compute `tokens` in the scratch region, which is free, for one ranking."""
        task.borrowed = True
        work = Extension(self._engine, self._cache.scratch.borrow(), tokens)
        flight = Flight(work, task.deadline, waiters=[task])
        flight.expected_ms = self._predicted_ms(flight)
        self._queue.urge(flight, task)

    def join(self, task: RankTask, entry: Entry) -> None:
        """The ranking waits for the entry's flight."""
        flight = self._by_entry[entry]
        if flight.pre_infer and not flight.joined:
            flight.joined = True
            self.counters.flight_joined += 1
        flight.waiters.append(task)
        self._queue.urge(flight, task)

    def of(self, entry: Entry) -> Flight | None:
        """What computes this entry now."""
        return self._by_entry.get(entry)

    def remaining_ms(self, flight: Flight) -> float:
        """Predicted device time until it has landed."""
        return self._predicted_ms(flight) * self.calibration.factor

    def extend_ms(self, position: int, tokens: int) -> float:
        """Predicted device time of a flight of so many tokens behind `position`."""
        return self._engine.costs.extend_ms(position, tokens) * self.calibration.factor if tokens else 0.0

    def _predicted_ms(self, flight: Flight) -> float:
        done = flight.work.region.length
        return self._engine.costs.extend_ms(done, max(0, len(flight.work.tokens) - done))

    def waiting_ms(self) -> float:
        """Predicted device time of all pre-inferences not finished."""
        return sum(self.remaining_ms(flight) for flight in self._queue.pre_inferences())

    def late_s(self, now: float) -> float:
        """How long ago the ranking of the most overdue pre-inference not finished was expected; 0: none is late."""
        return max([0.0, *(now - flight.due for flight in self._queue.pre_inferences())])

    def advance(self, flight: Flight, now: float) -> float:
        """Give it a slice of device time; returns the milliseconds. The last one ends the flight, as do a failure
        (`flight.error`) and the end of everyone's interest. Waiters are left in the flight, those answered meanwhile
        taken out.
        """
        if flight.waiters:
            flight.waiters = [task for task in flight.waiters if not task.answered]
        if not flight.wanted:
            self._end(flight, now)
            return 0.0
        try:
            ms = flight.work.advance(self._bound_ms)
        except Exception as error:  # a user's model or the device may raise anything; the request must be answered
            flight.error = describe(error)
            self._end(flight, now)
            return 0.0
        flight.ms += ms
        if flight.work.done:
            self.calibration.add(flight.expected_ms, flight.ms)
            self._end(flight, now + ms / 1e3)
        return ms

    def _end(self, flight: Flight, now: float) -> None:
        flight.over = True
        landed = flight.work.done and flight.error is None
        if flight.entry is None:
            if not (landed and flight.waiters):
                for task in flight.waiters:
                    task.borrowed = False
                self._cache.scratch.give_back(flight.work.region)
            return
        del self._by_entry[flight.entry]
        if flight.pre_infer:
            self._count(flight, landed, now)
        if flight.error is not None:
            self._cache.abort(flight.entry)
        elif landed:
            self._cache.finish(flight.entry)
        else:
            self._cache.cut_short(flight.entry)

    def _count(self, flight: Flight, landed: bool, now: float) -> None:
        if flight.error is not None:
            self.counters.flight_failed += 1
        elif not landed:
            self.counters.flight_starved += 1
        elif now > flight.due:
            self.counters.flight_late += 1
        else:
            self.counters.flight_finished += 1


# What becomes of a pre-infer signal. find ─► HBM: pin | computing: pin | DRAM: load, pin | shorter: extend, pin |
# nothing: compute, pin A signal that has to wait for the beginning of its sequence pins what there is, so that its
# bytes are in the books from when it was read, as the trigger's ledger relies on; it lives as long as that pin.


@dataclass
class SignalCounters:
    """Running totals of what became of signals. One that had to wait counts again where it then goes."""

    signals: int = 0
    signal_computed: int = 0
    signal_extended: int = 0
    signal_hbm: int = 0
    signal_dram: int = 0
    signal_joined: int = 0
    signal_duplicate: int = 0
    signal_expired: int = 0
    signal_ranked: int = 0  # its ranking had been answered before it came
    signal_over_footprint: int = 0
    signal_no_room: int = 0
    tokens_asked: int = 0  # of prefixes that were pinned
    tokens_computed: int = 0  # of these, not found in the cache


class Signals:
    """Admitted requests on their way to pinned prefix KV. footprint: bytes that may be pinned for them."""

    def __init__(
        self,
        cache: PrefixCache,
        flights: Flights,
        parked: Parked,
        pins: PinTable,
        answered: RecentIds,
        footprint: int,
    ) -> None:
        self._cache = cache
        self._flights = flights
        self._parked = parked
        self._pins = pins
        self._answered = answered
        self._footprint = footprint
        self.counters = SignalCounters()

    def take(self, task: PreInferTask, now: float) -> None:
        """A signal came."""
        self.counters.signals += 1
        if task.request_key in self._pins:
            self.counters.signal_duplicate += 1
        elif task.request_key in self._answered:
            self.counters.signal_ranked += 1
        elif task.expires <= now:
            self.counters.signal_expired += 1
        else:
            self._place(task)

    def again(self, task: PreInferTask) -> None:
        """What the signal waited for is over. If its pin is gone (expired, ranked, lane lost), so is the signal."""
        if self._pins.release(task.request_key):
            self._place(task)

    def _place(self, task: PreInferTask) -> None:
        entry, coverage = self._cache.find(task.user_key, task.tokens)
        if self._cache.pinned_bytes + self._more(task, entry, coverage) > self._footprint:
            self.counters.signal_over_footprint += 1  # the last guard, behind the trigger's own
        elif entry is not None and coverage is Coverage.COVERS:
            self._use(task, entry)
        elif entry is not None and coverage is Coverage.PREFIX and self._continue(task, entry):
            self.counters.signal_extended += 1
        elif (fresh := self._cache.open(task.user_key, task.tokens)) is not None:
            self.counters.signal_computed += 1
            self._compute(task, fresh)
        else:
            self.counters.signal_no_room += 1

    def _use(self, task: PreInferTask, entry: Entry) -> None:
        """The entry has, or will have, all that is asked for."""
        if entry.ready:
            self.counters.signal_hbm += 1
        elif entry.computing or entry.load is not None:
            self.counters.signal_joined += 1
        elif self._cache.load(entry):
            self.counters.signal_dram += 1
        else:
            self.counters.signal_no_room += 1
            return
        self._pin(task, entry)

    def _continue(self, task: PreInferTask, entry: Entry) -> bool:
        """The user's cached prefix grew: extend it now, or as soon as it is here."""
        if entry.ready:
            grown = self._cache.extend(entry, task.tokens)
            if grown is not None:
                self._compute(task, grown)
            return grown is not None
        if entry.region is None and not self._cache.load(entry):
            return False
        self._pin(task, entry)
        self._parked.add(entry, task)
        return True

    def _compute(self, task: PreInferTask, entry: Entry) -> None:
        assert entry.region is not None
        self.counters.tokens_computed += len(task.tokens) - entry.region.length
        self._flights.start(entry, task.due, pre_infer=True)
        self._pin(task, entry)

    def _pin(self, task: PreInferTask, entry: Entry) -> None:
        self.counters.tokens_asked += len(task.tokens)
        self._pins.add(task.request_key, task.lane, entry, task.expires, self._cache.nbytes(len(task.tokens)))

    def _more(self, task: PreInferTask, entry: Entry | None, coverage: Coverage) -> int:
        """HBM that this signal would hold beyond what is held now."""
        fresh = self._cache.nbytes(len(task.tokens))
        if entry is None or coverage is Coverage.NONE:
            return fresh
        there = self._cache.entry_bytes(entry)
        if coverage is Coverage.COVERS or fresh <= there:
            return 0 if entry.held else there
        return fresh
