"""Whether a ranking is taken, and who makes room for it: places, memory and device time are shared among clients.

    places, bytes, time left? ─► take it
      └── no ─► a client that has more of it waiting? ─► that one loses its latest ranking
                  └── no ─► this one is refused

Knows nothing of what becomes of a ranking that is taken.
"""

from __future__ import annotations

from typing import Final

from relaygr_stream.cache.entry import Coverage, Found
from relaygr_stream.worker.clients import Clients
from relaygr_stream.worker.executor import Engine
from relaygr_stream.worker.forecast import Calibration, Forecast, Full
from relaygr_stream.worker.prefill import Flights
from relaygr_stream.worker.tasks import RankTask

#: What to say to a ranking that made room.
LOST: Final = {
    "waiting": "its client has the most rankings waiting",
    "nbytes": "its client has the most memory waiting",
    "ms": "its client has the most device time waiting",
}


class Admission:
    """The rankings without an answer, as far as they take room. places, nbytes: how much there is."""

    def __init__(self, engine: Engine, flights: Flights, clients: Clients, places: int, nbytes: int) -> None:
        self._engine = engine
        self._flights = flights
        self._places = places
        self._nbytes = nbytes
        self.clients = clients
        self.waiting: dict[RankTask, None] = {}  # in the order they came
        self._forecast = Forecast(clients)
        self.calibration = Calibration()  # of scoring, in the batches that come

    def book(self, task: RankTask, found: Found) -> None:
        """Note whose it is and what it will take. found: what the cache has for it."""
        task.account = self.clients.account(task.client)
        score_ms, infer_ms = self.score_ms(task) * self.calibration.factor, self._infer_ms(task, found)
        task.cost_ms = infer_ms + score_ms
        # Nothing is refused for being late as long as predictions have not been compared with measurements.
        trusted = self.calibration.trusted and (not infer_ms or self._flights.calibration.trusted)
        task.expected_ms = task.cost_ms if trusted else 0.0

    def full(self, task: RankTask, now: float) -> Full | None:
        """What there is not enough of for this ranking, which was booked; None: there is room."""
        if len(self.waiting) >= self._places:
            return Full("waiting", f"{len(self.waiting)} rankings are waiting (worker.queue_limit)")
        if self.clients.nbytes + task.nbytes > self._nbytes:
            return Full("nbytes", f"rankings of {self.clients.nbytes >> 20} MiB are waiting (worker.waiting_bytes)")
        return self._forecast.full(task, now) if task.expected_ms else None

    def loser(self, task: RankTask, full: Full) -> RankTask | None:
        """The waiting ranking that loses its place to this one; None: this one is refused.

        It is the latest of the client that has the most waiting of what is scarce, if that is more than this one's
        client would have with it; one that the device has begun with stays.
        """
        account = None if full.hopeless else self.clients.heavier(full.measure, task)
        return None if account is None else self._forecast.latest(account, full.before)

    def add(self, task: RankTask) -> None:
        """It waits from now on."""
        self.waiting[task] = None
        self.clients.add(task)
        self._forecast.add(task)

    def remove(self, task: RankTask) -> None:
        """It has its answer; one that was never added is no error."""
        if task in self.waiting:
            del self.waiting[task]
            self.clients.remove(task)
            self._forecast.remove(task)

    def score_ms(self, task: RankTask) -> float:
        """Predicted device time of scoring it alone, uncorrected."""
        return self._engine.costs.score_ms(len(task.tokens), len(task.suffix) + len(task.candidates))

    def _infer_ms(self, task: RankTask, found: Found) -> float:
        """Predicted device time until there is something to score against; a flight that others wait for is theirs."""
        entry, coverage = found
        tokens, suffix = len(task.tokens), 0 if self._engine.model.incremental else len(task.suffix)
        if entry is None or coverage is Coverage.NONE or task.full or suffix:
            return self._flights.extend_ms(0, tokens + suffix)
        flight = self._flights.of(entry)
        begun = self._flights.remaining_ms(flight) if flight is not None and not flight.waiters else 0.0
        if coverage is Coverage.COVERS:
            return begun
        there = len(entry.tokens)
        return begun + self._flights.extend_ms(there, tokens - there)
