from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relaygr_lab.bench.search import Search

values = st.floats(1.0, 1000.0)


def run(search: Search, passes: Callable[[float], bool]) -> int:
    probes = 0
    while (value := search.next()) is not None:
        assert search.low <= value <= search.high
        search.record(value, passes(value))
        probes += 1
        assert probes <= search.most
    return probes


@given(guess=values, threshold=values, tolerance=st.floats(1.05, 2.0))
def test_brackets_the_threshold_of_a_monotone_property(guess: float, threshold: float, tolerance: float) -> None:
    search = Search(guess=guess, low=0.5, high=2000.0, tolerance=tolerance, most=100)
    run(search, lambda value: value <= threshold)
    assert search.settled
    assert search.passed is not None
    assert search.failed is not None
    assert search.passed <= threshold < search.failed <= search.passed * tolerance * (1 + 1e-9)


@given(
    guess=st.floats(1.0, 9000.0),
    threshold=st.floats(1.0, 9000.0),
    step=st.sampled_from([1.05, 1.4]),
    tolerance=st.floats(1.05, 1.2),
)
def test_blocks_are_searched_without_a_repeat(guess: float, threshold: float, step: float, tolerance: float) -> None:
    search = Search(guess=guess, low=32, high=8000, step=step, tolerance=tolerance, most=300, block=32)
    run(search, lambda value: value <= threshold)
    tried = [value for value, _ in search.tried]
    assert len(tried) == len(set(tried))
    assert all(value % 32 == 0 for value in tried)
    assert search.settled is (threshold < 8000), "at its upper limit, what passed is a lower bound"
    if 32 <= threshold < 8000:
        assert search.passed is not None and search.failed is not None
        assert search.passed <= threshold < search.failed <= max(search.passed * tolerance, search.passed + 32) + 1e-6


@given(guess=values)
def test_ends_at_its_limits(guess: float) -> None:
    upwards = Search(guess=guess, low=1.0, high=1000.0, most=100)
    run(upwards, lambda value: True)
    assert upwards.passed == 1000.0
    assert not upwards.settled, "a larger value might pass, too: what passed is a lower bound"
    downwards = Search(guess=guess, low=1.0, high=1000.0, most=100)
    run(downwards, lambda value: False)
    assert downwards.passed is None
    assert downwards.failed == 1.0
    assert downwards.settled


@given(guess=values, threshold=values)
def test_a_good_guess_takes_few_probes(guess: float, threshold: float) -> None:
    search = Search(guess=threshold / 1.1, low=0.1, high=5000.0, step=1.4, tolerance=1.2, most=100)
    assert run(search, lambda value: value <= threshold) <= 4


@given(seed=st.integers(0, 10_000), threshold=st.floats(5.0, 200.0))
def test_noise_near_the_threshold_moves_the_result_by_little(seed: int, threshold: float) -> None:
    """Verdicts are random within a factor of 1.5 around the threshold and right beyond."""
    rng = random.Random(seed)

    def noisy(value: float) -> bool:
        off = math.log(value / threshold) / math.log(1.5)
        return off < 0 if abs(off) > 1 else rng.random() > (off + 1) / 2

    search = Search(guess=20.0, low=0.1, high=5000.0, tolerance=1.1, most=100)
    run(search, noisy)
    assert search.passed is not None
    assert threshold / 1.5 / 1.1 <= search.passed <= threshold * 1.5


def test_out_of_probes_is_not_settled() -> None:
    search = Search(guess=1.0, low=1.0, high=1e9, step=1.5, most=3)
    assert run(search, lambda value: True) == 3
    assert not search.settled
    assert not Search(guess=1.0, low=1.0, high=2.0).settled


@pytest.mark.parametrize(
    "wrong", [{"low": 0.0}, {"low": 3.0, "high": 2.0}, {"high": math.inf}, {"step": 1.0}, {"tolerance": 1.0}]
)
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"search within|factors above 1"):
        replace(Search(guess=1.0, low=1.0, high=2.0), **wrong)
