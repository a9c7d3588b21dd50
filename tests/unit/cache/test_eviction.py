"""The eviction order against one that recounts every use each time, and the choice of victims."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from relaygr_stream.cache.arena import Arena, Extent
from relaygr_stream.cache.eviction import MAX_EXAMINED, SEEDS, Evictor
from relaygr_stream.cache.fading import MIN_REMEMBERED, CostAwarePolicy, FadingFrequency
from tests.properties import examples

KEYS = st.integers(0, 7)
BYTES = st.integers(1, 10_000)
COSTS = st.floats(0.01, 1000)


class FadingFrequencyAgainstModel(RuleBasedStateMachine):
    """The model keeps the time of each use, in half-lives, and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.policy: FadingFrequency[int] = FadingFrequency(2.0)
        self.held: dict[int, tuple[int, float]] = {}
        self.uses: dict[int, list[float]] = {}
        self.now = 0.0

    def use(self, key: int) -> None:
        self.now += 1 / (
            self.policy.half_life * max(1, len(self.held.keys() - {key} if key in self.held else self.held))
        )
        self.uses.setdefault(key, []).append(self.now)

    def value(self, key: int) -> float:
        return sum(math.exp2(then - self.now) for then in self.uses[key]) * self.held[key][1]

    @rule(key=KEYS, nbytes=BYTES, cost=COSTS)
    def add(self, key: int, nbytes: int, cost: float) -> None:
        self.use(key)
        self.held[key] = (nbytes, cost)
        self.policy.add(key, nbytes, cost)

    @rule(key=KEYS)
    def touch(self, key: int) -> None:
        nbytes, cost = self.held.get(key, (1, 1.0))
        self.use(key)
        self.policy.touch(key, nbytes, cost)

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        if key in self.held:
            del self.held[key]
            self.policy.remove(key)
        else:
            with pytest.raises(KeyError):
                self.policy.remove(key)

    @rule(half_life=st.sampled_from([0.25, 1.0, 16.0]))
    def fade_at_another_speed(self, half_life: float) -> None:
        self.policy.half_life = half_life

    @invariant()
    def agrees(self) -> None:
        assert len(self.policy) == len(self.held)
        assert self.policy.nbytes == sum(nbytes for nbytes, _ in self.held.values())
        order = list(self.policy.cheapest())
        assert sorted(order) == sorted(self.held)
        for key in order:
            assert self.policy.value(key) == pytest.approx(self.value(key), rel=1e-9)
        for less, more in itertools.pairwise(self.value(key) / self.held[key][0] for key in order):
            assert less <= more * (1 + 1e-9)


TestFadingFrequencyAgainstModel = FadingFrequencyAgainstModel.TestCase
TestFadingFrequencyAgainstModel.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_frequent_dear_and_small_stay() -> None:
    policy: CostAwarePolicy[str] = CostAwarePolicy()
    for key, nbytes, cost in (("plain", 100, 1.0), ("dear", 100, 2.0), ("small", 10, 1.0), ("frequent", 100, 1.0)):
        policy.add(key, nbytes, cost)
    for _ in range(20):
        policy.touch("frequent", 100, 1.0)
    assert next(policy.cheapest()) == "plain"
    assert policy.value("frequent") > policy.value("dear") > policy.value("plain")


def test_a_user_who_comes_back_is_no_newcomer() -> None:
    policy: CostAwarePolicy[str] = CostAwarePolicy()
    for _ in range(5):
        policy.add("regular", 100, 1.0)
        policy.remove("regular")
    policy.touch("regular", 100, 1.0)  # while it is away
    policy.add("newcomer", 100, 1.0)
    policy.add("regular", 100, 1.0)
    policy.add("newcomer 2", 100, 1.0)
    assert list(policy.cheapest()) == ["newcomer", "newcomer 2", "regular"]


def test_what_is_remembered_of_those_who_left_is_bounded() -> None:
    policy: CostAwarePolicy[int] = CostAwarePolicy()
    for key in range(10 * MIN_REMEMBERED):
        policy.add(key, 1, 1.0)
        policy.remove(key)
    assert sum(policy.uses(key) > 0 for key in range(10 * MIN_REMEMBERED)) == MIN_REMEMBERED


@pytest.mark.parametrize(("nbytes", "cost"), [(0, 1.0), (1, 0.0), (1, -1.0), (1, math.inf), (1, math.nan)])
def test_senseless_numbers_are_refused(nbytes: int, cost: float) -> None:
    policy: CostAwarePolicy[str] = CostAwarePolicy()
    with pytest.raises(ValueError, match="cost_ms > 0"):
        policy.add("x", nbytes, cost)
    assert len(policy) == 0


def play(stream: list[int], room: int) -> CostAwarePolicy[int]:
    """A cache for `room` entries of one size."""
    policy: CostAwarePolicy[int] = CostAwarePolicy()
    for key in stream:
        policy.add(key, 1, 1.0)
        while len(policy) > room:
            policy.remove(next(policy.cheapest()))
    return policy


