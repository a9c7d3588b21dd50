from __future__ import annotations

import numpy as np
import pytest
import torch

from examples.movielens import forward, train
from examples.movielens.data import History
from examples.movielens.evaluate import empty_region, scores_of
from relaygr_stream.models.hstu_model import HSTUModel

ITEMS = 30
LONGEST = 20


@pytest.fixture
def model() -> HSTUModel:
    """A model in training whose every row differs from 0, so that a forgotten one shows."""
    made = train.new_model(train.Recipe(dim=16, longest=LONGEST, scale_tokens=8), ITEMS)
    with torch.no_grad():
        for value in made.parameters():
            value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    return made


def made_up(*lengths: int) -> list[History]:
    draw = np.random.default_rng(5)
    return [
        History(
            str(length),
            draw.integers(0, ITEMS, length),
            draw.integers(0, 6, length),
            1_000_000 + np.cumsum(draw.integers(0, 5000, length)),
        )
        for length in lengths
    ]


def served(model: HSTUModel) -> HSTUModel:
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return HSTUModel(model.config).load_weights(weights, note="")


def test_training_at_position_t_equals_score_on_the_prefix_before_t(model: HSTUModel) -> None:
    histories = made_up(7, 12, LONGEST + 4)  # the longest has positions past the table
    kv = forward.behaviours(model, train.padded(histories))
    reference = served(model)
    region = empty_region(reference, LONGEST + 4)
    candidates = np.array([3, 0, ITEMS - 1])
    for row, history in enumerate(histories):
        for position in range(1, len(history) + 1):
            items = torch.from_numpy(candidates).expand(3, -1)
            out = forward.rows(model, kv, torch.full((3, 3), position), items)
            trained = forward.logits(model, out)[row].detach().numpy()
            expected = scores_of(reference, history.slice(0, position), candidates, region)
            np.testing.assert_allclose(trained, expected, rtol=0, atol=2e-5)


def test_candidates_in_training_do_not_see_each_other_or_later_behaviours(model: HSTUModel) -> None:
    (history,) = made_up(9)
    later = History(history.user, history.items.copy(), history.actions, history.times)
    later.items[5:] = (later.items[5:] + 1) % ITEMS
    positions = torch.tensor([[5, 5]])

    def score(behaviours: History, items: list[int]) -> torch.Tensor:
        kv = forward.behaviours(model, train.padded([behaviours]))
        return forward.logits(model, forward.rows(model, kv, positions, torch.tensor([items])))[0, 0]

    assert score(history, [3, 4]) == score(history, [3, 9])
    assert score(history, [3, 4]) == score(later, [3, 4])
    assert score(history, [3, 4]) != score(history, [4, 3])


def test_gradients_reach_every_weight_that_the_data_names(model: HSTUModel) -> None:
    loss = sum(train.losses(model, train.padded(made_up(7, 12)), train.Recipe(dropout=0.0, negatives=4)))
    assert isinstance(loss, torch.Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    missing = {name for name, value in model.named_parameters() if value.grad is None or not value.grad.any()}
    assert missing <= {"head.bias"}  # a softmax does not change with it
