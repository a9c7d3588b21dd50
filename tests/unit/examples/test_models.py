"""The models of examples/models against their formulas, in float64 and without blocks or caches."""

from __future__ import annotations

import math
from itertools import cycle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from examples.models import contextual, retention
from examples.models.contextual import Contextual, ContextualConfig
from examples.models.retention import DECAY_EXPONENTS, Retention, RetentionConfig
from relaygr_stream.errors import ModelError
from relaygr_stream.models.api import ScoreInput
from relaygr_stream.models.transformer import NORM_EPS
from tests.properties import examples
from tests.unit.models.naive_transformer import naive_logits, softmax_attention, visible_in_order
from tests.unit.models.small_models import (
    MORE,
    deviation,
    empty_region,
    prefilled,
    random_items,
    random_tokens,
    splits,
)
from tests.unit.models.test_extend_and_score import seeds

CPU = torch.device("cpu")
SHAPE = {"layers": 3, "dim": 16, "heads": 2, "dqk": 8, "dv": 12, "vocab": 50, "max_positions": 40}
RETENTION = Retention(RetentionConfig(**SHAPE, tasks=("click", "like")), 3, CPU, torch.float32)
CONTEXTUAL = Contextual(ContextualConfig(**SHAPE, tasks=("click", "like"), context=3), 3, CPU, torch.float32)


class NaiveRetention:
    """o_t = S_tᵀ q_t / √dqk with S_t = γ S_{t-1} + k_t v_tᵀ, one row after the other; a candidate's S is its own.

    enlarged: by how much the norm of a head's outputs has enlarged their rounding, at most: nearly equal ones by 1,000.
    """

    def __init__(self, n: int, gammas: list[float]) -> None:
        self.enlarged = 0.0
        self._n = n
        self._heads = cycle(gammas)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        gamma, state, rows = next(self._heads), torch.zeros(q.shape[1], v.shape[1], dtype=torch.float64), []
        for row in range(len(q)):
            new = gamma * state + torch.outer(k[row], v[row])
            rows.append(new.T @ q[row] / math.sqrt(q.shape[1]))
            if row < self._n:
                state = new
        out = torch.stack(rows)
        width = (out.var(1, correction=0, keepdim=True) + NORM_EPS).sqrt()
        self.enlarged = max(self.enlarged, float(1 / width.min()))
        return (out - out.mean(1, keepdim=True)) / width


#: Some thirty roundings of float32.
ROUNDING = 2e-6


@pytest.mark.parametrize("block", [5, 128])
@hypothesis_settings(max_examples=examples(30))
@given(splits(), st.integers(1, 9), seeds)
def test_retention_is_its_recurrence_however_history_is_cut(
    block: int, split: tuple[int, tuple[int, ...]], count: int, seed: int
) -> None:
    length, bounds = split
    random = np.random.default_rng(seed)
    history, candidates = random_tokens(random, length), random_items(random, count + MORE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "BLOCK_ROWS", block)
        region = prefilled(RETENTION, history.slice(0, bounds[-1] if bounds else length), slack=3, chunks=bounds[:-1])
        (scores,) = RETENTION.score([ScoreInput(region, history.slice(region.length, length), candidates[:count])])
    first, last = DECAY_EXPONENTS
    x = RETENTION.embedding.rankings([(history, 0, candidates)])
    attend = NaiveRetention(length, [1 - 2**-first, 1 - 2**-last])
    expected = naive_logits(RETENTION, RETENTION.config, x, length, attend)
    assert deviation(scores, expected[:count], expected[count:]) <= max(1e-5, ROUNDING * attend.enlarged)


@pytest.mark.parametrize("block", [5, 256])
@hypothesis_settings(max_examples=examples(30))
@given(st.integers(0, 30), st.integers(0, 9), st.integers(1, 9), seeds)
def test_context_tokens_see_the_prefix_and_a_suffix_sees_them(
    block: int, prefix: int, suffix: int, count: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    history, candidates = random_tokens(random, prefix + suffix), random_items(random, count + MORE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contextual, "BLOCK_ROWS", block)
        region = prefilled(CONTEXTUAL, history.slice(0, prefix), slack=3)
        (scores,) = CONTEXTUAL.score([ScoreInput(region, history.slice(prefix, prefix + suffix), candidates[:count])])
    context = 3 if prefix else 0
    seen = visible_in_order(context + prefix + suffix, count + MORE)
    seen[:context, : context + prefix] = True
    x = torch.cat((CONTEXTUAL.embedding.context[:context], CONTEXTUAL.embedding.rankings([(history, 0, candidates)])))
    expected = naive_logits(
        CONTEXTUAL, CONTEXTUAL.config, x, context + len(history), lambda q, k, v: softmax_attention(q, k, v, seen)
    )
    assert deviation(scores, expected[:count], expected[count:]) <= 1e-5


def test_a_state_takes_the_same_bytes_for_any_length() -> None:
    assert {RETENTION.layout.nbytes(length) for length in (0, 1, 64, 4096)} == {3 * 2 * 8 * 12 * 4}
    per_token = 3 * 2 * (8 + 12) * 4
    assert CONTEXTUAL.layout.nbytes(64) == (64 + 3) * per_token


def test_a_prefix_that_context_tokens_saw_does_not_grow() -> None:
    random = np.random.default_rng(1)
    region = prefilled(CONTEXTUAL, random_tokens(random, 5), slack=5)
    with pytest.raises(ModelError, match="saw the 5 behaviours in this region"):
        CONTEXTUAL.prefill(region, random_tokens(random, 2))
    assert region.length == 5


@pytest.mark.parametrize("model", [RETENTION, CONTEXTUAL], ids=["retention", "contextual"])
def test_a_prefill_of_nothing_changes_nothing(model: Retention | Contextual) -> None:
    region = empty_region(model, 4)
    model.prefill(region, random_tokens(np.random.default_rng(1), 0))
    assert region.length == 0
    assert region.storage.isnan().all()
