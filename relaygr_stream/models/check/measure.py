"""How far results may be from full inference (DESIGN §8), as one number against one limit.

float32: the largest deviation relative to the largest expected value, at most 1e-5, over all results together: one
candidate's scores may nearly cancel, and float32's own rounding is then a larger part of them. Half precision: no
further from the float32 truth than full inference in half precision is. There, both are roundings of the same truth, so
single values say nothing; root mean squares over many scores do. Knows nothing of models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr_stream.exactness import relative_deviation

Scores = npt.NDArray[np.float32]

#: DESIGN §8. Products of other shapes round differently: up to 3e-6 was seen, where a leak showed as 1e-2.
FLOAT32_LIMIT: Final = 1e-5
#: RMS deviation from the float32 truth over that of full inference. docs/models.md has the measurement behind it.
HALF_LIMIT: Final = 1.25
#: K and V pass through as many roundings as scores do, but no head averages them: ten times the bound of the scores.
KV_LIMIT: Final = 1e-4


@dataclass(frozen=True)
class Measure:
    """The largest deviation found, and the largest allowed; `ratio`: in units of full inference's own deviation."""

    value: float
    limit: float
    ratio: bool = False

    @property
    def holds(self) -> bool:
        """Whether the deviation is within the limit; not if it is NaN."""
        return self.value <= self.limit

    def __str__(self) -> str:
        return f"{self.value:.2f}× (≤ {self.limit:g}×)" if self.ratio else f"{self.value:.1e} (≤ {self.limit:g})"


class Deviations:
    """Collects pairs of results; `measure` judges them together. half: compare by the rule of half precision."""

    def __init__(self, *, half: bool, limit: float = FLOAT32_LIMIT, half_limit: float = HALF_LIMIT) -> None:
        self._half = half
        self._limit = limit
        self._half_limit = half_limit
        self._worst = 0.0  # absolute
        self._largest = float(np.finfo(np.float32).tiny)
        self._found = 0.0  # sums of squares, each result relative to its largest true value
        self._full = 0.0
        self._count = 0

    def add(self, found: Scores, full: Scores, truth: Scores) -> None:
        """found: what was computed another way; full: by full inference in the same type; truth: that in float32."""
        if math.isinf(relative_deviation(found, full)):
            self._worst = math.inf
        else:
            self._worst = max(self._worst, float(np.abs(found - full).max(initial=0.0)))
            self._largest = max(self._largest, float(np.abs(full).max(initial=0.0)))
        if not self._half:
            return
        scale = max(float(np.abs(truth).max(initial=0.0)), float(np.finfo(np.float32).tiny))
        if found.shape != truth.shape or not np.isfinite(found).all():
            self._found = math.inf
            return
        self._found += float((((found.astype(np.float64) - truth) / scale) ** 2).sum())
        self._full += float((((full.astype(np.float64) - truth) / scale) ** 2).sum())
        self._count += found.size

    @property
    def measure(self) -> Measure:
        """Over all pairs so far."""
        if not self._half:
            return Measure(self._worst / self._largest, self._limit)
        count = max(self._count, 1)
        found, full = math.sqrt(self._found / count), math.sqrt(self._full / count)
        # A model that computes in float32 after all is held to float32's bound, not to a ratio of next to nothing.
        return Measure(found / max(full, self._limit), self._half_limit, ratio=True)
