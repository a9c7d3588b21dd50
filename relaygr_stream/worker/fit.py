"""A cost in milliseconds as a sum of three features, learnt from single measurements as they come.

Recursive least squares that forgets, of *relative* errors: a prediction 10 % off is as bad for 2 ms as for 200. Two
things that happen on real machines are guarded against:
- interruptions make single measurements many times too long: no measurement moves the fit further than OUTLIER times
  the usual deviation would;
- clocks, threads and neighbours change the device's speed for good: when the median of the last LEVEL_SAMPLES
  measurements is off by more than LEVEL_SHIFT, all coefficients are scaled by it at once.

Knows nothing of what is measured.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

Features = npt.NDArray[np.float64]

#: Weight of a sample after each further one: 0.99 keeps about the last hundred, some seconds of traffic.
FORGETTING: Final = 0.99
#: Residuals are cut at this many median deviations: below 2, 15 % of samples made 2–10 times too long shift predictions
#: by 2 %, at 3 by 5 % (benchmarks/trigger.py's measurements).
OUTLIER: Final = 1.5
#: The fit is free to go anywhere for so many samples; then residuals are cut.
FREE_SAMPLES: Final = 16
#: Odd, so that the median is a sample. Seven of fifteen may be interruptions; a shift is followed within sixteen.
LEVEL_SAMPLES: Final = 15
#: Twice what medians of fifteen wander with the 10 % deviation that was measured.
LEVEL_SHIFT: Final = 1.25
#: How fast the median deviation is followed (share of a step per sample), and the least it is taken for.
DEVIATION_STEP: Final = 0.05
LEAST_DEVIATION: Final = 0.02
FIRST_DEVIATION: Final = 0.3
#: Uncertainty at the start, per coefficient; and the most that forgetting without excitation may inflate their sum to.
FIRST_VARIANCE: Final = 1e4
MOST_VARIANCE: Final = 3e4
#: Shorter than any operation of any device; below it, relative errors mean nothing.
LEAST_MS: Final = 1e-3


class OnlineFit:
    """θ·features = milliseconds, θ ≥ 0. prior: θ before any sample."""

    def __init__(self, prior: tuple[float, float, float]) -> None:
        self._theta: Features = np.array(prior, np.float64)
        self._variance: Features = np.eye(3) * FIRST_VARIANCE
        self._deviation = FIRST_DEVIATION
        self._ratios: deque[float] = deque(maxlen=LEVEL_SAMPLES)
        self.samples = 0

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Not negative."""
        a, b, c = self._theta
        return float(a), float(b), float(c)

    def predict(self, features: Features) -> float:
        """The fitted value."""
        return float(self._theta @ features)

    def add(self, features: Features, value: float) -> None:
        """Learn from one measurement."""
        value = max(value, LEAST_MS)
        settled = self.samples >= FREE_SAMPLES
        self.samples += 1
        if settled:
            self._follow_level(value / max(self.predict(features), LEAST_MS))
        predicted = max(self.predict(features), LEAST_MS)
        unit = predicted if settled else value  # what errors are relative to
        scaled = features / unit
        error = value / unit - float(self._theta @ scaled)
        if settled:
            limit = OUTLIER * self._deviation
            self._deviation = max(
                LEAST_DEVIATION, self._deviation * math.exp(math.copysign(DEVIATION_STEP, abs(error) - self._deviation))
            )
            error = min(max(error, -limit), limit)
        gain = self._variance @ scaled
        gain /= FORGETTING + float(scaled @ gain)
        theta = self._theta + gain * error
        self._variance = (self._variance - np.outer(gain, scaled @ self._variance)) / FORGETTING
        # Forgetting without excitation inflates the variance without bound; keep it where it started.
        trace = float(np.trace(self._variance))
        if trace > MOST_VARIANCE:
            self._variance *= MOST_VARIANCE / trace
        self._theta = _not_negative(theta, self._variance)  # one assignment: another thread may be reading

    def _follow_level(self, ratio: float) -> None:
        """The device became faster or slower for good: everything costs so much more or less."""
        self._ratios.append(ratio)
        if len(self._ratios) < LEVEL_SAMPLES:
            return
        median = sorted(self._ratios)[LEVEL_SAMPLES // 2]
        if not 1 / LEVEL_SHIFT <= median <= LEVEL_SHIFT:
            self._theta = self._theta * median
            self._ratios.clear()


def _not_negative(theta: Features, variance: Features) -> Features:
    """The best fit without the coefficients that came out negative: the others take over what those explained."""
    for index in range(len(theta)):
        if theta[index] < 0 and variance[index, index] > 0:
            theta = theta - variance[:, index] * (theta[index] / variance[index, index])
    return np.maximum(theta, 0.0)
