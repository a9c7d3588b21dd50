"""A run's first requests: workers fit their costs from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from relaygr_stream.client import RelayClient
from relaygr_stream.lab.bench.modes import FULL, RELAY
from relaygr_stream.lab.bench.populations import FILL_TIMEOUT_S, Population
from relaygr_stream.lab.workload.driver import drive

REQUESTS: Final = 20  # of each kind


async def warm_up(client: RelayClient, population: Population, rate: float, tell: Callable[[str], object]) -> None:
    """Send some requests with full inference and some with the relay. tell(line): shows progress."""
    for mode in (FULL, RELAY):
        tell(f"warming up: {mode.words} …")
        await drive(
            client,
            population.take(rate, count=REQUESTS),
            mode=mode.request,
            announce=mode.announce,
            timeout=FILL_TIMEOUT_S,
        )
