"""Upper bounds on rate and length, computed from the costs that the workers fitted; no measured value may exceed them.

Device time of a request: a first visit costs the prefix, a return costs the prefill of its new behaviours, and every
ranking costs the hit (suffix and candidates against the prefix KV). Full inference costs prefix plus hit each time.
Reloads from DRAM run beside the device and count as free, which only loosens the bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr_lab.bench.modes import Mode
from relaygr_lab.bench.search import bisected
from relaygr_lab.bench.statistics import QUANTILE
from relaygr_stream.wire.messages import CostModel
from relaygr_stream.workload.quantiles import nearest_rank
from relaygr_stream.workload.traffic import Spread

#: Requests of a simulated queue, of which 200 are beyond the 99th percentile.
SIMULATED: Final = 20_000
#: Lower bound of a guess where a search starts, as a share of the devices' capacity: a probe at a low rate takes long.
#: The search can still go below it.
LEAST_BUSY: Final = 0.15


@dataclass(frozen=True)
class Traffic:
    """Requests with `length` prefix tokens; a share `revisit` is by returning users with `growth` new behaviours."""

    length: float
    revisit: float
    growth: float
    candidates: int  # and suffix behaviours
    delay_ms: float  # between announcement and ranking, median
    spread: Spread | None = None  # of lengths whose median `length` is; None: all the same

    def powers(self) -> tuple[float, float]:
        """The means of the length and of its square."""
        return (self.length, self.length**2) if self.spread is None else self.spread.powers(self.length)


@dataclass(frozen=True)
class RequestCost:
    """A request's parts, in device milliseconds."""

    prefix: float
    extension: float  # of a return's new behaviours
    hit: float
    operation: float = 0.0  # fixed cost of an operation; fitted only for full inference, so not part of a bound

    @property
    def full(self) -> float:
        """Prefix and suffix together."""
        return self.prefix + self.hit

    @classmethod
    def of(cls, costs: CostModel, traffic: Traffic) -> RequestCost:
        """From the fitted T_full = c0 + c1·n + c2·n² + c3·n·m + c4·m: c1 and c2 are the prefix, the others the hit."""
        n, square = traffic.powers()
        prefix = costs.c1 * n + costs.c2 * square
        more = min(n, traffic.growth)
        return cls(
            prefix=prefix,
            extension=costs.c1 * more + costs.c2 * (2 * n - more) * more,
            hit=costs.c0 + (costs.c3 * n + costs.c4) * traffic.candidates,
            operation=costs.c0,
        )


def device_ms(mode: Mode, cost: RequestCost, revisit: float) -> float:
    """Mean device time of a request, in milliseconds, if every return finds its prefix KV."""
    reuse = revisit if mode.keeps else 0.0
    return (1 - reuse) * cost.prefix + reuse * cost.extension + cost.hit


def most_rate(mode: Mode, cost: RequestCost, revisit: float, workers: int) -> float:
    """Requests per second that keep the devices fully busy."""
    return 1e3 * workers / device_ms(mode, cost, revisit)


def most_length(
    mode: Mode, costs: CostModel, traffic: Traffic, rate: float, workers: int, slo_ms: float, longest: int
) -> float:
    """The longest prefix with which the devices keep up and a first visit can be ready in time."""

    def fits(length: float) -> bool:
        cost = RequestCost.of(costs, replace(traffic, length=length))
        slack = slack_ms(mode, traffic, slo_ms)
        first = revisit_matters(mode, traffic.revisit)
        alone = RequestCost.of(costs, replace(traffic, length=length, spread=None)).full
        return rate <= most_rate(mode, cost, traffic.revisit, workers) and (not first or alone <= slack)

    return float(longest) if fits(longest) else bisected(fits, 0.0, longest, 40)


def revisit_matters(mode: Mode, revisit: float) -> bool:
    """Whether first visits are frequent enough to be among the slowest 1 %."""
    return not mode.keeps or 1 - revisit > 1 - QUANTILE


def slack_ms(mode: Mode, traffic: Traffic, slo_ms: float) -> float:
    """Milliseconds from the earliest start of a request's work to the deadline of its scores."""
    return slo_ms + (traffic.delay_ms if mode.announce else 0.0)


def predicted_rate(
    mode: Mode,
    cost: RequestCost,
    traffic: Traffic,
    slo_ms: float,
    bus_ms: float,
    workers: int,
    least_busy: float = LEAST_BUSY,
) -> float:
    """An estimate of the largest rate whose P99 is within the SLO, from a simulated queue (Lindley's recursion).

    Arrivals are Poisson, and each worker serves its share first come, first served. It is a start for a search, not a
    bound: the bus's time is assumed, and pre-inference is not really served in this order. least_busy: lower bound of
    the estimate, as a share of the devices' capacity.
    """
    rng = np.random.default_rng(0)  # the same arrivals for every rate, so that the estimate is monotone in it
    gaps = rng.exponential(size=SIMULATED)
    returns = rng.random(SIMULATED) < (traffic.revisit if mode.keeps else 0.0)
    service = np.where(returns, cost.operation + cost.extension, cost.prefix) + cost.hit
    slack = slack_ms(mode, traffic, slo_ms) - bus_ms

    def in_time(busy: float) -> bool:
        return nearest_rank(waits_of(gaps * service.mean() / busy, service) + service, QUANTILE) <= slack

    busy = bisected(in_time, 0.0, 1.0, 20)  # share of the device's time
    return max(least_busy, busy) * 1e3 * workers / float(service.mean())


def waits_of(gaps: npt.NDArray[np.float64], service: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Waiting times of one server, W[n+1] = max(0, W[n] + S[n] - A[n+1]): a random walk less its running minimum."""
    walk = np.concatenate([[0.0], np.cumsum(service[:-1] - gaps[1:])])
    return walk - np.minimum.accumulate(walk)


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
    """An estimate of the largest length at a given rate: where `predicted_rate` falls below the rate."""

    def enough(length: float) -> bool:
        shaped = replace(traffic, length=length)
        return predicted_rate(mode, RequestCost.of(costs, shaped), shaped, slo_ms, bus_ms, workers) >= rate

    return bisected(enough, 1.0, longest, 12)
