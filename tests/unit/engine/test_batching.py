"""Together or one after the other: by what batches turn out to save."""

from __future__ import annotations

import random

import pytest

from relaygr_stream.engine.forecast import Batching


def learnt(fixed: float, each: float, wrong: float = 1.0, noise: float = 0.0) -> Batching:
    """What is learnt where a batch of n takes fixed + n·each. wrong: times which single rankings are predicted."""
    rng, batching = random.Random(1), Batching()
    for number in range(400):
        rankings = 1 if number % 2 else rng.randint(2, 8)
        ms = (fixed + rankings * each) * (1 + noise * rng.random())
        batching.add(wrong * rankings * (fixed + each), rankings, ms)
    return batching


@pytest.mark.parametrize("wrong", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize(
    ("fixed", "each", "pays"), [(1.0, 0.1, True), (0.6, 0.3, True), (0.3, 0.6, False), (0.0, 1.0, False)]
)
def test_batches_pay_where_the_fixed_part_is_the_larger(
    fixed: float, each: float, pays: bool, noise: float, wrong: float
) -> None:
    assert learnt(fixed, each, wrong, noise).pays is pays


@pytest.mark.parametrize("wrong", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(("fixed", "each"), [(1.0, 0.1), (0.3, 0.6), (0.0, 1.0)])
def test_what_a_batch_takes_is_learnt(fixed: float, each: float, wrong: float) -> None:
    batching = learnt(fixed, each, wrong)
    for rankings in (1, 2, 8):
        took = batching.ms(wrong * rankings * (fixed + each), rankings)
        assert took == pytest.approx(fixed + rankings * each, rel=0.05)


def test_nothing_pays_before_it_was_tried() -> None:
    assert not Batching().pays
