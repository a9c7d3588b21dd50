"""Cells: the repeated search for the largest rate, or the largest length, of one mode at one revisit ratio.

A cell chooses the start of each search and the next value to probe; run.py probes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from relaygr_lab.bench.capacity import (
    RequestCost,
    Traffic,
    most_length,
    most_rate,
    predicted_length,
    predicted_rate,
)
from relaygr_lab.bench.modes import Mode
from relaygr_lab.bench.results import Probe
from relaygr_lab.bench.search import Search
from relaygr_stream.wire.messages import CostModel

#: First step of a search, a factor: estimates from fitted costs and a simulated queue are off by some tens of percent.
FIRST_STEP: Final = 1.4
#: Start of a search, as a share of the estimated rate: on a small machine, broker, trigger and client share the cores.
#: Starting below is better: after an overload, queues take longer to empty than a probe lasts.
GUESSED_SHARE: Final = 0.6
#: Upper limit of a search, as a factor on the device's bound: the fitted costs may be off.
HEADROOM: Final = 1.5
LEAST_RATE: Final = 0.5
LEAST_LENGTH: Final = 32
#: Lengths are tried in whole blocks of tokens.
LENGTH_STEP: Final = 32
#: Assumed time on the bus, for estimates: its target (judge.py).
BUS_MS: Final = 10.0


@dataclass(frozen=True)
class World:
    """The inputs of bounds and estimates."""

    costs: CostModel
    slo_ms: float
    workers: int
    longest: int  # tokens
    common: Traffic  # what requests of all lengths and revisit ratios have in common

    def traffic(self, length: float, revisit: float) -> Traffic:
        """Requests of this length."""
        return replace(self.common, length=length, revisit=revisit)

    def cost(self, length: float, revisit: float) -> RequestCost:
        """Device milliseconds of such a request."""
        return RequestCost.of(self.costs, self.traffic(length, revisit))


@dataclass(eq=False)
class Cell:
    """at: the length at which the rate is searched, or the rate at which the length is; None: not known yet."""

    kind: Literal["rate", "length"]
    mode: Mode
    revisit: float
    at: float | None
    tolerance: float
    start: float | None = None  # of the first search; None: by an estimate
    most: int = 12  # probes of a search
    most_rate: float = math.inf
    searches: list[Search] = field(default_factory=list)
    ats: list[float] = field(default_factory=list)  # of each search
    probes: list[Probe] = field(default_factory=list)

    def begin_search(self, worlds: Sequence[World], alike: float | None = None) -> None:
        """Begin another search at the last one's result, at `alike`, or at an estimate from the costs of `worlds`.

        Costs that were fitted at one length are inaccurate at another, so the estimate uses the median of `worlds`.
        """
        assert self.at is not None
        known = [search.passed for search in self.searches if search.passed is not None]
        low, high = self._limits(worlds[-1])
        guess, step = alike or self._guess(worlds), FIRST_STEP
        if known or self.start is not None:
            guess, step = known[-1] if known else self.start or 0.0, self.tolerance
            high = max(high, min(guess, self.most_rate))  # a given start is tried, whatever the costs say
        self.searches.append(
            Search(
                guess=guess,
                low=low,
                high=high,
                step=step,
                tolerance=self.tolerance,
                most=self.most,
                block=LENGTH_STEP if self.kind == "length" else 0,
            )
        )
        self.ats.append(self.at)

    def next(self) -> tuple[int, float] | None:
        """(length, rate) of the next probe of the current search; None when the search is complete."""
        assert self.at is not None
        value = self.searches[-1].next()
        if value is None:
            return None
        return (int(self.at), value) if self.kind == "rate" else (int(value), self.at)

    def record(self, probe: Probe) -> None:
        """Record the result of the last probe."""
        self.probes.append(probe)
        self.searches[-1].record(self.value(probe), probe.passed)

    def value(self, probe: Probe) -> float:
        """Its rate or length, whichever is searched."""
        return probe.rate if self.kind == "rate" else probe.length

    @property
    def given(self) -> list[float]:
        """The given length or rate of each search, or of the next one if there is none; empty: not known yet."""
        return self.ats or ([] if self.at is None else [self.at])

    @property
    def values(self) -> list[float]:
        """The largest passing value of each search that had a probe; 0 where none passed."""
        return [search.passed or 0.0 for search in self.searches if search.tried]

    @property
    def settled(self) -> bool:
        """Whether each search is; else `values` are lower bounds."""
        return bool(self.searches) and all(search.settled for search in self.searches)

    def bound(self, world: World, at: float | None = None) -> float:
        """The upper bound from the device's capacity. at: replaces the cell's own given value."""
        at = self.at if at is None else at
        assert at is not None
        if self.kind == "rate":
            return most_rate(self.mode, world.cost(at, self.revisit), self.revisit, world.workers)
        traffic = world.traffic(1, self.revisit)
        return most_length(self.mode, world.costs, traffic, at, world.workers, world.slo_ms, world.longest)

    def _limits(self, world: World) -> tuple[float, float]:
        if self.kind == "length":
            return LEAST_LENGTH, world.longest // LENGTH_STEP * LENGTH_STEP
        return LEAST_RATE, min(self.most_rate, max(2 * LEAST_RATE, HEADROOM * self.bound(world)))

    def queue(self, worlds: Sequence[World], at: float | None = None) -> float:
        """The largest value with which a simulated queue keeps the SLO, with the median costs of `worlds`.

        at: as in `bound`.
        """
        at = self.at if at is None else at
        assert at is not None
        world = sorted(worlds, key=lambda each: self.bound(each, at))[len(worlds) // 2]
        if self.kind == "rate":
            traffic, cost = world.traffic(at, self.revisit), world.cost(at, self.revisit)
            return predicted_rate(self.mode, cost, traffic, world.slo_ms, BUS_MS, world.workers)
        traffic = world.traffic(1, self.revisit)
        return predicted_length(self.mode, world.costs, traffic, at, world.slo_ms, BUS_MS, world.workers, world.longest)

    def _guess(self, worlds: Sequence[World]) -> float:
        return self.queue(worlds) * (GUESSED_SHARE if self.kind == "rate" else 1.0)
