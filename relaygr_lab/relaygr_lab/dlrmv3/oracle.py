"""What the run's costs allow: how much less device time a request takes with prefix KV, and an oracle queue's rate.

The queue is that of bench/oracle.py with this workload's requests, LoadGen's own schedule and head starts, and
LoadGen's own criterion; one device, no bus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr_lab.bench.modes import FULL, RELAY
from relaygr_lab.bench.oracle import first_come, relayed
from relaygr_lab.bench.search import bisected
from relaygr_lab.dlrmv3.loadgen import Load, allowed_late
from relaygr_lab.dlrmv3.workload import Visit
from relaygr_stream.wire.messages import CostModel

Floats = npt.NDArray[np.float64]
HALVINGS: Final = 10


@dataclass(frozen=True)
class Work:
    """Device milliseconds of each request: its whole prefix, what of it is new, and its candidates."""

    prefix: Floats
    new: Floats
    hit: Floats

    @classmethod
    def of(cls, costs: CostModel, visits: Sequence[Visit], candidates: int) -> Work:
        """By fitted costs; a first visit's prefix is all new."""
        n, more = (np.array([getattr(one, name) for one in visits], float) for name in ("length", "new"))
        prefix = costs.c1 * n + costs.c2 * n * n
        new = costs.c1 * more + costs.c2 * (2 * n - more) * more
        return cls(prefix, new, costs.c0 + (costs.c3 * n + costs.c4) * candidates)

    @property
    def full_ms(self) -> float:
        """Mean of full inference."""
        return float((self.prefix + self.hit).mean())

    @property
    def reused_ms(self) -> float:
        """Mean with prefix KV of earlier visits."""
        return float((self.new + self.hit).mean())

    @property
    def quotient(self) -> float:
        """How much less device time a request takes with prefix KV of earlier visits."""
        return self.full_ms / self.reused_ms

    def of_mode(self, mode: str) -> Floats:
        """Device time of each request in a mode."""
        return (self.prefix if mode == FULL.name else self.new) + self.hit

    def slower(self, times: float) -> Work:
        """The same requests where everything takes so many times as long."""
        return Work(times * self.prefix, times * self.new, times * self.hit)

    def largest_rate(self, mode: str, test: Load, heads_s: Floats) -> float:
        """The largest rate (queries/s) that LoadGen would call VALID; 0 if none is. test: its rate does not matter."""
        at_one = Load(1.0, test.queries, test.slo_ms, test.seed).schedule() * 1e3
        count = test.queries
        prefix, hit = (self.prefix if mode == FULL.name else self.new)[:count], self.hit[:count]
        capacity = 1e3 / float((prefix + hit).mean())
        late = allowed_late(count)

        def valid(busy: float) -> bool:
            ranked = at_one / (busy * capacity)
            if mode == RELAY.name:
                latency = relayed(np.maximum(0.0, ranked - heads_s[:count] * 1e3), ranked, prefix, hit, 1)
            else:
                latency = first_come(ranked, prefix + hit, 1)
            return int((latency > test.slo_ms).sum()) <= late

        return capacity * bisected(valid, 0.0, 1.0, HALVINGS)
