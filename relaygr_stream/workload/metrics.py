"""HR@k and NDCG@k of rankings with one true item each, beside those of chance and popularity.

Candidates of equal score have no order: each value is the mean over all orders of the ties. So a model that gives every
candidate the same score gets exactly the value of chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

DEFAULT_K: Final = 10


@dataclass(frozen=True)
class Quality:
    """Mean hit rate and mean NDCG, both within 0…1."""

    hr: float
    ndcg: float


def quality_at(scores: npt.ArrayLike, target: int, k: int = DEFAULT_K) -> Quality:
    """HR@k and NDCG@k of one ranking: scores (m,), higher is better, `target` the index of the one true candidate.

    HR@k is the probability that the target is among the first k, NDCG@k the expectation of 1/log2(1 + its rank) there
    (the ideal DCG of one relevant item is 1). A score that is not a number ranks last.
    """
    values = np.asarray(scores, np.float64)
    values = np.where(np.isnan(values), -np.inf, values)
    above = int(np.count_nonzero(values > values[target]))
    ties = int(np.count_nonzero(values == values[target]))  # the target included
    return _over_ranks(above, ties, k)


def chance_at(candidates: int, k: int = DEFAULT_K) -> Quality:
    """The values of a random order of m candidates: HR@k = k/m, and its NDCG@k."""
    return _over_ranks(0, candidates, k)


def _over_ranks(above: int, ties: int, k: int) -> Quality:
    """The mean over the ranks above + 1 … above + ties, each equally likely."""
    inside = max(0, min(k, above + ties) - above)
    ranks = np.arange(above + 1, above + inside + 1)
    return Quality(inside / ties, float(np.sum(1 / np.log2(1 + ranks))) / ties)


class QualityMeter:
    """Means over requests of the rankings, of chance, and of popularity, all on the same requests."""

    def __init__(self, k: int = DEFAULT_K) -> None:
        self.k = k
        self.requests = 0
        self._with_popularity = 0
        self._sums = np.zeros((3, 2))

    def add(self, scores: npt.ArrayLike, target: int, popularity: npt.ArrayLike | None = None) -> None:
        """Count one ranking. popularity: (m,), how often each candidate occurred before; None: not known."""
        values = np.asarray(scores)
        measured = [quality_at(values, target, self.k), chance_at(len(values), self.k)]
        if popularity is not None:
            measured.append(quality_at(popularity, target, self.k))
            self._with_popularity += 1
        for row, quality in enumerate(measured):
            self._sums[row] += quality.hr, quality.ndcg
        self.requests += 1

    @property
    def served(self) -> Quality | None:
        """The mean of the rankings; None before the first."""
        return self._mean(0, self.requests)

    @property
    def chance(self) -> Quality | None:
        """The mean of a random order."""
        return self._mean(1, self.requests)

    @property
    def popularity(self) -> Quality | None:
        """The mean of the order by popularity; None unless popularity was known for every request."""
        return self._mean(2, self.requests) if self._with_popularity == self.requests else None

    def _mean(self, row: int, count: int) -> Quality | None:
        return Quality(*(self._sums[row] / count).tolist()) if count else None
