"""What the device allows, by arithmetic on the costs that the workers fitted: nothing measured may exceed it.

A request's device time: a first visit costs the prefix, a return costs the extension by its new behaviours, and every
ranking costs the hit (suffix and candidates against the prefix KV); full inference is prefix plus hit, each time. Reloads
from DRAM run beside the device and are counted as free, which only loosens the bounds. Knows nothing of probes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from relaygr_stream.bench.modes import Mode
from relaygr_stream.bench.statistics import QUANTILE
from relaygr_stream.messages import CostModel


@dataclass(frozen=True)
class Traffic:
    """What is asked: `length` prefix tokens, `revisit` share of returns that bring `growth` new behaviours each."""

    length: float
    revisit: float
    growth: float
    candidates: int
    delay_ms: float  # between announcement and ranking, median


@dataclass(frozen=True)
class RequestCost:
    """Device milliseconds."""

    prefix: float
    extension: float
    hit: float

    @property
    def full(self) -> float:
        """Prefix and suffix together."""
        return self.prefix + self.hit

    @classmethod
    def of(cls, costs: CostModel, traffic: Traffic) -> RequestCost:
        """By the fitted polynomial T_full = c0 + c1·n + c2·n² + c3·n·m; its constant counts with the hit."""
        n, old = traffic.length, max(0.0, traffic.length - traffic.growth)
        prefix = costs.c1 * n + costs.c2 * n * n
        return cls(
            prefix=prefix,
            extension=prefix - (costs.c1 * old + costs.c2 * old * old),
            hit=costs.c0 + costs.c3 * n * traffic.candidates,
        )


def device_ms(mode: Mode, cost: RequestCost, revisit: float) -> float:
    """Mean device time of a request, if every return finds its prefix KV."""
    reuse = revisit if mode.keeps else 0.0
    return (1 - reuse) * cost.prefix + reuse * cost.extension + cost.hit


def most_rate(mode: Mode, cost: RequestCost, revisit: float, workers: int) -> float:
    """Requests per second at which the devices are busy all the time."""
    return 1e3 * workers / device_ms(mode, cost, revisit)


def most_length(
    mode: Mode, costs: CostModel, traffic: Traffic, rate: float, workers: int, slo_ms: float, longest: int
) -> float:
    """The longest prefix with which devices keep up and a first visit can be ready in time."""

    def fits(length: float) -> bool:
        cost = RequestCost.of(costs, _with_length(traffic, length))
        slack = slack_ms(mode, traffic, slo_ms)
        first = revisit_matters(mode, traffic.revisit)
        return rate <= most_rate(mode, cost, traffic.revisit, workers) and (not first or cost.full <= slack)

    low, high = 0.0, float(longest)
    if fits(high):
        return high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def revisit_matters(mode: Mode, revisit: float) -> bool:
    """Whether first visits are among the slowest 1 % at all."""
    return not mode.keeps or 1 - revisit > 1 - QUANTILE


def slack_ms(mode: Mode, traffic: Traffic, slo_ms: float) -> float:
    """Time from when a request's work may begin to when its scores are due."""
    return slo_ms + (traffic.delay_ms if mode.announce else 0.0)


def predicted_rate(
    mode: Mode, cost: RequestCost, traffic: Traffic, slo_ms: float, bus_ms: float, workers: int
) -> float:
    """A guess at the largest rate whose P99 is within the SLO: an M/G/1 queue on each worker.

    Waits W with P(W > x) ≈ ρ·exp(-ρ·x / E[W]), E[W] = λ·E[S²] / 2(1 - ρ) (Pollaczek and Khinchine): the slowest
    requests have their slack less their own service to wait. A place to start a search, not a bound.
    """
    reuse = traffic.revisit if mode.keeps else 0.0
    parts = ((1 - reuse, cost.full), (reuse, cost.extension + cost.hit))
    mean = sum(share * ms for share, ms in parts)
    square = sum(share * ms * ms for share, ms in parts)
    slack = slack_ms(mode, traffic, slo_ms) - bus_ms - (cost.full if reuse < QUANTILE else cost.extension + cost.hit)
    if slack <= 0:
        return 0.05 * 1e3 * workers / mean
    low, high = 0.0, 1.0  # utilisation
    for _ in range(40):
        rho = (low + high) / 2
        wait = rho / mean * square / (2 * (1 - rho))
        late = rho * math.exp(-rho * slack / wait)
        low, high = (rho, high) if late <= 1 - QUANTILE else (low, rho)
    return max(0.05, low) * 1e3 * workers / mean


def predicted_length(
    mode: Mode,
    costs: CostModel,
    traffic: Traffic,
    rate: float,
    slo_ms: float,
    bus_ms: float,
    workers: int,
    longest: int,
) -> float:
    """A guess at the largest length at a given rate: where `predicted_rate` falls below it."""
    low, high = 1.0, float(longest)
    for _ in range(30):
        length = (low + high) / 2
        shaped = _with_length(traffic, length)
        cost = RequestCost.of(costs, shaped)
        hopeless = slack_ms(mode, traffic, slo_ms) - bus_ms <= cost.full
        enough = predicted_rate(mode, cost, shaped, slo_ms, bus_ms, workers) >= rate
        low, high = (length, high) if enough and not hopeless else (low, length)
    return low


def _with_length(traffic: Traffic, length: float) -> Traffic:
    return Traffic(length, traffic.revisit, traffic.growth, traffic.candidates, traffic.delay_ms)
