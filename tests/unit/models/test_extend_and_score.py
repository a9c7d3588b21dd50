"""The model's two operations, as properties over lengths, chunkings, batches and shapes of attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.errors import ModelError
from relaygr_stream.models.api import RankingModel, ScoreInput
from relaygr_stream.models.attention import CPU_BLOCK_ROWS
from relaygr_stream.models.check.probe import HALF_LIMIT
from relaygr_stream.models.hstu_model import HSTUModel
from tests.properties import examples
from tests.unit.models.small_models import (
    INCREMENTAL,
    MORE,
    deviation,
    empty_region,
    full_scores,
    held,
    prefilled,
    random_items,
    random_tokens,
    small_model,
    splits,
)

MODELS = [small_model(**changes) for changes in INCREMENTAL]
models = st.sampled_from(MODELS)
seeds = st.integers(0, 2**32 - 1)
#: The exactness bound. Products of other shapes round differently: up to 3e-6 was seen, a leak would show as 1e-2.
ROUNDING = 1e-5
#: No deadline: other processes share the machine.
PROPERTY = settings(max_examples=examples(60))


def test_the_model_keeps_the_protocol() -> None:
    assert isinstance(MODELS[0], RankingModel)


@PROPERTY
@given(models, splits(), seeds)
def test_extending_in_any_chunks_is_extending_at_once(
    model: HSTUModel, split: tuple[int, tuple[int, ...]], seed: int
) -> None:
    length, bounds = split
    tokens = random_tokens(np.random.default_rng(seed), length)
    once, chunked = prefilled(model, tokens), prefilled(model, tokens, slack=3, chunks=bounds)
    assert chunked.length == length
    assert deviation(held(chunked), held(once)) <= 1e-5


@PROPERTY
@given(models, splits(), st.integers(1, 7), seeds)
def test_a_relayed_score_is_the_score_of_full_inference(
    model: HSTUModel, split: tuple[int, tuple[int, ...]], count: int, seed: int
) -> None:
    length, bounds = split
    random = np.random.default_rng(seed)
    tokens, candidates = random_tokens(random, length), random_items(random, count + MORE)
    prefix = bounds[-1] if bounds else length
    region = prefilled(model, tokens.slice(0, prefix), slack=2, chunks=bounds[:-1])
    before = held(region).clone()
    (relayed,) = model.score([ScoreInput(region, tokens.slice(prefix, length), candidates[:count])])
    assert relayed.shape == (count, 2)
    assert relayed.dtype == torch.float32
    full = full_scores(model, tokens, candidates)
    assert deviation(relayed, full[:count], full[count:]) <= 1e-5
    assert region.length == prefix
    assert torch.equal(held(region), before)


@PROPERTY
@given(models, st.lists(st.tuples(splits(12), st.integers(1, 5)), min_size=1, max_size=4), seeds, st.randoms())
def test_a_ranking_does_not_depend_on_its_neighbours(
    model: HSTUModel, shapes: list[tuple[tuple[int, tuple[int, ...]], int]], seed: int, order: Any
) -> None:
    random = np.random.default_rng(seed)
    batch = []
    for (length, bounds), count in shapes:
        tokens, prefix = random_tokens(random, length), bounds[0] if bounds else length
        region = prefilled(model, tokens.slice(0, prefix))
        batch.append(ScoreInput(region, tokens.slice(prefix, length), random_items(random, count)))
    alone = [model.score([one])[0] for one in batch]
    places = list(range(len(batch)))
    order.shuffle(places)
    for place, found in zip(places, model.score([batch[place] for place in places]), strict=True):
        # Relative to the largest score of the whole batch: a single candidate's two may nearly cancel.
        assert deviation(found, alone[place], torch.cat(alone)) <= ROUNDING
    # With neighbours of the same shapes and other contents, every product has the same shape: not one bit may differ.
    others = [
        ScoreInput(
            prefilled(model, random_tokens(random, one.kv.length)),
            random_tokens(random, len(one.suffix)),
            random_items(random, len(one.candidates)),
        )
        for one in batch[1:]
    ]
    assert torch.equal(model.score([batch[0], *others])[0], model.score(batch)[0])


@PROPERTY
@given(models, st.integers(0, 12), st.integers(0, 6), st.integers(2, 9), seeds)
def test_candidates_do_not_see_each_other(model: HSTUModel, prefix: int, suffix: int, count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    region, later = prefilled(model, random_tokens(random, prefix)), random_tokens(random, suffix)
    candidates = random_items(random, count)
    (together,) = model.score([ScoreInput(region, later, candidates)])
    kept = random.permutation(count)[: random.integers(1, count + 1)]
    (some,) = model.score([ScoreInput(region, later, candidates[kept])])
    # Relative to the largest score of the whole ranking: of one candidate's two, both may nearly cancel.
    alone = together.clone()
    alone[kept] = some
    assert deviation(alone, together) <= ROUNDING
    # What stands in another's place does not matter, to the bit: the products' shapes stay the same.
    others = candidates.copy()
    others[kept[0]] += 1
    (changed,) = model.score([ScoreInput(region, later, others)])
    rest = np.delete(np.arange(count), kept[0])
    assert torch.equal(changed[rest], together[rest])
    assert not torch.equal(changed[kept[0]], together[kept[0]])


@PROPERTY
@given(models, splits(), st.integers(0, 4), st.integers(1, 9), seeds)
def test_room_behind_the_tokens_is_never_read(
    model: HSTUModel, split: tuple[int, tuple[int, ...]], suffix: int, slack: int, seed: int
) -> None:
    length, bounds = split
    random = np.random.default_rng(seed)
    tokens, later, candidates = random_tokens(random, length), random_tokens(random, suffix), random_items(random, 3)
    exact, roomy = prefilled(model, tokens, chunks=bounds), prefilled(model, tokens, slack=slack, chunks=bounds)
    assert deviation(held(roomy), held(exact)) <= 1e-6
    scores = [model.score([ScoreInput(region, later, candidates)])[0] for region in (exact, roomy)]
    assert deviation(scores[1], scores[0]) <= 1e-6
    written = sum(part[:, length:].numel() for i in range(3) for part in roomy.layer(i))
    untouched = sum(int(part[:, length:].isnan().sum()) for i in range(3) for part in roomy.layer(i))
    assert untouched == written


@pytest.mark.parametrize("changes", INCREMENTAL)
def test_long_histories_in_more_blocks_than_one(changes: dict[str, Any]) -> None:
    model, random = small_model(**changes), np.random.default_rng(0)
    tokens, candidates = random_tokens(random, 700), random_items(random, 300)
    region = prefilled(model, tokens.slice(0, 430), chunks=(301,))
    (relayed,) = model.score([ScoreInput(region, tokens.slice(430, 700), candidates)])
    assert deviation(relayed, full_scores(model, tokens, candidates)) <= 1e-5
    # Against a few rows at a time: blocks of rows leave nothing out and add nothing.
    more = tokens.slice(0, CPU_BLOCK_ROWS + 20)
    stepwise = prefilled(model, more, chunks=tuple(range(1, len(more), 9)))
    assert deviation(held(stepwise), held(prefilled(model, more))) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_relay_is_no_further_from_the_truth(dtype: torch.dtype) -> None:
    random = np.random.default_rng(5)
    exact, half = small_model(), small_model().place(torch.device("cpu"), dtype)
    relayed_errors, full_errors = [], []
    for _ in range(12):
        tokens, candidates = random_tokens(random, 60), random_items(random, 24)
        truth = full_scores(exact, tokens, candidates)
        region = prefilled(half, tokens.slice(0, 50), slack=3, chunks=(7, 31))
        (relayed,) = half.score([ScoreInput(region, tokens.slice(50, 60), candidates)])
        assert relayed.dtype == torch.float32
        relayed_errors.append((relayed - truth).flatten())
        full_errors.append((full_scores(half, tokens, candidates) - truth).flatten())
    relayed_rms, full_rms = (
        float(torch.cat(errors).square().mean().sqrt()) for errors in (relayed_errors, full_errors)
    )
    assert 0 < full_rms < 0.1
    assert relayed_rms <= HALF_LIMIT * full_rms


def test_a_failed_extend_leaves_the_length() -> None:
    model, random = MODELS[0], np.random.default_rng(0)
    region = empty_region(model, 5)
    model.prefill(region, random_tokens(random, 4))
    with pytest.raises(ValueError, match="2 tokens behind 4 do not fit into a region of 5"):
        model.prefill(region, random_tokens(random, 2))
    assert region.length == 4


def test_nothing_to_extend_and_nothing_to_score() -> None:
    model = MODELS[0]
    region = empty_region(model, 0)
    model.prefill(region, random_tokens(np.random.default_rng(0), 0))
    assert region.length == 0
    assert model.score([]) == []


def test_no_gradients_are_recorded() -> None:
    model, random = MODELS[0], np.random.default_rng(0)
    with torch.enable_grad():
        region = prefilled(model, random_tokens(random, 3))
        (scores,) = model.score([ScoreInput(region, random_tokens(random, 0), random_items(random, 2))])
    assert not scores.requires_grad
    assert not region.storage.requires_grad


def test_contextual_models_take_their_history_at_once_and_no_suffix() -> None:
    model, random = small_model(contextual_seq_len=3, max_attn_len=4), np.random.default_rng(0)
    tokens, candidates = random_tokens(random, 12), random_items(random, 4)
    assert not model.incremental
    region = prefilled(model, tokens, slack=4)
    (scores,) = model.score([ScoreInput(region, tokens.slice(0, 0), candidates)])
    assert deviation(scores, full_scores(model, tokens, candidates)) <= 1e-5
    with pytest.raises(ModelError, match=r"contextual_seq_len = 3 .*holds 12 tokens already"):
        model.prefill(region, random_tokens(random, 1))
    with pytest.raises(ModelError, match=r"contextual_seq_len = 3 .*takes no suffix"):
        model.score([ScoreInput(region, random_tokens(random, 1), candidates)])
    assert region.length == 12
