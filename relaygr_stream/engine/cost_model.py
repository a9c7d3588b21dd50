"""A cost in milliseconds as a sum of three features, learnt from single measurements as they come.

Recursive least squares that forgets, of *relative* errors: a prediction 10 % off is as bad for 2 ms as for 200. Two
things that happen on real machines are guarded against:
- interruptions make single measurements many times too long: no measurement moves the fit further than OUTLIER times
  the usual deviation would;
- clocks, threads and neighbours change the device's speed for good: when the median of the last LEVEL_SAMPLES
  measurements is off by more than LEVEL_SHIFT, all coefficients are scaled by it at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Final

from relaygr_stream.wire.messages import CostModel

#: Three of them: numpy takes longer to be called than a few dozen multiplications take.
Features = tuple[float, float, float]

#: Weight that a sample keeps after each further one: 0.99 keeps about the last hundred, some seconds of traffic.
FORGETTING: Final = 0.99
#: Residuals are cut at this many median deviations: below 2, 15 % of samples made 2–10 times too long shift predictions
#: by 2 %, at 3 by 5 % (relaygr_lab/benchmarks/trigger.py's measurements).
OUTLIER: Final = 1.5
#: The first samples, whose residuals are not cut.
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
#: Initial variance of each coefficient, and the largest sum of them: forgetting raises variances while nothing new is
#: measured. Both are scaled by (first measurement / prior's prediction)². Without that, a device 20 times slower than
#: the prior was predicted at two thirds of its times after five long prefixes.
FIRST_VARIANCE: Final = 1e4
MOST_VARIANCE: Final = 3e4
#: Shorter than any operation of any device; below it, relative errors mean nothing.
LEAST_MS: Final = 1e-3
#: θ before any sample, up to a factor, which the first sample gives.
PRIOR: Final[Features] = (0.1, 1.0, 1.0)


class OnlineFit:
    """θ·features = milliseconds, θ ≥ 0.

    Predictions do not depend on the unit of time: measurements k times as long give predictions k times as long.
    """

    def __init__(self) -> None:
        self.coefficients = PRIOR  # θ: none is negative; replaced as one, since another thread may be reading
        #: Of θ, the upper triangle row by row.
        self._variance = (FIRST_VARIANCE, 0.0, 0.0, FIRST_VARIANCE, 0.0, FIRST_VARIANCE)
        self._most_variance = MOST_VARIANCE
        self._deviation = FIRST_DEVIATION
        self._ratios: deque[float] = deque(maxlen=LEVEL_SAMPLES)
        self.samples = 0

    def predict(self, features: Features) -> float:
        """The fitted value."""
        a, b, c = self.coefficients
        x, y, z = features
        return a * x + b * y + c * z

    def add(self, features: Features, value: float) -> None:
        """Learn from one measurement."""
        value = max(value, LEAST_MS)
        if not self.samples:
            self._scale(value / self.predict(features))
        settled = self.samples >= FREE_SAMPLES
        self.samples += 1
        unit = value  # what errors are relative to
        if settled:
            unit = max(self.predict(features), LEAST_MS)
            if self._level_changed(value / unit):
                unit = max(self.predict(features), LEAST_MS)
        x, y, z = features
        x, y, z = x / unit, y / unit, z / unit
        a, b, c = self.coefficients
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
        if trace > self._most_variance:
            grow *= self._most_variance / trace
        self._variance = (xx * grow, xy * grow, xz * grow, yy * grow, yz * grow, zz * grow)
        step = gain * error
        a, b, c = a + u * step, b + v * step, c + w * step
        if a < 0 or b < 0 or c < 0:
            a, b, c = _not_negative((a, b, c), self._variance)
        self.coefficients = (a, b, c)

    def _level_changed(self, ratio: float) -> bool:
        """Whether the device became faster or slower for good; then all coefficients are scaled."""
        ratios = self._ratios
        before = len(ratios)
        ratios.append(ratio)
        # The median of a full window was not off, else it would be empty: one more that is not off leaves it so.
        if before < LEVEL_SAMPLES - 1 or (before == LEVEL_SAMPLES and 1 / LEVEL_SHIFT <= ratio <= LEVEL_SHIFT):
            return False
        median = sorted(ratios)[LEVEL_SAMPLES // 2]
        if 1 / LEVEL_SHIFT <= median <= LEVEL_SHIFT:
            return False
        self._scale(median)
        ratios.clear()
        return True

    def _scale(self, factor: float) -> None:
        """All times are `factor` times as long."""
        a, b, c = self.coefficients
        self.coefficients = (a * factor, b * factor, c * factor)
        square = factor * factor
        xx, xy, xz, yy, yz, zz = self._variance
        self._variance = (xx * square, xy * square, xz * square, yy * square, yz * square, zz * square)
        self._most_variance *= square


def _not_negative(theta: Features, variance: tuple[float, ...]) -> Features:
    """The best fit without the coefficients that came out negative."""
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


# ---- the nearest quadratic to some points, in relative terms, without negative coefficients ----
#
# In plain Python numbers: for a dozen points a call into numpy takes longer than the sums, and a simulation's thousand
# workers ask for it four times a second each.


#: Ridge, relative to the diagonal: a coefficient that the points do not determine comes out near zero.
RIDGE: Final = 1.0 + 1e-12


def relative_quadratic(points: Iterable[tuple[float, float]]) -> Features:
    """(a, b, c) of a + b·x + c·x² = milliseconds, each ≥ 0; points: (x, milliseconds), at least one, x > 0."""
    # With w = 1 / milliseconds, relative errors are those of w·a + w·b·x + w·c·x² = 1: sums of w²·xⁿ and of w·xⁿ.
    s0 = s1 = s2 = s3 = s4 = 0.0
    t0 = t1 = t2 = 0.0
    for x, ms in points:
        u = 1.0 / (ms if ms > LEAST_MS else LEAST_MS)
        v = u * x
        w = v * x
        s0 += u * u
        s1 += u * v
        s2 += v * v
        s3 += v * w
        s4 += w * w
        t0 += u
        t1 += v
        t2 += w
    squares, sums = ((s0 * RIDGE, s1, s2), (s1, s2 * RIDGE, s3), (s2, s3, s4 * RIDGE)), (t0, t1, t2)
    used = [0, 1, 2]
    while True:
        solved = _solved([[squares[row][column] for column in used] for row in used], [sums[row] for row in used])
        least = min(solved)
        if least >= 0 or len(used) == 1:
            break
        del used[solved.index(least)]
    fitted = [0.0, 0.0, 0.0]
    for index, value in zip(used, solved, strict=True):
        fitted[index] = max(value, 0.0)
    return fitted[0], fitted[1], fitted[2]


def _solved(squares: list[list[float]], sums: list[float]) -> list[float]:
    """By elimination; a matrix of sums of squares needs no pivots. Changes what it is given."""
    size = len(sums)
    for column in range(size):
        pivot = squares[column]
        for row in range(column + 1, size):
            part = squares[row][column] / pivot[column]
            for each in range(column + 1, size):
                squares[row][each] -= part * pivot[each]
            sums[row] -= part * sums[column]
    for row in reversed(range(size)):
        for column in range(row + 1, size):
            sums[row] -= squares[row][column] * sums[column]
        sums[row] /= squares[row][row]
    return sums


# ---- the costs of prefill and score on this device, learnt from measurements ----
#
#     prefill(k tokens behind p) = e0 + e1·k + e2·k·(p + k/2)     linear layers, and attention over what lies before
#     score(m rows over n tokens) = s0 + s1·m + s2·m·n


#: Tokens are counted in thousands inside the fit, so that its matrices stay well-conditioned.
SCALE: Final = 1 / 1024
MIN_CHUNK: Final = 32  # below this, launch overhead outweighs the work on every device we measured
MAX_CHUNK: Final = 4096
#: Weight of a new sample in running means, so that they are of the last fifty or so rankings.
MEAN_STEP: Final = 0.02
#: What triggers are told is a quadratic through predictions at lengths this far apart, from the first one on.
FIRST_LENGTH: Final = 64
LENGTH_STEP: Final = 1.3
#: … up to the longest prefix seen, and at least this: less than any prefix that is worth a pre-inference.
LEAST_HORIZON: Final = 1024


class Costs:
    """Measured costs of one worker, in milliseconds."""

    def __init__(self) -> None:
        self._extend = OnlineFit()
        self._score = OnlineFit()
        self._suffix = 0.0  # running mean of its length, which triggers do not know
        self._horizon = LEAST_HORIZON
        self._told: Features = (0.0, 0.0, 0.0)  # what triggers were told last, and what it follows from
        self._told_of: tuple[int, int, float | None] | None = None

    def prefilled(self, position: int, tokens: int, ms: float) -> None:
        """Learn from a chunk: `tokens` tokens behind `position` took `ms`."""
        self._extend.add(_extend_features(position, tokens), ms)
        self._horizon = max(self._horizon, position + tokens)

    def scored(self, prefix: int, rows: int, ms: float) -> None:
        """Learn from a ranking that was scored alone; rows: suffix and candidates."""
        self._score.add(_score_features(prefix, rows), ms)

    def saw_suffix(self, tokens: int) -> None:
        """Note the length of a ranking's suffix."""
        self._suffix += MEAN_STEP * (tokens - self._suffix)

    @property
    def fixed_ms(self) -> float:
        """Predicted time of a chunk beside that of its tokens."""
        return self._extend.coefficients[0]

    def prefill_ms(self, position: int, tokens: int) -> float:
        """Predicted time of appending `tokens` tokens behind `position`."""
        return self._extend.predict(_extend_features(position, tokens))

    def score_ms(self, prefix: int, rows: int) -> float:
        """Predicted time of scoring one ranking of `rows` suffix and candidate tokens."""
        m, (s0, s1, s2) = rows * SCALE, self._score.coefficients
        return s0 + s1 * m + s2 * (m * prefix * SCALE)

    def chunk(self, position: int, budget_ms: float) -> int:
        """`tokens_within` by the present fit."""
        return tokens_within(self._extend.coefficients, position, budget_ms)

    def model(self, chunk_ms: float | None = None) -> CostModel:
        """As triggers read it. chunk_ms: prefixes are computed in chunks of that long (None: whole), and each chunk
        costs its e0: with 5 ms chunks on the built-in model a quarter of the time, so it must not be left out."""
        c0, c1, c2 = self._prefix_quadratic(chunk_ms)
        s0, s1, s2 = self._score.coefficients
        return CostModel(
            c0=c0 + s0 + s1 * SCALE * self._suffix,
            c1=c1 + s2 * SCALE * SCALE * self._suffix,
            c2=c2,
            c3=s2 * SCALE * SCALE,
            c4=s1 * SCALE,
        )

    def _prefix_quadratic(self, chunk_ms: float | None) -> tuple[float, float, float]:
        """(a, b, c) of a + b·n + c·n²: the time of a prefix of n tokens."""
        state = (self._extend.samples, self._horizon, chunk_ms)
        if state != self._told_of:
            self._told = _prefix_quadratic(self._extend.coefficients, self._horizon, chunk_ms)
            self._told_of = state
        return self._told


