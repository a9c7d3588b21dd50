"""MLCommons' LoadGen, Server scenario: the module, its schedule, and its criterion."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from relaygr_lab.bench.statistics import QUANTILE, binomial_at_most
from relaygr_stream.errors import ConfigError

INSTALL: Final = (
    "mlcommons-loadgen is missing; `pip install mlcommons-loadgen` (or relaygr-lab with its extra `loadgen`)"
)
CONFIDENCE: Final = 0.99
#: The fewest queries that LoadGen calls VALID, none of them late.
FEWEST: Final = 459
THREAD: Final = "loadgen"


def loadgen() -> Any:
    """The module. Raises ConfigError where it is not installed."""
    try:
        import mlperf_loadgen  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(INSTALL) from error
    return mlperf_loadgen


def leave(code: int) -> None:
    """End the process at once if LoadGen has not ended: it cannot be told to, and does not survive an orderly exit."""
    if any(thread.name == THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass(frozen=True)
class Load:
    """One run of LoadGen: `queries` queries at `qps` a second, P99 within slo_ms."""

    qps: float
    queries: int
    slo_ms: float
    seed: int

    def schedule(self) -> npt.NDArray[np.float64]:
        """Seconds from the first query to each: exponential gaps from std::mt19937 as libstdc++ draws them, two numbers
        of 32 bits each."""
        generator = np.random.MT19937()
        generator._legacy_seeding(self.seed)
        drawn = generator.random_raw(2 * self.queries).astype(np.float64).reshape(-1, 2)
        gaps = -np.log1p(-(drawn[:, 0] + drawn[:, 1] * 2.0**32) / 2.0**64) / self.qps
        return np.concatenate([[0.0], np.cumsum(gaps[:-1])])


def allowed_late(queries: int) -> int:
    """The most late queries with which LoadGen calls so many VALID; -1: too few queries.

    Its early stopping asks for 99 % confidence that at most 1 % are late: 459 queries if none is, 662 if one is.
    """
    late = -1
    while late < queries and binomial_at_most(late + 1, queries, 1 - QUANTILE) <= 1 - CONFIDENCE:
        late += 1
    return late
