"""What generated users take next: who knows the formula ranks it well, and better with a longer history."""

from __future__ import annotations

from itertools import islice

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.workload.generator import Generator, GeneratorOptions
from relaygr_stream.workload.metrics import QualityMeter
from relaygr_stream.workload.tastes import INTERESTS, RETURN, SERIES_ITEMS, STAY, TURNOVER, Tastes

ITEMS = 4000
EVERYONE_NEW = GeneratorOptions(
    users=1 << 20, zipf=0, revisit=0, items=ITEMS, item_exponent=0.25, length=700, sigma=0.2
)


def knowing(history: npt.NDArray[np.int64], candidates: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Scores by the formula: the session's series, then those that came back more often than exploring explains."""
    sessions = history // SERIES_ITEMS
    starts = sessions[np.flatnonzero(np.diff(sessions, prepend=-1))]
    visits = np.bincount(starts, minlength=ITEMS // SERIES_ITEMS)[candidates // SERIES_ITEMS]
    here = np.equal(candidates // SERIES_ITEMS, sessions[-1]).astype(np.float64)
    scores: npt.NDArray[np.float64] = STAY * here + RETURN / INTERESTS * np.minimum(visits, 3) / 3
    return scores


def test_who_knows_the_formula_ranks_the_next_item_and_a_longer_history_ranks_it_better() -> None:
    meters = {known: QualityMeter() for known in (20, 50, 200, 700)}
    for item in islice(Generator(EVERYONE_NEW), 300):
        parts = item.request.prefix.arrays()[0], item.request.suffix.arrays()[0]
        history = np.concatenate(parts).astype(np.int64)
        candidates = np.frombuffer(item.request.candidates, "<u4").astype(np.int64)
        assert item.target is not None
        for known, meter in meters.items():
            meter.add(knowing(history[-known:], candidates), item.target, item.popularity)
    hit = {known: meter.served.hr for known, meter in meters.items() if meter.served is not None}
    popularity, chance = meters[700].popularity, meters[700].chance
    assert popularity is not None and chance is not None
    assert chance.hr == pytest.approx(0.1)
    assert popularity.hr < 0.2
    # About 0.52, 0.62, 0.81 and 0.82; 300 requests tell a difference to within 0.07 with 19 chances of 20.
    assert 0.35 < hit[20] < hit[50] < hit[200] - 0.08
    assert hit[50] < hit[700] - 0.08


@given(seed=st.integers(0, 999), items=st.integers(2, 60), cut=st.integers(1, 59), exponent=st.floats(0, 2))
def test_items_exist_and_a_session_stays_in_its_series(seed: int, items: int, cut: int, exponent: float) -> None:
    tastes, rng = Tastes(items, exponent), np.random.default_rng(seed)
    interests = tastes.interests(rng, 60)
    first = tastes.following(rng, interests, None, 0, cut)
    more = tastes.following(rng, interests, int(first[-1]), cut, 60 - cut)
    assert (len(first), len(more)) == (cut, 60 - cut)
    together = np.concatenate([first, more])
    assert 0 <= together.min() <= together.max() < items
    candidates = tastes.candidates(rng, interests, 60, int(together[-1]), min(20, items - 1))
    assert len(set(candidates.tolist())) == len(candidates) == min(20, items - 1)
    assert 0 <= candidates.min() <= candidates.max() < items
    assert together[-1] not in candidates


@pytest.mark.parametrize("pieces", [1, 300])  # in one piece, as a new user; one by one, as a user who returns
def test_shares_are_those_of_the_formula_however_a_history_grows(pieces: int) -> None:
    tastes, rng, stays, known = Tastes(ITEMS, 0.25), np.random.default_rng(2), [], []
    for _ in range(20):
        interests, last, history = tastes.interests(rng, 300), None, np.empty(0, np.int64)
        for part in np.array_split(np.arange(300), pieces):
            found = tastes.following(rng, interests, last, int(part[0]), len(part))
            history, last = np.append(history, found), int(found[-1])
        series = history // SERIES_ITEMS
        stays.append(np.mean(series[1:] == series[:-1]))
        alive = [interests[t // TURNOVER : t // TURNOVER + INTERESTS] for t in range(300)]
        known.append(np.mean([one in of for one, of in zip(series, alive, strict=True)]))
    # 6,000 behaviours: 0.4 ± 0.02. A return may hit the same series, an exploration an interest, each about one in 60.
    assert np.mean(stays) == pytest.approx(STAY, abs=0.03)
    assert np.mean(known) == pytest.approx((RETURN + 0.005) / (1 - STAY), abs=0.04)


def test_items_are_as_popular_as_the_law_says_series_by_series() -> None:
    tastes, rng = Tastes(200, 1.0), np.random.default_rng(3)
    counts = np.zeros(200)
    for _ in range(2000):
        counts += np.bincount(tastes.following(rng, tastes.interests(rng, 60), None, 0, 60), minlength=200)
    expected = tastes.popularity.reshape(-1, SERIES_ITEMS).mean(1)
    found = counts.reshape(-1, SERIES_ITEMS).mean(1) / counts.sum()
    assert found[:5] == pytest.approx(expected[:5], rel=0.1)