def tokens_within(extend: Features, position: int, budget_ms: float) -> int:
    """Most tokens that can be appended in budget_ms behind `position`, at least MIN_CHUNK; extend: coefficients ≥ 0.

    Where that is less than twice e0, as many as take as long as e0 again: shorter chunks are hardly shorter, and
    together take many times as long. An H100 takes 2.9 ms for 64 tokens of 24 layers of width 2,048, 3.7 ms for 512.
    """
    e0, e1, e2 = extend
    room = max(budget_ms - e0, e0)
    if room <= 0:
        return MIN_CHUNK
    quadratic = e2 * SCALE * SCALE
    linear = e1 * SCALE + quadratic * position
    # The root in the form that neither cancels nor divides by a coefficient that may be next to nothing.
    slope = linear + math.sqrt(linear * linear + 2 * quadratic * room)
    if 2 * room >= MAX_CHUNK * slope:
        return MAX_CHUNK
    tokens = int(2 * room / slope)
    return tokens - tokens % MIN_CHUNK if tokens > MIN_CHUNK else MIN_CHUNK


def _prefix_quadratic(extend: Features, horizon: int, chunk_ms: float | None) -> Features:
    e0, e1, e2 = extend
    if chunk_ms is None:
        return e0, e1 * SCALE, e2 * SCALE * SCALE / 2

    points = []
    done, chunks, length = 0, 0, float(FIRST_LENGTH)
    while length <= horizon:
        n = int(length)
        while done + (chunk := tokens_within(extend, done, chunk_ms)) <= n:
            done += chunk
            chunks += 1
        x = n * SCALE
        # However it is cut, linear layers and attention cost the same in all; each chunk costs its e0.
        points.append((x, e0 * (chunks + (n > done)) + e1 * x + e2 * x * x / 2))
        length *= LENGTH_STEP
    c0, c1, c2 = relative_quadratic(points)
    return c0, c1 * SCALE, c2 * SCALE * SCALE


def _extend_features(position: int, tokens: int) -> Features:
    k = tokens * SCALE
    return 1.0, k, k * (position * SCALE + k / 2)


def _score_features(prefix: int, rows: int) -> Features:
    m = rows * SCALE
    return 1.0, m, m * prefix * SCALE
