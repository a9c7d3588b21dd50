from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.movielens.data import DataError, Histories, History
from examples.movielens.evaluate import TEST, evaluate, quality
from examples.movielens.recipe import Recipe
from examples.movielens.train import Run, batches, main, train
from relaygr_stream.models.item_ids import ITEMS_FILE
from relaygr_stream.models.loading import load_checkpoint

ITEMS = 60
BACK = 3  # the next item depends on the one so many behaviours back
CHAIN = 7
SMALL = Recipe(
    dim=32, scale_tokens=8, longest=24, window=24, long_share=0.0, long_epochs=0, positions=4, negatives=8,
    batch_tokens=512, epochs=12, learning_rate=1.5e-2, averaging=0.1, dropout=0.0,
    validation_users=60, validate_every=12,
)  # fmt: skip


def made_up(users: int) -> Histories:
    """Histories in which the next item is a fixed successor of the one BACK behaviours before it; no item twice."""
    draw = np.random.default_rng(7)
    cycle = draw.permutation(ITEMS)
    found = []
    for user in range(users):
        # Chains of CHAIN items that never meet: distinct starts, moved apart, turned.
        starts = np.sort(draw.choice(ITEMS - BACK * CHAIN, BACK, replace=False)) + CHAIN * np.arange(BACK)
        starts = draw.permutation(starts) + draw.integers(ITEMS)
        places = [(start + step) % ITEMS for step in range(CHAIN) for start in starts]
        # Of different lengths: training sees every position that a test has.
        items = cycle[np.array(places[: int(draw.integers(10, 17)) if user % 2 else BACK * CHAIN])]
        found.append(History(str(user), items, np.zeros_like(items), np.zeros_like(items)))
    return Histories(found, [str(item) for item in range(ITEMS)], has_times=False)


def test_a_structure_that_reaches_back_is_found_and_a_history_cut_before_it_ranks_as_chance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = made_up(300)
    train(data, SMALL, tmp_path, resume=False)
    assert re.search(r"epoch 12 HR@10 1\.0000, NDCG@10 [01]\.\d+; popularity HR@10 0", said := capsys.readouterr().out)
    assert "too short" not in said
    model = load_checkpoint(tmp_path)
    shorter = data.users[1::4]
    whole = quality(evaluate(model, shorter, ITEMS, 16, TEST))
    cut = quality(evaluate(model, shorter, ITEMS, BACK - 1, TEST))
    assert whole.ndcg > 0.9
    assert cut.ndcg < 0.5


def test_too_few_epochs_for_the_catalogue_are_called_so_beside_popularity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(made_up(60), replace(SMALL, epochs=1), tmp_path, resume=False)
    said = capsys.readouterr().out
    assert re.search(r"validation, 60 users: epoch 1 HR@10 \S+, NDCG@10 \S+; popularity HR@10 \S+, NDCG@10 \S+", said)
    assert "--epochs 1 was too short for 60 items and" in said
    assert "not clearly better than popularity" in run.against_popularity()


def test_windows_never_hold_the_two_behaviours_that_are_held_out() -> None:
    counts = (4, 9, 40)
    users = [History("u", 100 * count + np.arange(count), np.zeros(count, int), np.arange(count)) for count in counts]
    seen: set[int] = set()
    for seed in range(50):
        for batch in batches(users, SMALL, np.random.default_rng(seed)):
            seen.update(batch.items.flatten().tolist())
    assert seen - {0} == {100 * count + place for count in counts for place in range(count - 2)}  # 0: padding


def test_all_windows_of_the_last_epochs_are_as_long_as_the_longest() -> None:
    users = [History("u", np.arange(count), np.zeros(count, int), np.arange(count)) for count in (9, 40, 400)]
    recipe = replace(SMALL, window=20, longest=100)

    def lengths(*, long: bool) -> list[int]:
        made = batches(users, recipe, np.random.default_rng(1), long=long)
        return sorted(int(length) for batch in made for length in batch.lengths)

    assert lengths(long=False) == [7, 20, 20]
    assert lengths(long=True) == [7, 38, 100]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    data = made_up(40)
    recipe = Recipe(**{**SMALL.__dict__, "epochs": 4, "ranking_epochs": 4, "dropout": 0.2, "validate_every": 2})
    whole, first, second = (Run(data, recipe, tmp_path / name) for name in ("whole", "parts", "parts"))
    for run in (whole, first):
        run.folder.mkdir()
    figures = list(whole.epochs())
    list(first.epochs(until=3))
    second.resume()
    rest = list(second.epochs())
    assert [one["ranking"] for one in rest] == [one["ranking"] for one in figures[3:]]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    for name, value in whole.average.items():
        assert torch.equal(value, second.average[name]), name


def test_a_run_of_another_recipe_or_other_data_is_not_resumed(tmp_path: Path) -> None:
    data = made_up(40)
    recipe = Recipe(**{**SMALL.__dict__, "epochs": 1})
    list(Run(data, recipe, tmp_path).epochs())
    with pytest.raises(DataError, match=r"dim = 32, now 64"):
        Run(data, Recipe(**{**recipe.__dict__, "dim": 64}), tmp_path).resume()
    with pytest.raises(DataError, match=r"interactions = "):
        Run(made_up(50), recipe, tmp_path).resume()
    with pytest.raises(DataError, match="go on with --resume"):
        train(data, recipe, tmp_path, resume=False)
    with pytest.raises(DataError, match="no run to resume"):
        Run(data, recipe, tmp_path / "absent").resume()


def test_the_command_writes_a_checkpoint_the_items_names_and_a_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{user} {user * 3 + number % 7 + 100}" for user in range(9) for number in range(8)]
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(lines), encoding="utf-8")
    out = tmp_path / "out"
    arguments = ["--data", str(file), "--out", str(out), "--epochs", "2", "--dim", "16", "--threads", "1"]
    assert main(arguments) == 0
    names = json.loads((out / ITEMS_FILE).read_text(encoding="utf-8"))
    assert load_checkpoint(out).config.vocab == len(names)
    assert names[0] == "100"
    assert "epoch   2/2" in capsys.readouterr().out
    assert "9 users" in (out / "README.md").read_text(encoding="utf-8")
    assert main(arguments) == 1
    assert "error: " in capsys.readouterr().err
