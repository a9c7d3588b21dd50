"""A hot lane and an overload of all, on real workers (forwarding.py) and simulated, with and without forwarding.

The same arrivals and lanes; the simulated device takes what the real ones' sleeps took on average in the same run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import forwarding as real
import msgspec
import numpy as np
from forwarding_model import RANKING_MS, TOKEN_MS
from relaygr_lab.simulate.costs import KV, DeviceCosts
from relaygr_lab.simulate.fleet import Fleet
from relaygr_lab.simulate.scenario import Request, Scenario
from relaygr_lab.verdicts import above_0, some

from relaygr_stream.settings.schema import Kafka
from relaygr_stream.workload.traffic import Traffic
from relaygr_stream.workload.visits import Arrival

COSTS = DeviceCosts(
    source="forwarding_model.py", kv=KV(1, 1, 1, 1, "float32"), prefill_ms=(0.0, TOKEN_MS, 0.0),
    score_ms=(0.0, RANKING_MS / real.CANDIDATES, 0.0), reload_bytes_per_s=1e9, spill_bytes_per_s=1e9,
)  # fmt: skip


def simulated(forward: bool, seconds: float, stretch: float) -> tuple[list[Request], list[Request]]:
    """The requests of both loads, one after the other on one fleet, behind the warm-up. stretch: of the costs."""
    costs = msgspec.structs.replace(
        COSTS,
        prefill_ms=tuple(stretch * each for each in COSTS.prefill_ms),
        score_ms=tuple(stretch * each for each in COSTS.score_ms),
    )
    hot_at = real.WARM_S + real.TIMEOUT_S
    busy_at = hot_at + seconds + real.TIMEOUT_S + real.PAUSE_S
    settings = real.settings(Kafka(), forward)
    traffic = Traffic(
        rate=real.BUSY_RATE, revisit=0.0, length=real.TOKENS, max_prefix=256, suffix=0, candidates=real.CANDIDATES
    )
    scenario = Scenario(
        settings=settings, costs=costs, traffic=traffic, workers=len(real.WORKERS), sample=len(real.WORKERS),
        lanes_per_worker=real.LANES // len(real.WORKERS), warm_s=0.0, seconds=busy_at + seconds, mode="cache",
    )  # fmt: skip
    everywhere, first = list(range(real.LANES)), [0]
    phases = [
        (0.0, real.WARM_RATE, real.WARM_S, everywhere, 1),
        (hot_at, real.HOT_RATE, seconds, first, 2),
        (busy_at, real.BUSY_RATE, seconds, everywhere, 3),
    ]

    def arrivals() -> Iterator[Arrival]:
        for begin, rate, length, lanes, seed in phases:
            for number, (after, lane, _) in enumerate(real.arrivals(rate, length, lanes, seed)):
                at = begin + after
                yield Arrival(at, at, 10**6 * seed + number, 0, lane, real.TOKENS, False, False)

    fleet = Fleet(scenario, scenario.groups[0], requests=arrivals())
    fleet.run()
    hot = [one for one in fleet.requests if one.user // 10**6 == 2]
    return hot, [one for one in fleet.requests if one.user // 10**6 == 3]


def compare(seconds: float, within: float) -> list[str]:
    """Print both; returns the bounds not kept: of the share in time."""
    loads, _ = asyncio.run(real.both(seconds))
    broken = []
    print("\nload  fwd    in time: real  simulated   P50 ms: real  simulated")
    for forward, pair in loads.items():
        stretch = float(np.mean([np.mean(some(load.device_ms, "rankings in time")) for load in pair])) / real.SERVICE_MS
        for name, truth, found in zip(("hot", "busy"), pair, simulated(forward, seconds, stretch), strict=True):
            scored = [one.latency_s * 1e3 for one in found if one.status == "ok"]
            above_0(truth.share, f"{name}'s share in time of the real workers")
            share, p50, real_p50 = (
                len(scored) / len(found),
                np.median(some(scored, "scores")),
                np.median(truth.latencies),
            )
            state = "on" if forward else "off"
            print(f"{name:5} {state:4} {truth.share:15.1%} {share:10.1%} {real_p50:14.0f} {p50:10.0f}")
            # Not the median: of the rankings of a hot lane some wait and some are forwarded, and it may be either's.
            if not abs(share / truth.share - 1) <= within:
                broken.append(
                    f"{name}, forwarding {state}: in time off by {share / truth.share - 1:+.1%}; bound: ±{within:.0%}"
                )
    return broken
