"""The load bucket gives out at most its burst and what time refills."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.trigger.decision import LaneState
from relaygr_stream.trigger.ledger import LaneLedger
from relaygr_stream.trigger.load import MIN_MS_PER_S, OWNER_S, LoadBucket, OwnerLoads
from tests.unit.trigger.parts import POLICY, claim, lane_status, worker_status

steps = st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 300)), max_size=60)


def test_nothing_is_given_before_a_rate_is_known() -> None:
    bucket = LoadBucket(500.0)
    assert bucket.level(10.0) == 0.0
    assert not bucket.allows(0.0, 10.0)


def test_a_bucket_holds_a_seconds_refill_and_no_more_than_a_burst() -> None:
    bucket = LoadBucket(300.0)
    bucket.set_rate(40.0, 10.0)
    assert bucket.level(10.0) == bucket.level(1000.0) == 40.0 * OWNER_S
    bucket.set_rate(400.0, 1000.0)
    assert bucket.level(1001.0) == 300.0


def test_a_new_rate_counts_from_now_on() -> None:
    bucket = LoadBucket(500.0, depth_s=10.0)
    bucket.set_rate(40.0, 0.0)
    bucket.spend(400.0, 0.0)
    assert bucket.level(1.0) == 40.0
    bucket.set_rate(10.0, 1.0)
    assert bucket.level(2.0) == 50.0


def test_a_request_larger_than_a_burst_needs_a_full_bucket_and_leaves_a_debt() -> None:
    bucket = LoadBucket(100.0, depth_s=10.0)
    bucket.set_rate(50.0, 0.0)
    bucket.spend(50.0, 0.0)
    assert not bucket.allows(180.0, 0.9)
    assert bucket.allows(180.0, 1.0)
    bucket.spend(180.0, 1.0)
    assert bucket.level(1.0) == -80.0
    assert not bucket.allows(1.0, 2.6)
    assert bucket.allows(1.0, 2.7)


@given(steps)
def test_over_any_interval_no_more_than_burst_and_refill_is_taken(asked: list[tuple[float, float]]) -> None:
    burst, rate, now = 200.0, 100.0, 0.0
    bucket = LoadBucket(burst, depth_s=10.0)
    bucket.set_rate(rate, now)
    taken: list[tuple[float, float]] = []
    for pause, cost in asked:
        now += pause
        if bucket.allows(cost, now):
            bucket.spend(cost, now)
            taken.append((now, cost))
    for first in range(len(taken)):
        total = 0.0
        for at, cost in taken[first:]:
            total += cost
            excess = max(0.0, cost - burst)
            assert total <= burst + rate * (at - taken[first][0]) + excess + 1e-6


def test_a_grant_that_is_withdrawn_is_withdrawn() -> None:
    bucket = LoadBucket(100.0)
    bucket.set_rate(50.0, 0.0)
    assert bucket.allows(30.0, 60.0)
    bucket.set_rate(0.0, 60.0)
    assert bucket.level(60.0) == 0.0
    assert not bucket.allows(30.0, 60.0)
    assert not bucket.allows(0.0, 60.0)


class Trigger:
    """The lanes of a trigger, which share what it knows of their owners' loads."""

    def __init__(self, lanes: int) -> None:
        self._loads = OwnerLoads()
        self._lanes = [self._fresh(lane) for lane in range(lanes)]

    def _fresh(self, lane: int) -> LaneState:
        return LaneState(replace(POLICY, burst_ms=100.0), LaneLedger(0, 60.0, 0.0), lane, self._loads)

    def observe(self, lane: int, rate: float, now: float, owner: str = "w") -> None:
        stated = worker_status(lane_status(lane=lane, rate=rate), name=owner)
        self._lanes[lane].observe(claim(stated), now)

    def lose(self, lane: int, now: float) -> None:
        self._loads.remove(lane, now)
        self._lanes[lane] = self._fresh(lane)

    def admit(self, lane: int, cost: float, now: float) -> bool:
        allowed = self._lanes[lane].load_allows(cost, now)
        if allowed:
            self._lanes[lane].charge(cost, now, cost)
        return allowed


def test_after_a_quiet_minute_an_owner_is_asked_for_a_second_of_its_grant_however_many_its_lanes() -> None:
    for lanes in (1, 16, 256):
        trigger = Trigger(lanes)
        for lane in range(lanes):
            trigger.observe(lane, 700.0 / lanes, 0.0)
        admitted = sum(30.0 * trigger.admit(lane, 30.0, 60.0) for _ in range(100) for lane in range(lanes))
        assert 90.0 <= admitted <= 700.0 * OWNER_S
        for lane in range(lanes):
            trigger.observe(lane, 0.0, 120.0)
        assert not any(trigger.admit(lane, 30.0, 180.0) for lane in range(lanes))


@given(st.lists(st.tuples(st.floats(0, 0.5), st.integers(0, 999), st.floats(1, 90)), max_size=80))
def test_what_few_lanes_admit_many_admit(requests: list[tuple[float, int, float]]) -> None:
    """An owner's requests, each of a user, whose lane is one of few or of many: with a bucket for each lane, a lane of
    many had too little for one prefix."""
    admitted = []
    for lanes in (8, 32, 128):
        trigger, now = Trigger(lanes), 60.0
        for lane in range(lanes):
            trigger.observe(lane, 1024.0 / lanes, 0.0)  # whole parts: no rounding
        said = []
        for pause, user, cost in requests:
            now += pause
            said.append(trigger.admit(user % lanes, cost, now))
        admitted.append(said)
    assert admitted[0] == admitted[1] == admitted[2]


operations = st.lists(
    st.tuples(
        st.sampled_from(["event", "event", "event", "rate", "lost"]),
        st.integers(0, 5),
        st.floats(0, 2),
        st.sampled_from([0.0, 3.0, 40.0, 300.0]),
        st.sampled_from("ab"),
    ),
    max_size=120,
)


@given(operations)
def test_an_owners_lanes_take_no_more_than_their_rates_give_and_a_second_and_one_prefix(play: list[tuple]) -> None:  # type: ignore[type-arg]
    """Lanes come and go, and so do rates: no owner is asked for more than what it granted since the play began."""
    trigger, now, cost = Trigger(6), 0.0, 30.0
    rates: dict[int, tuple[str, float]] = {}
    given, taken = {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0}
    for what, lane, pause, rate, owner in play:
        now += pause
        for name, known in rates.values():
            given[name] += known * pause
        if what == "rate":
            if rates.get(lane, ("",))[0] != owner:
                given[owner] += rate * OWNER_S
            rates[lane] = owner, rate
            trigger.observe(lane, rate, now, owner)
        elif what == "lost" and lane in rates:
            del rates[lane]
            trigger.lose(lane, now)
        elif lane in rates and trigger.admit(lane, cost, now):
            taken[rates[lane][0]] += cost
            assert rates[lane][1] >= MIN_MS_PER_S
    assert all(taken[name] <= most + cost + 1e-6 for name, most in given.items())
