"""Searches the largest value that passes, with few probes, which are noisy and expensive; and by plain bisection.

A bracketing search on a logarithmic scale: step outwards from a guess until one value passes and a larger one fails,
then bisect until they are within the tolerance, or where values are whole blocks, next to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

ROUNDING: Final = 1 + 1e-9
#: Outward steps do not widen beyond this power of the first, which is beyond any range here.
MOST_POWERS: Final = 64.0


@dataclass
class Search:
    """The largest passing value within low…high: call `next`, probe the value, `record` the verdict, until `next` is
    None.

    Values are expected to pass below some limit and to fail above it. No value is probed twice within a search;
    repeated searches show the noise. At most `most` values are probed.
    """

    guess: float
    low: float
    high: float
    step: float = 1.5  # factor of the outward steps
    tolerance: float = 1.15  # of the bracket, failing over passing
    most: int = 12
    widening: float = 1.0  # each outward step is the one before to this power
    block: int = 0  # values are whole multiples of it, `low` and `high` included; 0: any values
    passed: float | None = None  # the largest that passed
    failed: float | None = None  # the smallest that failed
    tried: list[tuple[float, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < math.inf:
            raise ValueError(f"search within {self.low:g}…{self.high:g}: must be positive, finite and in order")
        if self.step <= 1 or self.tolerance <= 1 or self.widening < 1:
            raise ValueError(
                f"step {self.step:g} and tolerance {self.tolerance:g} are factors above 1, widening {self.widening:g} "
                f"is at least 1"
            )
        self.guess = min(self.high, max(self.low, self._whole(self.guess)))

    def next(self) -> float | None:
        """The next value to probe; None when the search is complete."""
        if len(self.tried) >= self.most:
            return None
        if self.passed is None and self.failed is None:
            return self.guess
        if self.failed is None:
            assert self.passed is not None
            larger = self._whole(max(self.passed * self._step, self.passed + self.block))
            return None if self.passed >= self.high else min(self.high, larger)
        if self.passed is None:
            smaller = self._whole(min(self.failed / self._step, self.failed - self.block))
            return None if self.failed <= self.low else max(self.low, smaller)
        return None if self._close else self._whole(math.sqrt(self.passed * self.failed))

    def record(self, value: float, passed: bool) -> None:
        """Record the verdict on `value`."""
        self.tried.append((value, passed))
        if passed:
            self.passed = value if self.passed is None else max(self.passed, value)
        else:
            self.failed = value if self.failed is None else min(self.failed, value)

    @property
    def settled(self) -> bool:
        """Whether the value is known to within the tolerance, or that no value passes.

        False where probes are used up, and where `high` passed: what passed is then a lower bound.
        """
        return self._close or (self.failed is not None and self.failed <= self.low)

    @property
    def _close(self) -> bool:
        """Whether the bracket is within the tolerance, which a step of just that factor is, however it was rounded, or
        one block."""
        if self.passed is None or self.failed is None:
            return False
        return self.failed <= max(self.passed * self.tolerance, self.passed + self.block) * ROUNDING

    @property
    def _step(self) -> float:
        """The next step outwards: at least one value was tried, and all had the same verdict."""
        return float(self.step ** min(self.widening ** (len(self.tried) - 1), MOST_POWERS))

    def _whole(self, value: float) -> float:
        return round(value / self.block) * self.block if self.block else value


def bisected(fits: Callable[[float], bool], low: float, high: float, halvings: int) -> float:
    """The limit up to which values fit, from below, to within (high - low) / 2^halvings; `low` if none that is tried
    does. `low` and `high` themselves are not tried."""
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
