"""What becomes of a pre-infer signal.

    find ─► HBM: pin | computing: pin | DRAM: load, pin | shorter: extend, pin | nothing: compute, pin

A signal that has to wait for the beginning of its sequence pins what there is, so that its bytes are in the books from
when it was read, as the trigger's ledger relies on; it lives as long as that pin.
"""

from __future__ import annotations

from dataclasses import dataclass

from relaygr_stream.cache.entry import Coverage, Entry
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.worker.flights import Flights
from relaygr_stream.worker.parked import Parked
from relaygr_stream.worker.pins import PinTable
from relaygr_stream.worker.recent import RecentIds
from relaygr_stream.worker.tasks import PreInferTask


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
