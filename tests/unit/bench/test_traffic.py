from __future__ import annotations

import numpy as np

from relaygr_stream.lab.bench.traffic import Population, TrafficOptions
from relaygr_stream.lab.workload.items import StageDelay

OPTIONS = TrafficOptions(
    items=5000,
    suffix=4,
    candidates=20,
    growth=3.0,
    recent=200,
    strangers=30,
    sigma=0.0,
    max_prefix=400,
    delay=StageDelay(100.0, 0.1),
    seed=3,
)


def test_requests_come_at_poisson_times_of_the_asked_rate() -> None:
    items = Population("p", 64, 0.0, OPTIONS).take(50.0, count=2000)
    gaps = np.diff([0.0, *(item.at for item in items)])
    assert abs(gaps.mean() * 50 - 1) < 0.1
    assert abs(gaps.std() / gaps.mean() - 1) < 0.1  # exponential: as wide as it is long


def test_takes_as_many_as_are_to_be_judged() -> None:
    items = Population("p", 64, 0.0, OPTIONS).take(20.0, count=100, since=2.0)
    assert sum(item.at >= 2.0 for item in items) == 100
    assert Population("p", 64, 0.0, OPTIONS).take(20.0, count=5, until=10.0)[-1].at > 9.0


def test_users_live_on_from_probe_to_probe_and_return_with_grown_histories() -> None:
    population = Population("p", 64, 0.8, OPTIONS)
    strangers = population.take(50.0, count=30)
    assert len({item.event.user_id for item in strangers}) == 30
    assert {len(item.event.prefix) for item in strangers} == {64}
    known = {item.event.user_id: item.event.prefix for item in strangers}
    later = population.take(50.0, count=300)
    returning = [item for item in later if item.event.user_id in known]
    assert returning
    for item in later:
        before = known.get(item.event.user_id)
        if before is not None and len(item.event.prefix) > len(before):
            assert item.event.prefix.slice(0, len(before)) == before
        known[item.event.user_id] = item.event.prefix
    share = sum(item.event.user_id in {one.event.user_id for one in strangers} for item in later[:50]) / 50
    assert share > 0.5


def test_two_populations_share_no_user_and_no_request() -> None:
    one = Population("a", 64, 0.5, OPTIONS).take(50.0, count=100)
    other = Population("b", 64, 0.5, OPTIONS).take(50.0, count=100)
    for name in ("user_id", "request_id"):
        assert not {getattr(i.event, name) for i in one} & {getattr(i.event, name) for i in other}
    assert all(item.event.user_id == item.request.user_id for item in one)
    ids = [item.request.request_id for item in one]
    assert len(set(ids)) == len(ids)
