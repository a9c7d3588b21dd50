"""What extending and scoring cost on this device, learnt from what they took.

extend(k tokens behind p) = e0 + e1·k + e2·k·(p + k/2): linear layers, and attention over what lies before.
score(m rows over n tokens) = s0 + s1·m + s2·m·n. Both are fitted by recursive least squares that forgets.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr_stream.messages import CostModel

#: Weight of a sample after each further one: 0.99 keeps about the last hundred, some seconds of traffic.
FORGETTING: Final = 0.99
#: Samples this many times over their prediction are interruptions by other processes, not the cost of the work.
OUTLIER: Final = 2.0
#: Tokens are counted in thousands inside the fit, so that its matrices stay well-conditioned.
SCALE: Final = 1 / 1024
MIN_CHUNK: Final = 32  # below this, launch overhead outweighs the work on every device we measured
MAX_CHUNK: Final = 4096


class LeastSquares:
    """Recursive least squares with forgetting over three features; coefficients never negative."""

    def __init__(self, prior: tuple[float, float, float]) -> None:
        self._theta: npt.NDArray[np.float64] = np.array(prior, np.float64)
        self._p: npt.NDArray[np.float64] = np.eye(3) * 1e4
        self.samples = 0

    def predict(self, features: npt.NDArray[np.float64]) -> float:
        """The fitted value."""
        return float(np.maximum(self._theta, 0.0) @ features)

    def add(self, features: npt.NDArray[np.float64], value: float) -> None:
        """Learn from one measurement."""
        if self.samples > 16:
            value = min(value, OUTLIER * max(self.predict(features), 1e-3))
        gain = self._p @ features
        gain /= FORGETTING + float(features @ gain)
        self._theta += gain * (value - float(self._theta @ features))
        self._p = (self._p - np.outer(gain, features @ self._p)) / FORGETTING
        # Forgetting without excitation inflates the covariance without bound; keep it where it started.
        trace = float(np.trace(self._p))
        if trace > 3e4:
            self._p *= 3e4 / trace
        self.samples += 1

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Non-negative."""
        a, b, c = np.maximum(self._theta, 0.0)
        return float(a), float(b), float(c)


class Costs:
    """Measured costs of one worker, in milliseconds."""

    def __init__(self) -> None:
        self._extend = LeastSquares((0.1, 1.0, 1.0))
        self._score = LeastSquares((0.1, 1.0, 1.0))
        self._rows = 64.0  # running mean of m, to fold s1·m into the constant that triggers use

    def extended(self, position: int, tokens: int, ms: float) -> None:
        """One extend took so long."""
        self._extend.add(_extend_features(position, tokens), ms)

    def scored(self, prefix: int, rows: int, ms: float) -> None:
        """One ranking, scored alone, took so long."""
        self._score.add(_score_features(prefix, rows), ms)
        self._rows += 0.02 * (rows - self._rows)

    def extend_ms(self, position: int, tokens: int) -> float:
        """Predicted time of an extend."""
        return self._extend.predict(_extend_features(position, tokens))

    def prefix_ms(self, tokens: int) -> float:
        """Predicted time of a whole prefix."""
        return self.extend_ms(0, tokens)

    def score_ms(self, prefix: int, rows: int) -> float:
        """Predicted time of scoring one ranking of `rows` suffix and candidate tokens."""
        return self._score.predict(_score_features(prefix, rows))

    def chunk(self, position: int, budget_ms: float) -> int:
        """Most tokens that extend in budget_ms behind `position`, at least MIN_CHUNK: the root of the cost above."""
        e0, e1, e2 = self._extend.coefficients
        linear = (e1 + e2 * position * SCALE) * SCALE
        quadratic = e2 * SCALE * SCALE / 2
        room = budget_ms - e0
        if room <= 0:
            return MIN_CHUNK
        # The root in the form that neither cancels nor divides by a coefficient that may be next to nothing.
        slope = linear + math.sqrt(linear * linear + 4 * quadratic * room)
        tokens = min(MAX_CHUNK, 2 * room / slope) if slope > 0 else MAX_CHUNK
        return max(MIN_CHUNK, int(tokens) // MIN_CHUNK * MIN_CHUNK)

    def model(self) -> CostModel:
        """As triggers read it: T_full(n, m) = c0 + c1·n + c2·n² + c3·n·m."""
        e0, e1, e2 = self._extend.coefficients
        s0, s1, s2 = self._score.coefficients
        return CostModel(
            c0=e0 + s0 + s1 * SCALE * self._rows,
            c1=e1 * SCALE,
            c2=e2 * SCALE * SCALE / 2,
            c3=s2 * SCALE * SCALE,
        )


def _extend_features(position: int, tokens: int) -> npt.NDArray[np.float64]:
    k = tokens * SCALE
    return np.array((1.0, k, k * (position * SCALE + k / 2)))


def _score_features(prefix: int, rows: int) -> npt.NDArray[np.float64]:
    m = rows * SCALE
    return np.array((1.0, m, m * prefix * SCALE))
