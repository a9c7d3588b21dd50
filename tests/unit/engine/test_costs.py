"""The fit of the device's costs: it finds the truth under noise, shrugs off interruptions, and never goes wild."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.engine.cost_model import MAX_CHUNK, MIN_CHUNK, SCALE, Costs, tokens_within
from tests.properties import examples

K = 1024.0


def prefill_ms(e: tuple[float, float, float], position: int, tokens: int) -> float:
    """The formula of costs.py, in tokens."""
    k, p = tokens / K, position / K
    return e[0] + e[1] * k + e[2] * k * (p + k / 2)


def score_ms(s: tuple[float, float, float], prefix: int, rows: int) -> float:
    return s[0] + s[1] * rows / K + s[2] * rows / K * prefix / K


def fitted(
    extend: tuple[float, float, float],
    score: tuple[float, float, float],
    *,
    samples: int = 600,
    noise: float = 0.0,
    interruptions: float = 0.0,
    seed: int = 1,
) -> Costs:
    rng = random.Random(seed)
    costs = Costs()

    def measured(ms: float) -> float:
        ms *= 1 + noise * rng.uniform(-1, 1)
        return ms * rng.uniform(2, 10) if rng.random() < interruptions else ms

    for _ in range(samples):
        position, tokens = rng.randrange(0, 4096), rng.randrange(32, 1024)
        costs.prefilled(position, tokens, measured(prefill_ms(extend, position, tokens)))
        prefix, rows = rng.randrange(0, 4096), rng.randrange(16, 512)
        costs.scored(prefix, rows, measured(score_ms(score, prefix, rows)))
    return costs


COEFFICIENTS = st.tuples(st.floats(0.05, 2), st.floats(0.5, 50), st.floats(0, 20))


@settings(max_examples=examples(20))
@given(extend=COEFFICIENTS, score=COEFFICIENTS, seed=st.integers(0, 9))
def test_known_coefficients_are_found(
    extend: tuple[float, float, float], score: tuple[float, float, float], seed: int
) -> None:
    costs = fitted(extend, score, samples=150, seed=seed)
    for position, tokens in ((0, 64), (0, 2048), (2048, 512)):
        assert costs.prefill_ms(position, tokens) == pytest.approx(prefill_ms(extend, position, tokens), rel=0.01)
    assert costs.score_ms(2000, 100) == pytest.approx(score_ms(score, 2000, 100), rel=0.01)
    full = prefill_ms(extend, 0, 3000) + score_ms(score, 3000, 200)
    assert costs.model().full_ms(3000, 200) == pytest.approx(full, rel=0.01)


@settings(max_examples=examples(20))
@given(extend=COEFFICIENTS, factor=st.floats(1.0, 300.0), seed=st.integers(0, 9))
def test_a_slower_device_is_learnt_from_as_few_operations(
    extend: tuple[float, float, float], factor: float, seed: int
) -> None:
    """A worker predicts from its warm-up, a few operations: predictions do not depend on the unit of time."""
    quick = fitted(extend, extend, samples=8, noise=0.05, seed=seed)
    slow = (extend[0] * factor, extend[1] * factor, extend[2] * factor)
    slowly = fitted(slow, slow, samples=8, noise=0.05, seed=seed)
    for position, tokens in ((0, 64), (0, 2048), (2048, 512)):
        assert slowly.prefill_ms(position, tokens) == pytest.approx(factor * quick.prefill_ms(position, tokens))
    assert slowly.score_ms(2000, 100) == pytest.approx(factor * quick.score_ms(2000, 100))


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_interruptions_do_not_mislead(seed: int) -> None:
    extend, score = (0.4, 6.0, 3.0), (0.5, 8.0, 2.0)
    costs = fitted(extend, score, noise=0.1, interruptions=0.15, seed=seed)
    for position, tokens in ((0, 512), (0, 2048), (2048, 512)):
        assert costs.prefill_ms(position, tokens) == pytest.approx(prefill_ms(extend, position, tokens), rel=0.12)


@pytest.mark.parametrize("factor", [0.05, 0.4, 2.0, 20.0])
@pytest.mark.parametrize("interruptions", [0.0, 0.1])
def test_a_device_that_changes_its_speed_for_good_is_followed_at_once(factor: float, interruptions: float) -> None:
    rng = random.Random(2)
    before = (0.2, 5.0, 1.0)
    costs = fitted(before, before, noise=0.05)
    now = (before[0] * factor, before[1] * factor, before[2] * factor)
    for _ in range(24):
        position, tokens = rng.randrange(0, 4096), rng.randrange(32, 1024)
        ms = prefill_ms(now, position, tokens) * rng.uniform(0.95, 1.05)
        costs.prefilled(position, tokens, ms * rng.uniform(2, 10) if rng.random() < interruptions else ms)
    assert costs.prefill_ms(0, 1024) == pytest.approx(prefill_ms(now, 0, 1024), rel=0.2)


def test_a_model_whose_costs_change_their_shape_is_learnt_anew() -> None:
    rng = random.Random(2)
    costs = fitted((0.2, 5.0, 1.0), (0.2, 5.0, 1.0))
    other = (4.0, 10.0, 40.0)
    for _ in range(600):
        position, tokens = rng.randrange(0, 4096), rng.randrange(32, 1024)
        costs.prefilled(position, tokens, prefill_ms(other, position, tokens))
    for position, tokens in ((0, 64), (0, 2048), (2048, 512)):
        assert costs.prefill_ms(position, tokens) == pytest.approx(prefill_ms(other, position, tokens), rel=0.15)


@settings(max_examples=examples(30))
@given(extend=COEFFICIENTS, chunk_ms=st.floats(2, 20), suffix=st.integers(0, 200))
def test_triggers_are_told_the_time_of_chunked_inference_suffix_included(
    extend: tuple[float, float, float], chunk_ms: float, suffix: int
) -> None:
    score = (0.3, 6.0, 4.0)
    costs = fitted(extend, score, samples=150)
    for _ in range(400):
        costs.saw_suffix(suffix)
    model = costs.model(chunk_ms)
    for prefix, candidates in ((300, 64), (1500, 300), (3500, 64)):
        taken, position = score_ms(score, prefix, suffix + candidates), 0
        while position < prefix:
            count = min(costs.chunk(position, chunk_ms), prefix - position)
            taken += prefill_ms(extend, position, count)
            position += count
        # The quadratic smooths over the steps that the last chunk of a prefix and chunks' whole multiples make. Where
        # an operation's constant takes most of a chunk, chunks fall from hundreds of tokens to MIN_CHUNK at some
        # length, which no quadratic does: of 4,000 models the largest error was 26 %, and 13 % from 2.5 constants on.
        rel = 0.15 if chunk_ms >= 2.5 * extend[0] else 0.3
        assert model.full_ms(prefix, candidates) == pytest.approx(taken, rel=rel)


@settings(max_examples=examples(40))
@given(
    st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 100_000), st.floats(0, 1e6)), min_size=1, max_size=60)
)
def test_whatever_was_measured_predictions_are_finite_and_not_negative(
    samples: list[tuple[int, int, float]],
) -> None:
    costs = Costs()
    for position, tokens, ms in samples:
        costs.prefilled(position, tokens, ms)
        costs.scored(position, tokens, ms)
        model = costs.model()
        for value in (costs.prefill_ms(0, 2000), costs.score_ms(2000, 100), model.c0, model.c1, model.c2, model.c3):
            assert math.isfinite(value)
            assert value >= 0
        assert MIN_CHUNK <= costs.chunk(position, 5.0) <= MAX_CHUNK


def test_the_same_work_for_ever_does_not_unsettle_the_fit() -> None:
    costs = fitted((0.4, 6.0, 3.0), (0.4, 6.0, 3.0))
    for _ in range(20_000):
        costs.prefilled(1024, 256, prefill_ms((0.4, 6.0, 3.0), 1024, 256))
    assert costs.prefill_ms(1024, 256) == pytest.approx(prefill_ms((0.4, 6.0, 3.0), 1024, 256), rel=0.01)
    assert costs.prefill_ms(0, 2048) == pytest.approx(prefill_ms((0.4, 6.0, 3.0), 0, 2048), rel=0.05)


@settings(max_examples=examples(20))
@given(extend=COEFFICIENTS, position=st.integers(0, 8192), budget=st.floats(0.1, 50))
def test_a_chunk_fits_its_budget_and_fills_it(extend: tuple[float, float, float], position: int, budget: float) -> None:
    costs = fitted(extend, (0.1, 1.0, 1.0), samples=120)
    chunk = costs.chunk(position, budget)
    assert chunk % MIN_CHUNK == 0
    assert MIN_CHUNK <= chunk <= MAX_CHUNK
    allowed = max(budget, 2 * costs.prefill_ms(position, 0))  # what a chunk of nothing takes, and as long for tokens
    assert costs.prefill_ms(position, chunk) <= allowed * (1 + 1e-6) or chunk == MIN_CHUNK
    if chunk < MAX_CHUNK:
        assert costs.prefill_ms(position, chunk + MIN_CHUNK) > allowed * (1 - 1e-6)


@pytest.mark.parametrize("coefficients", [(0.0, 0.0, 0.0), (0.0, 1e-300, 0.0), (0.0, 0.0, 1e-300), (9.0, 1.0, 0.0)])
def test_chunks_of_odd_fits(coefficients: tuple[float, float, float]) -> None:
    assert tokens_within(coefficients, 0, 5.0) == MAX_CHUNK


def test_a_dear_launch_is_shared_by_many_tokens() -> None:
    """With 2.4 ms a chunk and 0.1 ms for 1,000 tokens, a bound of 1 ms once gave chunks of 32."""
    extend = (2.4, 0.1 / 1000 / SCALE, 0.0)
    assert tokens_within(extend, 0, 1.0) == MAX_CHUNK
    assert tokens_within((2.4, 2.4 / 1000 / SCALE, 0.0), 0, 1.0) == 1000 - 1000 % MIN_CHUNK
