"""Judges a P99 from few requests: verdicts and their confidence.

A request is *good* if its scores arrive within the SLO, counted from the scheduled send time of its ranking. "P99 ≤
SLO" (nearest rank over all requests; one without scores is infinitely late) and "≥ 99 % answered in time" then mean the
same: at most 1 % of the requests are bad.
"""

from __future__ import annotations

import math
from typing import Final

from relaygr_lab.bench.search import bisected

#: The quantile that the SLO is about.
QUANTILE: Final = 0.99
#: Halvings of the interval of a share: nearly double precision.
HALVINGS: Final = 50
#: Most stages of a probe, unless a run says otherwise.
STAGES_AT_MOST: Final = 3


def allowed_bad(requests: int) -> int:
    """The most bad requests, of `requests`, with which the P99 is within the SLO."""
    return math.floor(requests * (1 - QUANTILE) + 1e-9)


def passes(requests: int, bad: int) -> bool:
    """Whether the sample's P99 is within the SLO; False without any request."""
    return requests > 0 and bad <= allowed_bad(requests)


def fewest_samples() -> int:
    """The least number of requests that allows a bad one: 1 / (1 - 0.99)."""
    return round(1 / (1 - QUANTILE))


def samples_for(confidence: float) -> int:
    """Requests that, all good, show with this confidence that at most 1 % are bad: ln(1 - confidence) / ln(0.99)."""
    return math.ceil(math.log(1 - confidence) / math.log(QUANTILE))


def bad_share_bounds(requests: int, bad: int) -> tuple[float, float]:
    """The two-sided Clopper–Pearson interval, at 95 %, of the true share of bad requests."""
    if requests == 0:
        return 0.0, 1.0
    tail = (1 - 0.95) / 2
    low = 0.0 if bad == 0 else bisected(lambda p: 1 - binomial_at_most(bad - 1, requests, p) < tail, 0.0, 1.0, HALVINGS)
    high = (
        1.0 if bad == requests else bisected(lambda p: binomial_at_most(bad, requests, p) >= tail, 0.0, 1.0, HALVINGS)
    )
    return low, high


def ratio_bounds(requests: int, bad: int, other_requests: int, other_bad: int) -> tuple[float, float]:
    """An interval, at 95 % or more, of the true share of bad requests over that of the others; inf where it has no end.

    Of all bad ones, those of the first are a binomial: its share s bounds the ratio s / (1 - s) · other_requests /
    requests (exact for rare bad ones, wider than needed for others). Raises ValueError without requests.
    """
    if not (requests and other_requests):
        raise ValueError(f"a ratio of shares of {requests} and {other_requests} requests")
    odds = [share / (1 - share) if share < 1 else math.inf for share in bad_share_bounds(bad + other_bad, bad)]
    low, high = (each * other_requests / requests for each in odds)
    return low, high


def binomial_at_most(count: int, requests: int, share: float) -> float:
    """P(X ≤ count) of a binomial."""
    if share <= 0.0:
        return 1.0
    if share >= 1.0:
        return float(count >= requests)
    log_p, log_q = math.log(share), math.log1p(-share)
    total = 0.0
    for k in range(count + 1):
        choose = math.lgamma(requests + 1) - math.lgamma(k + 1) - math.lgamma(requests - k + 1)
        total += math.exp(choose + k * log_p + (requests - k) * log_q)
    return min(1.0, total)
