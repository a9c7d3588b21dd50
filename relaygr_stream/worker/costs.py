"""What extending and scoring cost on this device, learnt from what they took.

extend(k tokens behind p) = e0 + e1·k + e2·k·(p + k/2): linear layers, and attention over what lies before.
score(m rows over n tokens) = s0 + s1·m + s2·m·n. How they are fitted: fit.py.
"""

from __future__ import annotations

import math
from typing import Final

from relaygr_stream.messages import CostModel
from relaygr_stream.worker.fit import Features, OnlineFit
from relaygr_stream.worker.quadratic import relative_quadratic

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
        self._extend = OnlineFit((0.1, 1.0, 1.0))
        self._score = OnlineFit((0.1, 1.0, 1.0))
        self._suffix = 0.0  # running mean of its length, which triggers do not know
        self._horizon = LEAST_HORIZON
        self._told: Features = (0.0, 0.0, 0.0)  # what triggers were told last, and what it follows from
        self._told_of: tuple[int, int, float | None] | None = None

    def extended(self, position: int, tokens: int, ms: float) -> None:
        """One extend took so long."""
        self._extend.add(_extend_features(position, tokens), ms)
        self._horizon = max(self._horizon, position + tokens)

    def scored(self, prefix: int, rows: int, ms: float) -> None:
        """One ranking, scored alone, took so long; rows: suffix and candidates."""
        self._score.add(_score_features(prefix, rows), ms)

    def saw_suffix(self, tokens: int) -> None:
        """A ranking came with such a suffix."""
        self._suffix += MEAN_STEP * (tokens - self._suffix)

    def extend_ms(self, position: int, tokens: int) -> float:
        """Predicted time of an extend."""
        return self._extend.predict(_extend_features(position, tokens))

    def prefix_ms(self, tokens: int) -> float:
        """Predicted time of a whole prefix at once."""
        return self.extend_ms(0, tokens)

    def score_ms(self, prefix: int, rows: int) -> float:
        """Predicted time of scoring one ranking of `rows` suffix and candidate tokens."""
        return self._score.predict(_score_features(prefix, rows))

    def chunk(self, position: int, budget_ms: float) -> int:
        """Most tokens that extend in budget_ms behind `position`, at least MIN_CHUNK: the root of the cost above."""
        return _chunk(self._extend.coefficients, position, budget_ms)

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


def _chunk(extend: Features, position: int, budget_ms: float) -> int:
    e0, e1, e2 = extend
    room = budget_ms - e0
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
        while done + (chunk := _chunk(extend, done, chunk_ms)) <= n:
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
