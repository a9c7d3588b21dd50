"""HR and NDCG against their definitions, worked out by listing every order."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.workload.metrics import QualityMeter, chance_at, quality_at


def naive(scores: list[float], target: int, k: int) -> tuple[float, float]:
    """Mean HR@k and NDCG@k over all orders that sort by score, best first."""
    hits, gains, orders = 0.0, 0.0, 0
    for order in itertools.permutations(range(len(scores))):
        if any(scores[a] < scores[b] for a, b in itertools.pairwise(order)):
            continue
        orders += 1
        rank = order.index(target) + 1
        if rank <= k:
            hits += 1
            gains += 1 / math.log2(1 + rank)
    return hits / orders, gains / orders


@given(
    scores=st.lists(st.sampled_from([-math.inf, -1.5, 0.0, 2.0, 7.0]), min_size=1, max_size=6),
    target=st.integers(0, 5),
    k=st.integers(1, 8),
)
def test_quality_is_the_mean_over_all_orders_of_ties(scores: list[float], target: int, k: int) -> None:
    target %= len(scores)
    measured = quality_at(scores, target, k)
    assert (measured.hr, measured.ndcg) == pytest.approx(naive(scores, target, k))


@given(m=st.integers(1, 300), k=st.integers(1, 50), value=st.sampled_from([0.0, 3.0, math.nan, math.inf, -math.inf]))
def test_constant_scores_get_what_chance_gets(m: int, k: int, value: float) -> None:
    assert quality_at(np.full(m, value), m - 1, k) == chance_at(m, k)
    assert chance_at(m, k).hr == pytest.approx(min(k, m) / m)


def test_a_score_that_is_no_number_ranks_last() -> None:
    assert quality_at([1.0, math.nan, -5.0], 1, 2).hr == 0
    assert quality_at([1.0, math.nan, -5.0], 2, 2).hr == 1


def test_the_meter_averages_served_chance_and_popularity() -> None:
    meter = QualityMeter(k=1)
    assert meter.served is None
    meter.add(np.array([0.9, 0.1]), 0, np.array([1, 5]))
    meter.add(np.array([0.9, 0.1, 0.3, 0.2]), 2, np.array([0, 0, 9, 1]))
    assert meter.served is not None
    assert meter.chance is not None
    assert meter.popularity is not None
    assert (meter.served.hr, meter.chance.hr, meter.popularity.hr) == (0.5, (1 / 2 + 1 / 4) / 2, 0.5)


def test_popularity_is_withheld_unless_known_for_every_request() -> None:
    meter = QualityMeter()
    meter.add([1.0, 2.0], 0, [1, 2])
    meter.add([1.0, 2.0], 0)
    assert meter.popularity is None
    assert meter.requests == 2
