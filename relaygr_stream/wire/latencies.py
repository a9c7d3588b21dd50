"""Latencies of rankings as workers state them: how many were in each interval, and the quantiles of that.

The intervals are those of the worker's metric `relaygr_ranking_seconds`, and a quantile is computed as Prometheus does:
what a status tells and what a query over the metric tells is the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Annotated, Final

from msgspec import Meta

#: Upper bounds of the intervals, in seconds; one more interval is above the last. Part of the protocol: they stay. From
#: milliseconds to seconds around a tight ranking SLO; 1.5–2× apart, so that a quantile is known within that.
BOUNDS_S: Final = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2)

#: Rankings by interval, the quickest first; intervals at the end that have none may be left out.
Counts = Annotated[
    tuple[Annotated[int, Meta(ge=0, lt=2**53)], ...],
    Meta(max_length=len(BOUNDS_S) + 1),
]


def total(parts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Several counts as one."""
    return tuple(map(sum, zip_longest(*parts, fillvalue=0)))


def since(now: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    """What was added to running counts; those of a process that started anew in between, whole."""
    grown = tuple(here - there for here, there in zip_longest(now, before, fillvalue=0))
    return tuple(now) if min(grown, default=0) < 0 else grown


def quantile_s(counts: Sequence[int], share: float) -> float | None:
    """Seconds within which that share of the rankings were, linear inside an interval; None: there were none.

    A quantile above the last bound is the last bound.
    """
    left = share * sum(counts)
    if not left:
        return None
    lower = 0.0
    for count, upper in zip(counts, BOUNDS_S, strict=False):
        if count and left <= count:
            return lower + (upper - lower) * left / count
        left, lower = left - count, upper
    return BOUNDS_S[-1]
