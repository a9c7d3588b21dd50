"""Prefix KV being computed: one flight per entry, chunk by chunk, for everyone who waits for it.

Knows nothing of why a flight was started, nor what its waiters do when it is over.
"""

from __future__ import annotations

from dataclasses import dataclass

from relaygr_stream.cache.entry import Entry
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.models.tokens import Tokens
from relaygr_stream.worker.engine import Engine, describe
from relaygr_stream.worker.extension import Extension
from relaygr_stream.worker.forecast import Calibration
from relaygr_stream.worker.queue import WorkQueue
from relaygr_stream.worker.tasks import Flight, RankTask


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
