from __future__ import annotations

import numpy as np
import pytest
import torch

from examples.movielens import catalogue, forward, train
from examples.movielens.data import History
from examples.movielens.evaluate import scores_of
from examples.movielens.losses import losses
from examples.movielens.recipe import Recipe, new_model
from relaygr_stream.models.api import KVRegion
from relaygr_stream.models.hstu_model import HSTUModel

ITEMS = 30
LONGEST = 20


@pytest.fixture(params=[(0, 0), (7, 0), (30, 60)], ids=["absolute", "distances", "distances and times"])
def model(request: pytest.FixtureRequest) -> HSTUModel:
    """A model in training whose every row differs from 0, so that a forgotten one shows."""
    positions, times = request.param
    shape = Recipe(dim=16, heads=2, longest=LONGEST, scale_tokens=8, relative_positions=positions, relative_times=times)
    made = new_model(shape, ITEMS, has_times=True)
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
    batch = train.padded(histories)
    kv = forward.behaviours(model, batch)
    reference = served(model)
    region = KVRegion.new(reference.layout, LONGEST + 4)
    candidates = np.array([3, 0, ITEMS - 1])
    for row, history in enumerate(histories):
        for position in range(1, len(history) + 1):
            items = torch.from_numpy(candidates).expand(3, -1)
            out = forward.rows(model, kv, torch.full((3, 3), position), items, batch.times)
            trained = forward.logits(model, out)[row].detach().numpy()
            expected = scores_of(reference, history.slice(0, position), candidates, region)
            np.testing.assert_allclose(trained, expected, rtol=0, atol=2e-5)


def test_candidates_in_training_do_not_see_each_other_or_later_behaviours(model: HSTUModel) -> None:
    (history,) = made_up(9)
    later = History(history.user, history.items.copy(), history.actions, history.times)
    later.items[5:] = (later.items[5:] + 1) % ITEMS
    positions = torch.tensor([[5, 5]])

    def score(behaviours: History, items: list[int]) -> torch.Tensor:
        batch = train.padded([behaviours])
        kv = forward.behaviours(model, batch)
        return forward.logits(model, forward.rows(model, kv, positions, torch.tensor([items]), batch.times))[0, 0]

    assert score(history, [3, 4]) == score(history, [3, 9])
    assert score(history, [3, 4]) == score(later, [3, 4])
    assert score(history, [3, 4]) != score(history, [4, 3])


def steps(recipe: Recipe, count: int, *, ranking: bool) -> HSTUModel:
    """A model after some steps of training, as `Run` makes them."""
    model = new_model(recipe, ITEMS, has_times=True)
    catalogue.restrict(model)
    optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad], lr=1e-2)
    for _ in range(count):
        found = losses(model, train.padded(made_up(7, 12, 15)), recipe, ranking=ranking)
        optimizer.zero_grad()
        torch.stack(list(found.values())).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        catalogue.hold(model)
    return model


SHORT = Recipe(dim=16, heads=2, longest=LONGEST, scale_tokens=8, dropout=0.0, negatives=4, catalogue=20)


def test_the_catalogue_is_ranked_as_the_served_model_scores_it() -> None:
    model = steps(SHORT, 30, ranking=False)
    (history,) = made_up(14)
    batch = train.padded([history])
    gates, bias = catalogue.gates(model)
    found = catalogue.histories(model, *forward.behaviours(model, batch)[-1], batch.times) @ gates.T + bias
    reference, region = served(model), KVRegion.new(served(model).layout, LONGEST)
    for position in range(1, len(history)):
        expected = scores_of(reference, history.slice(0, position), np.arange(ITEMS), region)
        order = found[0, position - 1].argsort().numpy()
        assert np.diff(expected[order]).min() > -1e-4, position  # rises along the catalogue's order
        assert np.ptp(expected) > 0.5


def test_the_ranking_loss_lets_candidates_ask_for_what_they_need() -> None:
    model = steps(SHORT, 3, ranking=True)
    last = model.stack.stu_layers()[-1]
    heads, dv, dqk = last.shape
    assert last.uvqk_weight[:, 2 * heads * dv : 2 * heads * dv + heads * dqk].abs().max() > 1e-3
    assert last.output_weight[:, 1:].abs().max() > 1e-3
