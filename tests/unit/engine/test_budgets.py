"""What an owner grants its lanes: shares add up, no prefix is too long for ever, no byte is used twice at once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.cache.tiers import capacity_for
from relaygr_stream.engine.budgets import EPOCH_S, Demand, LaneBudgets, LaneShares
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.topic_files import load_topics
from tests.properties import examples

LANES = st.sets(st.integers(0, 15), max_size=8)
HOLD_S, TURN_S = 3.0, 5.0


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(LANES, st.dictionaries(st.integers(0, 15), st.integers(0, 1 << 40)), st.floats(0.001, 100)),
        max_size=12,
    )
)
def test_shares_add_up_to_one_and_no_lane_is_shut_out(
    updates: list[tuple[set[int], dict[int, int], float]],
) -> None:
    shares = LaneShares()
    for lanes, asked, seconds in updates:
        given_out = shares.update(lanes, asked, seconds)
        assert given_out.keys() == lanes
        assert sum(given_out.values()) == pytest.approx(1.0 if lanes else 0.0)
        assert all(share >= 0.04 / len(lanes) for share in given_out.values())


def test_demand_is_followed_and_forgotten_and_quiet_lanes_lend_their_share() -> None:
    shares = LaneShares()
    shares.update([0, 1], {}, 1.0)
    assert shares.update([0, 1], {0: 1000}, 1.0)[0] > 0.9
    both = shares.update([0, 1], {0: 1000, 1: 500}, 1.0)
    assert 0.5 < both[0] < 0.6
    for _ in range(40):
        shares.update([0, 1], {0: 1000, 1: 500}, 1.0)
    turned = shares.update([0, 1], {0: 1000, 1: 1500}, 1.0)
    assert turned[1] > 0.7


def test_a_lane_that_fell_quiet_lends_its_share_after_minutes() -> None:
    """What is left of its demand shrinks for hours, and it counted among the lanes with requests as long."""
    shares = LaneShares()
    for second in range(600):
        given_out = shares.update([0, 1], {0: 10**9 + 1000 * second, 1: 10**9}, 1.0)
    assert given_out[0] > 0.9


def test_of_a_running_total_only_what_is_new_is_demand() -> None:
    shares = LaneShares()
    shares.update([0, 1], {0: 10_000}, 1.0)
    shares.update([0, 1], {0: 10_000}, 100.0)
    alike = shares.update([0, 1], {0: 10_100, 1: 100}, 1.0)
    assert alike[0] == pytest.approx(alike[1], rel=1e-3)


def test_a_lane_that_went_and_came_back_counts_anew() -> None:
    shares = LaneShares()
    shares.update([0, 1], {0: 1000, 1: 1000}, 1.0)
    shares.update([1], {1: 1000}, 1.0)
    again = shares.update([0, 1], {0: 10, 1: 1000}, 1.0)  # its running total began again
    assert sum(again.values()) == pytest.approx(1.0)


def test_a_lane_is_asked_for_while_its_last_request_is_not_long_ago() -> None:
    shares = LaneShares()
    shares.update([0, 1], {0: 1000}, 1.0)
    assert shares.asked(0, 1000)
    assert not shares.asked(1, 0)
    shares.update([0, 1], {0: 1000}, 20.0)
    assert not shares.asked(0, 1000)


def test_the_largest_prefix_is_remembered_for_an_epoch_or_two() -> None:
    demand = Demand()
    demand.ask(3, 500, 10.0)
    demand.ask(3, 900, 11.0)
    demand.ask(3, 100, EPOCH_S + 1.0)
    assert (demand.totals[3], demand.largest(3), demand.largest(4)) == (1500, 900, 0)
    demand.ask(4, 100, 2 * EPOCH_S + 1.0)
    assert (demand.largest(3), demand.largest(4)) == (100, 100)
    demand.ask(4, 50, 9 * EPOCH_S)
    assert (demand.largest(3), demand.largest(4)) == (0, 50)
    demand.lanes_lost([4])
    assert (demand.totals.get(4), demand.largest(4)) == (None, 0)


class Owner:
    """An owner whose lanes' triggers use every grant that they may have heard of, as long as they may act on it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.whole = self.random.choice([100, 1000, 100_000])
        self.budgets = LaneBudgets(self.whole, HOLD_S, TURN_S)
        self.now = 100.0
        self.lanes = set(range(self.random.randint(1, 12)))
        self.stated: dict[int, list[tuple[float, int]]] = {}  # lane → (until when triggers may act on it, bytes)
        self.pins: dict[int, list[tuple[float, int]]] = {}  # lane → (end, bytes)

    def pinned(self, lane: int) -> int:
        return sum(nbytes for _, nbytes in self.pins.get(lane, ()))

    def state(self) -> None:
        shares = {lane: self.random.random() + 0.01 for lane in self.lanes}
        largest = {lane: self.random.choice([0, 1, self.whole // 7, self.whole]) for lane in self.lanes}
        asked = {lane for lane in self.lanes if largest[lane] and self.random.random() < 0.7}
        pinned = {lane: self.pinned(lane) for lane in self.lanes}
        granted = self.budgets.update(shares, largest, asked, pinned, self.now)
        assert granted.keys() == self.lanes
        for lane, nbytes in granted.items():
            assert nbytes >= 0
            heard = [(min(until, self.now + HOLD_S), most) for until, most in self.stated.get(lane, [])]
            self.stated[lane] = [*heard, (float("inf"), nbytes)]

    def admit(self) -> None:
        lane = self.random.choice(sorted(self.lanes))
        most = max((nbytes for until, nbytes in self.stated.get(lane, []) if until >= self.now), default=0)
        free = most - self.pinned(lane)
        if free > 0:
            nbytes = self.random.randint(1, free)
            self.pins.setdefault(lane, []).append((self.now + self.random.uniform(0, 4), nbytes))
        assert sum(map(self.pinned, self.lanes)) <= self.whole, "footprint"

    def wait(self) -> None:
        self.now += self.random.choice([0.1, 0.25, 0.5, 2.0])
        for lane, pins in self.pins.items():
            self.pins[lane] = [pin for pin in pins if pin[0] > self.now]
            self.stated[lane] = [each for each in self.stated[lane] if each[0] >= self.now]

    def lanes_move(self) -> None:
        self.lanes = {lane for lane in range(12) if self.random.random() < 0.6} or {0}
        for lane in list(self.pins.keys() | self.stated.keys()):
            if lane not in self.lanes:
                self.pins.pop(lane, None)
                self.stated.pop(lane, None)

    def run_checked(self, steps: int) -> None:
        calls = [self.state, self.admit, self.wait, self.lanes_move]
        for call in self.random.choices(calls, [3, 6, 4, 0.2], k=steps):
            call()


@settings(max_examples=examples(150))
@given(st.integers(0, 2**32))
def test_pinned_bytes_never_exceed_the_whole_whatever_triggers_heard(seed: int) -> None:
    Owner(seed).run_checked(300)


def run_seeds(count: int) -> None:
    for seed in range(count):
        Owner(seed).run_checked(300)


def settled(
    budgets: LaneBudgets, largest: dict[int, int], asked: set[int], start_s: float = 0.0, seconds: float = 10.0
) -> dict[int, int]:
    """Budgets when nothing has changed for a while."""
    shares = {lane: 1 / len(largest) for lane in largest}
    stated: dict[int, int] = {}
    for step in range(int(seconds * 4) + 1):
        stated = budgets.update(shares, largest, asked, {}, start_s + step / 4)
    return stated


def test_a_lane_has_room_for_its_largest_prefix_where_the_whole_affords_it() -> None:
    stated = settled(LaneBudgets(1000, HOLD_S, TURN_S), {0: 700, 1: 10, 2: 10, 3: 10}, {0, 1, 2, 3})
    assert stated[0] >= 700
    assert all(stated[lane] >= 10 for lane in (1, 2, 3))
    assert sum(stated.values()) <= 1000


@settings(max_examples=examples(200))
@given(
    st.dictionaries(st.integers(0, 15), st.tuples(st.integers(1, 500), st.floats(0.001, 1), st.booleans()), min_size=1),
    st.integers(0, 8000),
)
def test_busy_lanes_have_room_for_two_of_their_largest_prefixes_wherever_the_whole_affords_it(
    lanes: dict[int, tuple[int, float, bool]], whole: int
) -> None:
    largest = {lane: nbytes for lane, (nbytes, _, _) in lanes.items()}
    shares = {lane: share for lane, (_, share, _) in lanes.items()}
    asked = {lane for lane, (_, _, busy) in lanes.items() if busy}
    stated = LaneBudgets(whole, HOLD_S, TURN_S).update(shares, largest, asked, {}, 0.0)
    assert sum(stated.values()) <= whole
    left = whole - sum(largest[lane] for lane in asked)
    for lane in sorted(asked if left >= 0 else (), key=lambda lane: (largest[lane], lane)):
        if (left := left - largest[lane]) < 0:
            break
        assert stated[lane] >= 2 * largest[lane]


def test_with_the_defaults_every_lane_has_room_for_two_longest_prefixes_of_the_built_in_model() -> None:
    given = Settings()
    model, lanes = given.model, range(load_topics(given.kafka).lanes)
    token = 4 * model.layers * model.heads * (model.dqk + model.dv)  # float32
    longest = token * capacity_for(given.relay.max_prefix_tokens)
    whole = int(given.worker.pinned_share * given.worker.hbm_bytes)
    shares, largest = dict.fromkeys(lanes, 1 / len(lanes)), dict.fromkeys(lanes, longest)
    stated = LaneBudgets(whole, HOLD_S, TURN_S).update(shares, largest, lanes, {}, 0.0)
    assert min(stated.values()) >= 2 * longest


def test_lanes_that_nobody_asks_lend_theirs_and_get_it_back() -> None:
    budgets = LaneBudgets(1000, HOLD_S, TURN_S)
    lent = settled(budgets, {0: 100, 1: 0, 2: 0, 3: 0}, {0})
    assert lent[0] >= 650
    assert lent[1] == lent[2] == lent[3] == 100  # room for a first prefix, as large as the usual
    shares = dict.fromkeys(lent, 0.25)
    largest = dict.fromkeys(lent, 250)
    at_once = budgets.update(shares, largest, {0, 1, 2, 3}, {0: 700}, 10.25)
    assert at_once[0] == 250  # no more of it is admitted from now on
    assert sum(at_once[lane] for lane in (1, 2, 3)) <= 300  # and nobody else has it yet
    later = settled(budgets, largest, {0, 1, 2, 3}, start_s=10.5, seconds=HOLD_S + 0.5)
    assert all(later[lane] >= 250 for lane in later)


def test_while_bytes_are_pinned_they_are_nobody_elses_however_long_it_takes() -> None:
    budgets = LaneBudgets(1000, HOLD_S, TURN_S)
    shares = {0: 0.5, 1: 0.5}
    budgets.update(shares, {0: 900, 1: 0}, {0}, {}, 0.0)
    for step in range(1, 100):
        stated = budgets.update(shares, {0: 0, 1: 900}, {1}, {0: 900}, step / 4)
        assert stated[1] <= 100
    assert budgets.update(shares, {0: 0, 1: 900}, {1}, {0: 50}, 26.0)[1] >= 900


def test_where_not_all_largest_prefixes_fit_lanes_take_turns() -> None:
    budgets = LaneBudgets(1000, HOLD_S, TURN_S)
    largest = dict.fromkeys(range(5), 400)  # two fit
    shares = dict.fromkeys(range(5), 0.2)
    served: dict[int, int] = dict.fromkeys(range(5), 0)
    for step in range(4 * 120):
        stated = budgets.update(shares, largest, range(5), {}, step / 4)
        for lane, nbytes in stated.items():
            served[lane] += nbytes >= 400
    assert min(served.values()) > 0.5 * max(served.values()) > 0


@pytest.mark.parametrize("whole", [0, 1, 50])
def test_a_whole_too_small_for_anything_is_shared_all_the_same(whole: int) -> None:
    stated = settled(LaneBudgets(whole, HOLD_S, TURN_S), {0: 100, 1: 100}, {0, 1})
    assert sum(stated.values()) <= whole
