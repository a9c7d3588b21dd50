"""A run's first requests: workers fit their costs from them, and they show the length at which full inference works."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final, cast

import numpy as np

from relaygr_stream.client import RelayClient
from relaygr_stream.client.answers import Ranking
from relaygr_stream.lab.bench.capacity import longest_full
from relaygr_stream.lab.bench.cells import LEAST_LENGTH, LENGTH_STEP, World
from relaygr_stream.lab.bench.modes import FULL, RELAY
from relaygr_stream.lab.bench.populations import FILL_TIMEOUT_S, Population
from relaygr_stream.lab.workload.driver import Result, drive

REQUESTS: Final = 20  # of each kind
#: The first requests are left out: they are slower, until buffers and caches are warm.
COLD: Final = 5
SLOW: Final = 0.9  # quantile of the others
#: Full inference just works at the length at which a slow one takes this share of the SLO: a request may then wait for
#: one other (0.8 in all, which leaves a fifth of the SLO for the bus and the rest), but not for two (1.2).
FULL_SHARE: Final = 0.4


async def warm_up(client: RelayClient, population: Population, rate: float, tell: Callable[[str], object]) -> float:
    """Send some requests with full inference and some with the relay.

    Returns the device milliseconds of a slow full inference; infinite if too many had no answer. tell(line): shows
    progress.
    """
    full_ms: list[float] = []
    for mode in (FULL, RELAY):
        tell(f"warming up: {mode.words} …")
        await drive(
            client,
            population.take(rate, count=REQUESTS),
            mode=mode.request,
            announce=mode.announce,
            timeout=FILL_TIMEOUT_S,
            on_result=partial(_note, full_ms) if mode is FULL else None,
        )
    return float(np.quantile(full_ms[COLD:], SLOW, method="nearest"))


def longest_working(world: World, slow_ms: float | None = None, length: int = 0) -> int:
    """The longest prefix, in whole steps, with which full inference just works.

    By the fitted costs; with slow_ms, scaled by the ratio of slow_ms to the predicted time at `length`.
    """
    slower = 1.0 if slow_ms is None else max(1.0, slow_ms / world.cost(length, 0.0).full)
    fitting = longest_full(world.costs, world.traffic(1, 0.0), FULL_SHARE * world.slo_ms / slower, world.longest)
    return max(LEAST_LENGTH, int(fitting) // LENGTH_STEP * LENGTH_STEP)


def _note(full_ms: list[float], result: Result) -> None:
    full_ms.append(math.inf if result.ranking is None else cast(Ranking, result.ranking).timings.device_ms)
