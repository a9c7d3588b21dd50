"""Latencies of messages on the bus: log-normal, correlated in time, and in order.

A process reads all its lanes in one loop, so a late message delays those after it: messages arrive in bursts, as from a
broker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from relaygr_lab.simulate.noise import Lasting
from relaygr_stream.errors import ConfigError

#: The 99 % quantile of the standard normal distribution.
Z99: Final = 2.3263478740408408
#: On two cores during a bench, the ranks of two messages' latencies correlate by 0.4 to 0.6 up to 10 ms apart, by 0.1
#: to 0.4 up to 30 ms, and not beyond.
LASTING_MS: Final = 10.0


@dataclass(frozen=True)
class BusLatency:
    """Latency from produce to consume, in milliseconds. Defaults are measured on Apache Kafka with 4 KB messages.

    lasting_ms: the logarithms of two messages' latencies this far apart correlate by 1/e.
    """

    p50_ms: float = 1.0
    p99_ms: float = 5.0
    lasting_ms: float = LASTING_MS

    def __post_init__(self) -> None:
        if not 0 <= self.p50_ms <= self.p99_ms < math.inf:
            raise ConfigError(f"bus latency: needs 0 ≤ p50 ≤ p99, got {self.p50_ms:g} and {self.p99_ms:g} ms")
        if not 0 <= self.lasting_ms < math.inf:
            raise ConfigError(f"bus latency: lasts {self.lasting_ms:g} ms; must be at least 0")


class Way:
    """A path from one process to another, which reads in the order of sending.

    lasting: the noise; paths that share one are slow at the same time.
    """

    __slots__ = ("_last", "_lasting", "_median_s", "_sigma")

    def __init__(self, latency: BusLatency, lasting: Lasting) -> None:
        self._median_s = latency.p50_ms / 1e3
        self._sigma = math.log(latency.p99_ms / latency.p50_ms) / Z99 if latency.p50_ms else 0.0
        self._lasting = lasting
        self._last = 0.0

    def arrival(self, sent: float) -> float:
        """The time at which a message sent at `sent` is read."""
        self._last = max(self._last, sent + self._median_s * math.exp(self._sigma * self._lasting.at(sent)))
        return self._last


class Paths:
    """Paths to and from one worker. They share their noise: they have the worker's loop, host and broker in common."""

    def __init__(self, bus: BusLatency, answers: BusLatency, rng: np.random.Generator) -> None:
        around = Lasting(bus.lasting_ms / 1e3, rng)
        self.to_worker = Way(bus, around)
        self.to_client = Way(answers, around)
        self.to_trigger = Way(bus, Lasting(bus.lasting_ms / 1e3, rng))
