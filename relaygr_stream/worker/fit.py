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

#: Three of them: numpy takes longer to be called than a few dozen multiplications take.
Features = tuple[float, float, float]

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
RISE: Final = math.exp(DEVIATION_STEP)
FALL: Final = math.exp(-DEVIATION_STEP)
LEAST_DEVIATION: Final = 0.02
FIRST_DEVIATION: Final = 0.3
#: Uncertainty at the start, per coefficient; and the most that forgetting without excitation may inflate their sum to.
FIRST_VARIANCE: Final = 1e4
MOST_VARIANCE: Final = 3e4
#: Shorter than any operation of any device; below it, relative errors mean nothing.
LEAST_MS: Final = 1e-3


class OnlineFit:
    """θ·features = milliseconds, θ ≥ 0. prior: θ before any sample."""

    def __init__(self, prior: Features) -> None:
        self._theta = prior
        #: Of θ, the upper triangle row by row.
        self._variance = (FIRST_VARIANCE, 0.0, 0.0, FIRST_VARIANCE, 0.0, FIRST_VARIANCE)
        self._deviation = FIRST_DEVIATION
        self._ratios: deque[float] = deque(maxlen=LEVEL_SAMPLES)
        self.samples = 0

    @property
    def coefficients(self) -> Features:
        """θ: none is negative."""
        return self._theta

    def predict(self, features: Features) -> float:
        """The fitted value."""
        a, b, c = self._theta
        x, y, z = features
        return a * x + b * y + c * z

    def add(self, features: Features, value: float) -> None:
        """Learn from one measurement."""
        value = max(value, LEAST_MS)
        settled = self.samples >= FREE_SAMPLES
        self.samples += 1
        unit = value  # what errors are relative to
        if settled:
            unit = max(self.predict(features), LEAST_MS)
            if self._level_changed(value / unit):
                unit = max(self.predict(features), LEAST_MS)
        x, y, z = features
        x, y, z = x / unit, y / unit, z / unit
        a, b, c = self._theta
        error = value / unit - (a * x + b * y + c * z)
        if settled:
            deviation = self._deviation
            limit, off = OUTLIER * deviation, abs(error)
            deviation *= RISE if off >= deviation else FALL
            self._deviation = deviation if deviation > LEAST_DEVIATION else LEAST_DEVIATION
            if off > limit:
                error = math.copysign(limit, error)
        xx, xy, xz, yy, yz, zz = self._variance
        u, v, w = xx * x + xy * y + xz * z, xy * x + yy * y + yz * z, xz * x + yz * y + zz * z  # variance · features
        gain = 1.0 / (FORGETTING + x * u + y * v + z * w)
        xx, xy, xz = xx - gain * u * u, xy - gain * u * v, xz - gain * u * w
        yy, yz, zz = yy - gain * v * v, yz - gain * v * w, zz - gain * w * w
        # Forgetting without excitation inflates the variance without bound; keep it where it started.
        grow = 1.0 / FORGETTING
        trace = (xx + yy + zz) * grow
        if trace > MOST_VARIANCE:
            grow *= MOST_VARIANCE / trace
        self._variance = (xx * grow, xy * grow, xz * grow, yy * grow, yz * grow, zz * grow)
        step = gain * error
        a, b, c = a + u * step, b + v * step, c + w * step
        if a < 0 or b < 0 or c < 0:
            a, b, c = _not_negative((a, b, c), self._variance)
        self._theta = (a, b, c)  # one assignment: another thread may be reading

    def _level_changed(self, ratio: float) -> bool:
        """Whether the device became faster or slower for good; then everything costs so much more or less."""
        ratios = self._ratios
        before = len(ratios)
        ratios.append(ratio)
        # The median of a full window was not off, else it would be empty: one more that is not off leaves it so.
        if before < LEVEL_SAMPLES - 1 or (before == LEVEL_SAMPLES and 1 / LEVEL_SHIFT <= ratio <= LEVEL_SHIFT):
            return False
        median = sorted(ratios)[LEVEL_SAMPLES // 2]
        if 1 / LEVEL_SHIFT <= median <= LEVEL_SHIFT:
            return False
        a, b, c = self._theta
        self._theta = (a * median, b * median, c * median)
        ratios.clear()
        return True


def _not_negative(theta: Features, variance: tuple[float, ...]) -> Features:
    """The best fit without the coefficients that came out negative: the others take over what those explained."""
    a, b, c = theta
    xx, xy, xz, yy, yz, zz = variance
    if a < 0 < xx:
        part = a / xx
        a, b, c = 0.0, b - xy * part, c - xz * part
    if b < 0 < yy:
        part = b / yy
        a, b, c = a - xy * part, 0.0, c - yz * part
    if c < 0 < zz:
        part = c / zz
        a, b, c = a - xz * part, b - yz * part, 0.0
    return max(a, 0.0), max(b, 0.0), max(c, 0.0)
