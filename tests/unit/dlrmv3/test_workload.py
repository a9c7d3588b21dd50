"""The workload of `bench dlrmv3` against the published facts, and its messages against the model's schema."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from relaygr_lab.dlrmv3.model import Shape
from relaygr_lab.dlrmv3.workload import CANDIDATES, ITEMS, TIME_S, Visit, Workload, chance_of, item_ratings

from relaygr_stream.errors import ConfigError
from relaygr_stream.wire.codec import check_features
from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema

SCHEMA = FeatureSchema(Shape().config(users=10).features)
CATEGORY = ITEMS // 128
WHOLE = Workload(users=2000)
SMALL = Workload(users=60, candidates=24, scale=0.1)


@pytest.mark.parametrize(("timestamp", "mean"), [(93, 6612), (95, 6752), (99, 7032)])
def test_histories_are_as_long_as_published(timestamp: int, mean: int) -> None:
    lengths = [one.length for one in WHOLE.requests[1] if one.timestamp == timestamp]
    assert np.mean(lengths) == pytest.approx(mean, abs=45)  # 3.5 standard errors of 1,400 users
    assert np.std(lengths) == pytest.approx(490, rel=0.1)
    assert len(lengths) == pytest.approx(0.7 * 2000, rel=0.06)


def test_a_returning_user_brings_about_a_hundred_behaviours() -> None:
    new = [one.new for one in WHOLE.requests[1] if one.new < one.length]
    assert np.median(new) == pytest.approx(100, abs=2)
    assert np.quantile(new, 0.99) == pytest.approx(158, abs=6)
    assert min(new) == 33


def test_requests_come_in_time_order_a_user_once_a_timestamp() -> None:
    warm, measured = SMALL.requests
    assert [one.timestamp for one in measured] == sorted(one.timestamp for one in measured)
    assert {one.timestamp for one in measured} == set(range(93, 100))
    assert len({(one.user, one.timestamp) for one in measured}) == len(measured)
    assert {one.timestamp for one in warm} <= {90, 91, 92}
    assert len({one.user for one in warm}) == len(warm)
    of_a_timestamp = [one.user for one in measured if one.timestamp == 93]
    assert of_a_timestamp != sorted(of_a_timestamp)
    known = {one.user: one.length for one in warm}
    for one in measured:  # what is new is what the last request did not have
        assert one.length - known.get(one.user, 0) == one.new
        known[one.user] = one.length


def test_a_history_grows_behind_what_it_was() -> None:
    measured = SMALL.requests[1]
    user = measured[0].user
    items = [SMALL.item(one, "r1", SCHEMA) for one in measured if one.user == user]
    assert len(items) > 1
    for earlier, later in pairwise(items):
        kept = later.request.prefix.slice(0, earlier.visit.length)
        assert kept.parts() == earlier.request.prefix.parts()
        assert later.request.candidates != earlier.request.candidates
        assert later.request.user_id == earlier.request.user_id


def test_messages_are_what_the_model_reads() -> None:
    item = SMALL.item(SMALL.requests[1][5], "r1", SCHEMA, head_start_ms=90.0)
    request, event = item.request, item.event
    request.validate()
    event.validate()
    check_features(request, SCHEMA)
    assert event.rank_in_ms == 90.0
    assert event.candidates == len(request.candidates) // 4 == 24
    assert (event.request_id, event.user_id, event.prefix) == (request.request_id, request.user_id, request.prefix)
    assert event.columns
    assert not event.columns.candidate
    ids, actions, times = request.prefix.arrays()
    assert len(ids) == item.visit.length
    assert ids.max() < ITEMS
    assert set(actions.tolist()) == {1, 2, 4, 8, 16}
    assert set(times.tolist()) == {1000 * TIME_S}
    categories = SCHEMA.values("behaviour", request.prefix.table)["uih_category_id"][:, 0]
    assert (ids // CATEGORY == categories).all()
    assert len(set(categories.tolist())) == 4
    assert request.columns
    candidates = SCHEMA.values("candidate", request.columns.candidate)
    assert (np.frombuffer(request.candidates, "<u4") // CATEGORY == candidates["cand_category_id"][:, 0]).all()
    assert item.nbytes() == 17 * item.visit.length + 16 * 24 + sum(map(len, _keys(item)))


def test_tastes_have_levels_that_swing_and_chances_foretell_them() -> None:
    drawn = [(visit, *WHOLE.drawn(visit)) for visit in WHOLE.requests[1][::140]]
    for visit, _, candidates in drawn:
        assert (candidates.items // CATEGORY == candidates.categories).all()
        assert candidates.items.max() % CATEGORY < CATEGORY * (visit.timestamp + 1) // 100 + 1
    levels, ratings, items = (
        np.concatenate([getattr(one, name) for _, _, one in drawn]) for name in ("levels", "ratings", "items")
    )
    means = [(2 * ratings - item_ratings(items))[levels == level].mean() for level in range(4)]
    assert means[0] > means[1] > means[2] + 0.5 > means[3] + 1
    assert ratings.min() >= 1
    assert ratings.max() <= 5
    foretold = np.concatenate([chance_of(3.5, one, visit.timestamp) for visit, _, one in drawn])
    assert foretold.mean() == pytest.approx((ratings >= 3.5).mean(), abs=0.005)
    assert (ratings[foretold == 1] >= 3.5).all()
    assert (ratings[foretold == 0] < 3.5).all()


def test_categories_drift_towards_what_was_taken() -> None:
    """With even chances for ever, the most taken of four categories would have little more than a quarter."""
    shares = []
    for visit in WHOLE.requests[1][:60]:
        counts = np.bincount(WHOLE.drawn(visit)[0].levels, minlength=4)
        shares.append(counts.max() / counts.sum())
    assert np.mean(shares) > 0.27


def _keys(item: object) -> list[str]:
    """Keys of columns, which count as bytes: of a behaviour, of the user and of candidates; the user's one value."""
    return ["uih_category_id:int32", "user_id:int64", "cand_category_id:int32", "cand_query_time:int64", "8 bytes."]


def test_a_model_without_features_gets_none() -> None:
    request = SMALL.item(SMALL.requests[1][0], "r1", NO_FEATURES).request
    assert not request.columns
    assert not request.prefix.table


def test_another_seed_is_other_traffic_and_the_same_seed_the_same() -> None:
    again, other = Workload(60, 24, 0.1), Workload(60, 24, 0.1, seed=8)
    visit = SMALL.requests[1][0]
    assert again.requests == SMALL.requests
    assert again.item(visit, "r1", SCHEMA) == SMALL.item(visit, "r1", SCHEMA)
    assert other.requests != SMALL.requests


@pytest.mark.parametrize("scale", [0.0, -1.0, 1.5, float("nan")])
def test_a_scale_beyond_the_published_size_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match="scale"):
        Workload(scale=scale)


def test_work_is_what_the_published_size_takes() -> None:
    """By hand: 155 GFLOP of projections, 344 of attention, 16 of MLPs at 6,400 behaviours."""
    for length, full, reused in ((6400, 515e9, 187e9), (7030, 584e9, 201e9)):
        visit = Visit(0, 95, length, 100)
        assert Shape().flop(visit, CANDIDATES, reused=False) == pytest.approx(full, rel=0.01)
        assert Shape().flop(visit, CANDIDATES, reused=True) == pytest.approx(reused, rel=0.02)


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="dim = 100"):
        Shape(dim=100)
