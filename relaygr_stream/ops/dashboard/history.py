"""The last fifteen minutes of a fleet, in slots of ten seconds, from the statuses of its processes.

What a process did between two of its statuses counts in the slot of the later one. Only sums are kept, so the memory
does not grow with the fleet.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from relaygr_stream.ops.status.tally import Tally, growth
from relaygr_stream.telemetry.clocks import Clock
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.wire.trigger_status import TriggerStatus

S = TypeVar("S", WorkerStatus, TriggerStatus)

SLOT_S: Final = 10
#: Fifteen minutes of them, and the one that is not over.
SLOTS: Final = 91
#: Statuses of one process are looked at so far apart at least: it states itself four times a second.
LEAST_S: Final = 1.0
#: Two statuses further apart are of different times: what happened between them belongs to no slot. A compacted log has
#: such gaps, and so has a broker's outage.
MOST_S: Final = 3 * SLOT_S


@dataclass
class Slot:
    """Ten seconds of the whole fleet."""

    tally: Tally = field(default_factory=Tally)
    decisions: Counter[str] = field(default_factory=Counter)  # of triggers, by reason
    #: Sums over the statuses of workers, and their number: `statuses`.
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    queue_ms: float = 0.0  # the longest
    busy: float = 0.0  # the busiest worker's share

    def mean(self, name: str, whole: str = "statuses") -> float | None:
        """One sum as a share of another; None: nothing was stated."""
        return self.sums[name] / self.sums[whole] if self.sums[whole] else None

    def add(self, other: Slot) -> None:
        """Count another slot, too."""
        self.tally.add(other.tally)
        self.decisions.update(other.decisions)
        for name, value in other.sums.items():
            self.sums[name] += value
        self.queue_ms, self.busy = max(self.queue_ms, other.queue_ms), max(self.busy, other.busy)


@dataclass(frozen=True)
class _Last(Generic[S]):
    at_s: float
    status: S


class FleetHistory:
    """Slots by the time when their statuses were written. most: processes of a kind that are told apart. wall: Unix
    time in seconds."""

    def __init__(self, most: int, wall: Clock = time.time) -> None:
        self._most = most
        self._wall = wall
        self._slots: dict[int, Slot] = {}
        self._workers: dict[str, _Last[WorkerStatus]] = {}
        self._triggers: dict[str, _Last[TriggerStatus]] = {}

    def add(self, status: WorkerStatus | TriggerStatus, at_s: float) -> None:
        """Count a status that was written at that Unix time."""
        if isinstance(status, WorkerStatus):
            self._add_worker(status, at_s)
        else:
            self._add_trigger(status, at_s)

    def slots(self) -> list[Slot | None]:
        """The slots of the last fifteen minutes, the oldest first, the last one not over; None: nothing was stated.

        Nothing changes them any more.
        """
        now = self._number(self._wall())
        found = [self._slots.get(number) for number in range(now - SLOTS + 1, now + 1)]
        for at in (-2, -1):  # a status may be on its way into the one that has just ended
            if (slot := found[at]) is not None:
                kept = found[at] = Slot()
                kept.add(slot)
        return found

    def _add_worker(self, status: WorkerStatus, at_s: float) -> None:
        before, taken = self._follow(self._workers, status, at_s)
        if not taken:
            return
        slot = self._slot(at_s)
        for name, value in (
            ("statuses", 1),
            ("busy", status.busy_share),
            ("hbm_used", status.hbm_used_bytes),
            ("hbm", status.hbm_bytes),
            ("dram_used", status.dram_used_bytes),
            ("dram", status.dram_bytes),
        ):
            slot.sums[name] += value
        slot.queue_ms, slot.busy = max(slot.queue_ms, status.queue_ms), max(slot.busy, status.busy_share)
        if before is not None:
            slot.tally.add(Tally.between(before, status))

    def _add_trigger(self, status: TriggerStatus, at_s: float) -> None:
        before, taken = self._follow(self._triggers, status, at_s)
        if taken and before is not None:
            self._slot(at_s).decisions.update(growth(status.decisions, before.decisions))

    def _follow(self, known: dict[str, _Last[S]], status: S, at_s: float) -> tuple[S | None, bool]:
        """The status to count from, if there is one, and whether this one counts."""
        last = known.get(status.name)
        known_state = last is not None and (last.status.incarnation, last.status.state) == (
            status.incarnation,
            status.state,
        )
        if last is not None and known_state and 0 <= at_s - last.at_s < LEAST_S:
            return None, False
        if last is None and len(known) >= self._most:
            del known[min(known, key=lambda name: known[name].at_s)]
        known[status.name] = _Last(at_s, status)
        same = last is not None and last.status.incarnation == status.incarnation and at_s - last.at_s <= MOST_S
        return (last.status if same and last is not None else None), True

    def _slot(self, at_s: float) -> Slot:
        number = self._number(min(at_s, self._wall()))
        if number not in self._slots:
            oldest = self._number(self._wall()) - SLOTS
            self._slots = {each: slot for each, slot in self._slots.items() if each > oldest}
            self._slots[number] = Slot()
        return self._slots[number]

    @staticmethod
    def _number(at_s: float) -> int:
        return int(at_s // SLOT_S)