def test_the_half_life_follows_the_users() -> None:
    generator = random.Random(5)
    # A fixed circle of regulars among passers-by: frequency tells them apart.
    popular = [generator.randrange(100) if generator.random() < 0.5 else 1000 + number for number in range(6000)]
    assert play(popular, room=100).half_life >= 16
    # A new user every third request, who comes back soon and then never again: recency is all there is.
    sessions = [max(0, number // 3 - generator.randrange(40)) for number in range(6000)]
    assert play(sessions, room=60).half_life <= 1


@st.composite
def crowded_arenas(draw: st.DrawFn) -> tuple[Arena, Evictor[int], dict[int, Extent]]:
    """An arena of 8-byte units, filled, with some extents freed and some of the others evictable."""
    count = draw(st.sampled_from([5, 20, 5 * SEEDS]))
    generator = random.Random(draw(st.integers(0, 1 << 32)))
    arena = Arena(count * 40, 8)
    extents = []
    while (extent := arena.allocate(generator.choice([8, 16, 24, 80]))) is not None:
        extents.append(extent)
    evictor: Evictor[int] = Evictor(arena)
    extent_of: dict[int, Extent] = {}
    evictable = draw(st.sampled_from([0.3, 0.9, 1.0]))
    for key, extent in enumerate(extents):
        if generator.random() < 0.1:
            arena.free(extent)
            continue
        extent_of[key] = extent
        if generator.random() < evictable:
            evictor.add(key, extent, generator.uniform(1, 100))
    return arena, evictor, extent_of


@settings(max_examples=examples(200))
@given(state=crowded_arenas(), nbytes=st.integers(1, 400), odd_only=st.booleans())
def test_victims_make_room_and_nothing_else(
    state: tuple[Arena, Evictor[int], dict[int, Extent]], nbytes: int, odd_only: bool
) -> None:
    arena, evictor, extent_of = state

    def odd(key: int) -> bool:
        return key % 2 == 1

    victims = evictor.choose(nbytes, odd if odd_only else None)
    costs = {extent_of[key]: evictor.value(key) for key in evictor.cheapest() if not odd_only or odd(key)}
    best = arena.cheapest_window(nbytes, costs)
    if len(evictor) <= SEEDS or not odd_only:
        assert (victims is None) == (best is None)
    if len(evictor) <= SEEDS and victims is not None:
        assert [extent_of[key] for key in victims] == best
    if victims is None:
        return
    assert all(key in evictor and (odd(key) or not odd_only) for key in victims)
    for key in victims:
        evictor.remove(key)
        arena.free(extent_of[key])
    assert arena.allocate(nbytes) is not None
    arena.check_integrity()


def test_evictor_and_arena_agree_on_what_may_go() -> None:
    arena = Arena(64, 8)
    evictor: Evictor[str] = Evictor(arena)
    first, second = arena.allocate(32), arena.allocate(16)
    assert first and second
    evictor.add("a", first, 1.0)
    assert (len(evictor), arena.open_run(first), arena.largest_open) == (1, 32, 32)
    assert evictor.choose(64) is None
    evictor.add("a", second, 1.0)  # it moved
    assert (len(evictor), arena.open_run(first), arena.open_run(second)) == (1, 0, 32)
    assert evictor.choose(32) == ["a"]
    evictor.touch("a", 16, 1.0)
    evictor.remove("a")
    assert "a" not in evictor
    assert (len(evictor), arena.open_run(second)) == (0, 0)
    with pytest.raises(KeyError):
        evictor.remove("a")
    arena.free(second)
    with pytest.raises(ValueError, match="not held"):
        evictor.add("a", second, 1.0)
    arena.check_integrity()


def place(evictor: Evictor[int], arena: Arena, entries: int, cost_ms: float) -> list[int]:
    """Neighbouring entries of 8 bytes between two that must stay."""
    first = len(arena)
    for key in range(first, first + entries):
        extent = arena.allocate(8)
        assert extent is not None
        evictor.add(key, extent, cost_ms)
    assert arena.allocate(8) is not None
    return list(range(first, first + entries))


def test_the_only_place_with_room_is_found_however_dear_it_is() -> None:
    arena = Arena(8 * (4 * MAX_EXAMINED + 3), 8)
    evictor: Evictor[int] = Evictor(arena)
    for _ in range(2 * MAX_EXAMINED):
        place(evictor, arena, 1, cost_ms=1.0)
    dear = place(evictor, arena, 2, cost_ms=1e6)
    assert evictor.choose(16) == dear
    assert evictor.choose(24) is None


def test_cheap_places_with_room_are_found_among_cheap_ones_without_and_dear_tight_ones() -> None:
    arena = Arena(8 * (9 * SEEDS + 7), 8)
    evictor: Evictor[int] = Evictor(arena)
    for _ in range(3 * SEEDS // 2):
        place(evictor, arena, 1, cost_ms=1.0)
        place(evictor, arena, 3, cost_ms=1000.0)
    cheap = place(evictor, arena, 6, cost_ms=10.0)
    victims = evictor.choose(24)
    assert victims is not None and set(victims) < set(cheap)


def test_uses_that_another_order_has_counted_are_those_of_a_key_that_arrives() -> None:
    order: CostAwarePolicy[str] = CostAwarePolicy()
    for key in "abc":
        order.add(key, 10, 1.0)
    order.learn("d", 5.0)
    order.hold("d", 10, 1.0)
    assert order.uses("d") == pytest.approx(5.0)
    assert [*order.cheapest()][-1] == "d"
    order.learn("d", 50.0)
    assert order.uses("d") == pytest.approx(5.0), "a held key has its own"
    order.remove("d")
    order.learn("d", 2.0)
    assert order.uses("d") == pytest.approx(5.0), "fewer than it has here"
    order.learn("e", 0.0)
    assert order.uses("e") == 0.0
