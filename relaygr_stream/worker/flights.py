"""Prefix KV being computed: one flight per entry, chunk by chunk, for everyone who waits for it.

Knows nothing of why a flight was started, nor what its waiters do when it is over.
"""

from __future__ import annotations

from relaygr_stream.cache.entry import Entry
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.models.tokens import Tokens
from relaygr_stream.worker.engine import Engine, describe
from relaygr_stream.worker.queue import WorkQueue
from relaygr_stream.worker.tasks import Flight, RankTask


class Flights:
    """What is being computed. budget_ms: the longest a chunk may take, by prediction."""

    def __init__(self, engine: Engine, cache: PrefixCache, queue: WorkQueue, budget_ms: float) -> None:
        self._engine = engine
        self._cache = cache
        self._queue = queue
        self._budget_ms = budget_ms
        self._by_entry: dict[Entry, Flight] = {}

    def start(self, entry: Entry, due: float) -> None:
        """Compute what the entry lacks; its place in the queue is by `due` until a ranking joins."""
        assert entry.region is not None
        flight = Flight(entry.region, entry.tokens, due, entry)
        self._by_entry[entry] = flight
        self._queue.flight(flight)

    def start_in_scratch(self, task: RankTask, tokens: Tokens) -> None:
        """Compute `tokens` in the scratch region, which is free, for one ranking."""
        task.borrowed = True
        flight = Flight(self._cache.scratch.borrow(), tokens, task.deadline, waiters=[task])
        self._queue.urge(flight, task.deadline)

    def join(self, task: RankTask, entry: Entry) -> None:
        """The ranking waits for the entry's flight."""
        flight = self._by_entry[entry]
        flight.waiters.append(task)
        self._queue.urge(flight, task.deadline)

    def advance(self, flight: Flight) -> float:
        """Run one chunk; returns its milliseconds. The last one ends the flight, as do a failure (`flight.error`) and
        the end of everyone's interest. Waiters are left in the flight, those answered meanwhile taken out.
        """
        flight.waiters = [task for task in flight.waiters if not task.answered]
        if not flight.waiters and (flight.entry is None or not flight.entry.pins):
            self._end(flight)
            return 0.0
        try:
            ms = self._engine.advance(flight.region, flight.tokens, self._budget_ms)
        except Exception as error:  # a user's model or the device may raise anything; the request must be answered
            flight.error = describe(error)
            self._end(flight)
            return 0.0
        if flight.region.length >= len(flight.tokens):
            self._end(flight)
        return ms

    def _end(self, flight: Flight) -> None:
        flight.over = True
        landed = flight.region.length >= len(flight.tokens) and flight.error is None
        if flight.entry is None:
            if not (landed and flight.waiters):
                for task in flight.waiters:
                    task.borrowed = False
                self._cache.scratch.give_back(flight.region)
            return
        del self._by_entry[flight.entry]
        if flight.error is not None:
            self._cache.abort(flight.entry)
        elif landed:
            self._cache.finish(flight.entry)
        else:
            self._cache.cut_short(flight.entry)
