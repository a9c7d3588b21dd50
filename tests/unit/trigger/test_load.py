"""The load bucket gives out at most its burst and what time refills."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.trigger.load import START_S, LoadBucket

steps = st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 300)), max_size=60)


def test_nothing_is_given_before_a_rate_is_known() -> None:
    bucket = LoadBucket(500.0)
    assert bucket.level(10.0) == 0.0
    assert not bucket.allows(0.0, 10.0)


def test_a_new_bucket_holds_a_seconds_refill_not_a_burst() -> None:
    bucket = LoadBucket(500.0)
    bucket.set_rate(40.0, 10.0)
    assert bucket.level(10.0) == 40.0 * START_S
    assert bucket.level(11.0) == 80.0
    assert bucket.level(1000.0) == 500.0


def test_a_new_rate_counts_from_now_on() -> None:
    bucket = LoadBucket(500.0)
    bucket.set_rate(40.0, 0.0)
    bucket.set_rate(0.0, 1.0)
    assert bucket.level(9.0) == 80.0
    bucket.set_rate(10.0, 9.0)
    assert bucket.level(10.0) == 90.0


def test_a_request_larger_than_a_burst_needs_a_full_bucket_and_leaves_a_debt() -> None:
    bucket = LoadBucket(100.0)
    bucket.set_rate(50.0, 0.0)
    assert not bucket.allows(180.0, 0.9)
    assert bucket.allows(180.0, 1.0)
    bucket.take(180.0, 1.0)
    assert bucket.level(1.0) == -80.0
    assert not bucket.allows(1.0, 2.6)
    assert bucket.allows(1.0, 2.7)


@given(steps)
def test_over_any_interval_no_more_than_burst_and_refill_is_taken(asked: list[tuple[float, float]]) -> None:
    burst, rate, now = 200.0, 100.0, 0.0
    bucket = LoadBucket(burst)
    bucket.set_rate(rate, now)
    taken: list[tuple[float, float]] = []
    for pause, cost in asked:
        now += pause
        if bucket.allows(cost, now):
            bucket.take(cost, now)
            taken.append((now, cost))
    for first in range(len(taken)):
        total = 0.0
        for at, cost in taken[first:]:
            total += cost
            excess = max(0.0, cost - burst)
            assert total <= burst + rate * (at - taken[first][0]) + excess + 1e-6
