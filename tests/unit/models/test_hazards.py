"""What breaks the reuse of prefix KV: for each hazard, a test that fails where the guard is gone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from relaygr_stream.models.api import ScoreInput, Tokens
from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.wire.behaviours import Behaviours
from tests.unit.models.naive_hstu import run_layer, valid_attention
from tests.unit.models.small_models import (
    SHAPE,
    deviation,
    full_scores,
    held,
    prefilled,
    random_items,
    random_tokens,
    small_model,
)


def naive_scores(model: HSTUModel, history: Tokens, candidates: npt.NDArray[np.int64]) -> torch.Tensor:
    """Scores by the dense float64 formulas, N and all, from the model's own embeddings and head."""
    config = model.config
    embedded = model.embedding.rankings([(history, 0, candidates)])
    x = embedded.double().numpy()
    mask = valid_attention(len(history), len(candidates), 0, 0)
    meta = {"H": config.heads, "dv": config.dv, "dqk": config.dqk, "N": config.scale_tokens, "group_norm": 0}
    for layer in model.stack.layers:
        weights = {name.replace("uvqk_bias", "uvqk_beta"): value.numpy() for name, value in layer.state_dict().items()}
        x, _, _ = run_layer(x, weights, meta, mask)
    return model.head.logits(torch.from_numpy(x[len(history) :]))


@pytest.mark.parametrize("length", [1, 5, 64, 200])
def test_n_is_a_constant_of_the_model(length: int) -> None:
    """N from a length would agree with itself, but not with the formula at any but one length."""
    model, random = small_model(), np.random.default_rng(length)
    history, candidates = random_tokens(random, length), random_items(random, 6)
    expected = naive_scores(model, history, candidates)
    assert deviation(full_scores(model, history, candidates), expected) <= 1e-5
    relayed = prefilled(model, history.slice(0, length // 2))
    (scores,) = model.score([ScoreInput(relayed, history.slice(length // 2, length), candidates)])
    assert deviation(scores, expected) <= 1e-5


def test_n_matters() -> None:
    random = np.random.default_rng(0)
    history, candidates = random_tokens(random, 20), random_items(random, 6)
    one, other = (full_scores(small_model(scale_tokens=n), history, candidates) for n in (32, 33))
    assert deviation(one, other) > 1e-4


def test_positions_count_from_the_start() -> None:
    """Appending behaviours leaves the K/V of earlier ones as they were."""
    model, random = small_model(), np.random.default_rng(0)
    history = random_tokens(random, 30)
    shorter, longer = prefilled(model, history.slice(0, 18)), prefilled(model, history)
    for index in range(SHAPE["layers"]):
        for before, after in zip(shorter.layer(index), longer.layer(index), strict=True):
            assert deviation(after[:, :18], before) <= 1e-5


def test_positions_matter_and_late_ones_share_the_last() -> None:
    model, random = small_model(), np.random.default_rng(0)
    tokens = random_tokens(random, 3)
    first, second = (model.embedding.behaviours(tokens, start) for start in (0, 1))
    assert deviation(first, second) > 1e-2
    last = SHAPE["max_positions"] - 1
    assert torch.equal(model.embedding.behaviours(tokens, last), model.embedding.behaviours(tokens, last + 100))


def test_candidates_stand_behind_the_history_wherever_it_was_cut() -> None:
    model, random = small_model(), np.random.default_rng(0)
    candidates, suffix = random_items(random, 2), random_tokens(random, 4)
    uncut = model.embedding.rankings([(suffix.slice(0, 0), 9, candidates)])
    cut = model.embedding.rankings([(suffix, 5, candidates)])
    assert torch.equal(cut[4:], uncut)
    assert torch.equal(cut[:4], model.embedding.behaviours(suffix, 5))


def test_time_enters_as_gaps_between_neighbours() -> None:
    """The same behaviours, all a year later, are the same tokens; and a later behaviour changes no earlier one."""
    items, actions, times = [5, 6, 7, 8], [1, 2, 1, 3], np.array([10, 500, 500, 90_000])
    now, later = (
        Tokens.from_behaviours(Behaviours.from_arrays(items, actions, times + shift)) for shift in (0, 31_536_000_000)
    )
    model, candidates = small_model(), np.array([3, 4])
    assert torch.equal(held(prefilled(model, now)), held(prefilled(model, later)))
    assert torch.equal(full_scores(model, now, candidates), full_scores(model, later, candidates))
    other = Tokens.from_behaviours(Behaviours.from_arrays(items, actions, times + np.array([0, 0, 100_000, 100_000])))
    assert deviation(held(prefilled(model, other)), held(prefilled(model, now))) > 1e-3


def test_another_request_in_the_batch_changes_nothing_however_large_its_values() -> None:
    model, random = small_model(), np.random.default_rng(0)
    quiet = ScoreInput(prefilled(model, random_tokens(random, 9)), random_tokens(random, 2), random_items(random, 3))
    loud_region = prefilled(model, random_tokens(random, 9))
    loud_region.storage.fill_(torch.inf)
    loud = ScoreInput(loud_region, random_tokens(random, 2), random_items(random, 3))
    alone = model.score([quiet])[0]
    for batch, place in (([quiet, loud], 0), ([loud, quiet], 1)):
        assert deviation(model.score(batch)[place], alone) <= 1e-5
