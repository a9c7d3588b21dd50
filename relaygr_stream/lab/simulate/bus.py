"""How long messages take on the bus: log-normal latencies that last for a while, and order.

A process reads all its lanes in one loop, so what it reads late holds up what was sent after it: messages come in
bursts, as they do from a broker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from relaygr_stream.errors import ConfigError
from relaygr_stream.lab.simulate.noise import Lasting

#: The 99 % quantile of the standard normal distribution.
Z99: Final = 2.3263478740408408
#: Beside a bench on two cores the ranks of two messages' latencies had correlations of 0.4 to 0.6 up to 10 ms apart, of
#: 0.1 to 0.4 up to 30 ms, and of none beyond.
LASTING_MS: Final = 10.0


@dataclass(frozen=True)
class BusLatency:
    """Produce to consume, in milliseconds. Defaults as measured on Apache Kafka with 4 KB messages (DESIGN §5).

    lasting_ms: messages that far apart have latencies whose logarithms correlate by 1/e.
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
    """From one process to another, which reads in the order of sending. Ways with one `lasting` are slow together."""

    __slots__ = ("_last", "_lasting", "_median_s", "_sigma")

    def __init__(self, latency: BusLatency, lasting: Lasting) -> None:
        self._median_s = latency.p50_ms / 1e3
        self._sigma = math.log(latency.p99_ms / latency.p50_ms) / Z99 if latency.p50_ms else 0.0
        self._lasting = lasting
        self._last = 0.0

    def arrival(self, sent: float) -> float:
        """When a message sent now is read."""
        self._last = max(self._last, sent + self._median_s * math.exp(self._sigma * self._lasting.at(sent)))
        return self._last
