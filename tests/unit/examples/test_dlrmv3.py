"""What length buys on DLRMv3's traffic: the measures by hand, and that the training asks what may be known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from examples.dlrmv3.__main__ import Figures, Options, chances, enough_of, loss_of, main, newest, users_of
from examples.dlrmv3.measures import auc, entropies, ndcg
from examples.movielens.recipe import new_model

OPTIONS = Options(users=6, epochs=1, seed=3)
USERS = users_of(OPTIONS.workload())


def test_measures_are_those_by_hand() -> None:
    predicted, liked = np.array([0.9, 0.8, 0.8, 0.1]), np.array([True, False, True, False])
    assert auc(predicted, liked) == pytest.approx((1 + 1 + 0.5 + 1) / 4)
    of_users = entropies(np.stack([np.full(4, 0.5), predicted]), np.stack([liked, liked]))
    assert of_users.tolist() == pytest.approx([1.0, -np.log([0.9, 0.2, 0.8, 0.9]).mean() / np.log(2)])
    rising, first, last = np.arange(12.0), np.arange(12) == 10, np.arange(12) == 1
    assert ndcg(np.stack([rising, rising, rising]), np.stack([first, last, first | last])).tolist() == pytest.approx(
        [1 / np.log2(3), 0.0, 1 / np.log2(3) / (1 + 1 / np.log2(3))]
    )


def test_chances_follow_what_is_known_alone() -> None:
    """The newest behaviours decide, whatever stands beside them in a batch."""
    model = new_model(OPTIONS.recipe(), OPTIONS.workload().items)
    found = chances(model, USERS, 25)
    alone = np.concatenate([chances(model, [user], 25) for user in USERS])
    np.testing.assert_allclose(found, alone, atol=1e-5)
    cut = [user._replace(history=newest(user.history, 25)) for user in USERS]
    np.testing.assert_array_equal(chances(model, cut, 800), found)


def test_a_loss_asks_by_what_stands_before() -> None:
    """The newest behaviour's rating is asked for, and told to nobody; the oldest one's is told to all behind it."""
    recipe = replace(OPTIONS.recipe(), dropout=0.0)
    model = new_model(recipe, OPTIONS.workload().items)
    model.embedding.action.requires_grad_(False).normal_(0, 0.5)
    window = newest(USERS[0].history, 30)

    def loss(at: int, rating: float) -> float:
        ratings = window.ratings.copy()
        ratings[at] = rating
        return loss_of(model, [window._replace(ratings=ratings)], recipe, np.random.default_rng(1)).item()

    assert loss(29, 1.0) == loss(29, 3.0)
    assert loss(29, 1.0) != loss(29, 4.0)
    assert loss(0, 1.0) != loss(0, 3.0)


def test_a_quick_run_ends_with_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--users", "4", "--epochs", "1", "--threads", "1"]) == 0
    *_, verdict = capsys.readouterr().out.splitlines()
    assert verdict.startswith("more behaviours predict better up to ")


def test_enough_is_the_length_that_no_longer_one_beats() -> None:
    draw = np.random.default_rng(1)
    noise = draw.normal(0, 0.01, 500)

    def of(entropy: float) -> Figures:
        return Figures(0.5, noise, entropy + draw.normal(0, 0.01, 500) + noise)

    assert enough_of({10: of(0.7), 50: of(0.5), 100: of(0.4), 800: of(0.45)}) == 100
    assert enough_of({10: of(0.5), 50: of(0.5)}) == 10
    assert enough_of({10: of(0.5), 50: of(0.4)}) == 50
