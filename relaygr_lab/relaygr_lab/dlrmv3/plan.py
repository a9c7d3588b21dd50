"""What a bench of LoadGen can afford: how many queries a run has, where a search begins and ends, and why it found no
rate. No input or output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr_lab.bench.search import Search
from relaygr_lab.bench.statistics import QUANTILE, binomial_at_most
from relaygr_lab.dlrmv3.loadgen import CONFIDENCE, FEWEST, allowed_late
from relaygr_lab.dlrmv3.report import Run

#: The search of the largest rate: first step outwards, which one bisection settles; each further one is its square;
#: tolerance of the bracket.
STEP: Final = 1.32
WIDENING: Final = 2.0
TOLERANCE: Final = 1.15
#: Full-length runs that a search takes: two VALID ones, and as much as one for those that end early and the warm-ups.
RUNS: Final = 3
#: No search goes below this rate.
LEAST_QPS: Final = 0.5
#: Of a search's time, what its slowest run may take: it is not the first.
FLOOR_SHARE: Final = 0.7
#: A search ends at this multiple of its beginning.
HEADROOM: Final = 8.0


def fewest_queries(late: int) -> int:
    """The fewest queries that LoadGen calls VALID with so many late ones: 459, 662, 838, …"""
    few, enough = 0, FEWEST
    while not _confident(late, enough):
        few, enough = enough, 2 * enough
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if _confident(late, middle) else (middle, enough)
    return enough


def _confident(late: int, queries: int) -> bool:
    return binomial_at_most(late, queries, 1 - QUANTILE) <= 1 - CONFIDENCE


def affordable(rates: Iterable[float], seconds: float, least: int, most: int) -> int:
    """Queries of a run: the most, up to `most`, with which RUNS runs at each of the rates (queries/s) take no more than
    the seconds, of those numbers from which on LoadGen allows one late query more; otherwise `least`."""
    each_s = RUNS * sum(1 / max(LEAST_QPS, rate) for rate in rates)
    steps = takewhile(lambda count: count <= most, map(fewest_queries, range(most)))
    paid = [count for count in steps if count * each_s <= seconds]
    return max(least, *paid) if paid else least


def search_of(guess: float, queries: int, seconds: float, most_runs: int) -> Search:
    """A search that begins at `guess` (queries/s) and goes no lower than where a run takes most of the seconds."""
    low = max(LEAST_QPS, queries / (FLOOR_SHARE * seconds))
    start = max(low, guess)
    return Search(start, low, HEADROOM * start, STEP, TOLERANCE, most_runs, widening=WIDENING)


def payable(search: Search, queries: int, seconds: float) -> float | None:
    """The next rate of which a run takes no more than the seconds that are left; None where the search ends.

    Without a VALID rate so far it goes on, also below the search's end, to the lowest rate that these seconds pay for.
    """
    rate, least = search.next(), max(LEAST_QPS, queries / seconds) if seconds > 0 else math.inf
    if rate is not None and rate >= least:
        return rate
    if search.passed is not None or len(search.tried) >= search.most or least == math.inf:
        return None
    if search.failed is None:
        return least
    return max(least, search.failed / STEP**2) if least * TOLERANCE <= search.failed else None


def slowness(walls_ms: npt.ArrayLike, device_ms: npt.ArrayLike) -> float:
    """How much longer requests took one at a time, in this process and over the bus, than their device time."""
    return float(np.median(np.asarray(walls_ms) / np.asarray(device_ms)))


def why_none(runs: Sequence[Run], low: float, queries: int, slo_ms: float) -> str:
    """Why no run was VALID, in a line."""
    if not runs:
        return f"the budget does not pay for one run of {queries} queries; give --budget more seconds"
    slowest = min(runs, key=lambda run: run.qps)
    share, allowed = slowest.late / max(1, slowest.ranked), allowed_late(queries)
    late = f"at {slowest.qps:g}/s {slowest.late} of {slowest.ranked} queries took over {slo_ms:g} ms ({share:.1%})"
    if share <= 1 - QUANTILE:
        return f"early stopping: {late}, of {queries} only {allowed} may: give more --queries"
    below = (
        f"lower than {min(low, slowest.qps):.1f}/s the budget does not pay for"
        if slowest.qps > LEAST_QPS
        else "no lower rate is searched"
    )
    return f"{late}, of {queries} only {allowed} may; {below}"
