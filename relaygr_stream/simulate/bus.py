"""How long messages take on the bus: a log-normal latency per message, and order within a lane."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from relaygr_stream.errors import ConfigError

#: The 99 % quantile of the standard normal distribution.
Z99: Final = 2.3263478740408408


@dataclass(frozen=True)
class BusLatency:
    """Produce to consume, in milliseconds. Defaults as measured on Apache Kafka with 4 KB messages (DESIGN §5)."""

    p50_ms: float = 1.0
    p99_ms: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.p50_ms <= self.p99_ms < math.inf:
            raise ConfigError(f"bus latency: needs 0 ≤ p50 ≤ p99, got {self.p50_ms:g} and {self.p99_ms:g} ms")


class Bus:
    """Draws latencies, in seconds."""

    BLOCK = 4096

    def __init__(self, latency: BusLatency, rng: np.random.Generator) -> None:
        self._median_s = latency.p50_ms / 1e3
        self._sigma = math.log(latency.p99_ms / latency.p50_ms) / Z99 if latency.p50_ms else 0.0
        self._rng = rng
        self._drawn: list[float] = []

    def draw(self) -> float:
        """One message's way."""
        if not self._drawn:
            self._drawn = (self._median_s * np.exp(self._sigma * self._rng.standard_normal(self.BLOCK))).tolist()
        return self._drawn.pop()


class Log:
    """One partition: what is sent later arrives later."""

    __slots__ = ("_bus", "_last")

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._last = 0.0

    def arrival(self, sent: float) -> float:
        """When a message sent now is read."""
        self._last = max(self._last, sent + self._bus.draw())
        return self._last
