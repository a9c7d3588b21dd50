"""Noise that is correlated in time.

A log-normal or measured factor is drawn from a standard normal value that moves with time (an Ornstein–Uhlenbeck
process): values `lasting_s` apart correlate by 1/e. Draws from one such process are slow at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

ROOT_2: Final = math.sqrt(2.0)


class Lasting:
    """A standard normal value that moves with time. lasting_s: correlation time; 0: independent values."""

    #: Values drawn at once, since a call of numpy takes about 5 µs.
    BLOCK = 512

    __slots__ = ("_at", "_drawn", "_lasting_s", "_rng", "_value")

    def __init__(self, lasting_s: float, rng: np.random.Generator) -> None:
        self._lasting_s = lasting_s
        self._rng = rng
        self._drawn: list[float] = []
        self._at = 0.0
        self._value = self._fresh()

    def at(self, time: float) -> float:
        """The value at this time; a time before the last one counts as the last one."""
        if not self._lasting_s:
            return self._fresh()
        if time > self._at:
            kept = math.exp((self._at - time) / self._lasting_s)
            self._value = kept * self._value + math.sqrt(1.0 - kept * kept) * self._fresh()
            self._at = time
        return self._value

    def _fresh(self) -> float:
        if not self._drawn:
            self._drawn = self._rng.standard_normal(self.BLOCK).tolist()
        return self._drawn.pop()


class Noise:
    """Factors by evenly spaced quantiles, from the least to the greatest, with linear interpolation."""

    __slots__ = ("_factors", "_last", "_lasting")

    def __init__(self, factors: Sequence[float], lasting: Lasting) -> None:
        self._factors = [*factors, factors[-1]]
        self._last = len(factors) - 1
        self._lasting = lasting

    def draw(self, time: float) -> float:
        """The factor of an operation that starts at this time."""
        share = 0.5 * (1.0 + math.erf(self._lasting.at(time) / ROOT_2))
        index, part = divmod(share * self._last, 1.0)
        low, high = self._factors[int(index) : int(index) + 2]
        return low + part * (high - low)
