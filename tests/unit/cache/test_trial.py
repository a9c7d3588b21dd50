"""A half-life's trial against what it stands for: a cache of keys in the order of `FadingFrequency`."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.cache.fading import MIN_REMEMBERED, SPARE, FadingFrequency, Trial
from tests.properties import examples
from tests.retained import retained


class Reference:
    """The same by a sorted list of all keys."""

    def __init__(self, half_life: float) -> None:
        self.order: FadingFrequency[int] = FadingFrequency(half_life)
        self.saved_ms = 0.0

    def use(self, key: int, nbytes: int, cost_ms: float, budget: float, kept: float) -> None:
        self.saved_ms *= kept
        if key in self.order:
            self.saved_ms += cost_ms
        self.order.add(key, nbytes, cost_ms)
        while self.order.nbytes > budget and len(self.order) > 1:
            self.order.remove(next(self.order.cheapest()))

    def follow_one_in(self, divisor: int) -> None:
        for key in [key for key in self.order.cheapest() if key % divisor]:
            self.order.remove(key)


def check_same(seed: int, steps: int = 600) -> None:
    """The same uses in both, which must hold the same keys in the same order and have saved the same."""
    rng = random.Random(seed)
    half_life, keys = rng.choice([0.25, 1.0, 16.0]), rng.choice([5, 60, 2000])
    trial, reference = Trial(half_life), Reference(half_life)
    budget = rng.choice([0.0, 3000.0, 60_000.0])
    for _ in range(steps):
        # Few sizes and costs, so that ranks tie.
        use = (rng.randrange(keys), rng.choice([100, 200, 1000]), rng.choice([1.0, 2.0, 7.5]), budget, 0.999)
        trial.use(*use)
        reference.use(*use)
        if rng.random() < 0.01:
            budget *= rng.choice([0.5, 2.0])
        if rng.random() < 0.005:
            trial.follow_one_in(2)
            reference.follow_one_in(2)
        assert trial.saved_ms == reference.saved_ms, "saved"
        assert list(trial) == list(reference.order.cheapest()), "held"


def compare_seeds(count: int) -> None:
    for seed in range(count):
        check_same(seed)


@settings(max_examples=examples(40))
@given(st.integers(0, 2**32))
def test_a_trial_holds_and_saves_what_the_policy_would(seed: int) -> None:
    check_same(seed)


@pytest.mark.parametrize(
    ("name", "broken"),
    [("_leave", lambda self, key: self._held.pop(key)), ("__iter__", lambda self: iter(sorted(self._held)))],
    ids=["what leaves keeps its bytes and is forgotten", "in another order"],
)
def test_the_comparison_notices(name: str, broken: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, name, broken)
    with pytest.raises(AssertionError, match=r"saved|held"):
        compare_seeds(50)


@pytest.mark.parametrize("leave", [False, True])
def test_what_a_trial_keeps_is_bounded(leave: bool) -> None:
    """Of keys that come back, and of keys that come once."""
    trial = Trial(4.0)
    for number in range(20 * MIN_REMEMBERED):
        trial.use(number if leave and number % 2 else number % 10, 100, 1.0, 1000.0, 0.999)
    assert len(list(trial)) == 10
    # A key in the heap is four objects (its tuple and what that holds), one held five, one remembered two.
    assert retained(trial) <= 4 * (2 * 10 + SPARE) + 5 * 10 + 2 * MIN_REMEMBERED * leave + 20
