"""Training a DlrmHSTU: its batches score as the served model does, in every form, and ask for nothing that is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.movielens.data import Histories, History
from examples.movielens.dlrm import RECIPE, auc_gain, forms, main
from examples.movielens.dlrm_task import ASKED, FEWEST, DlrmRun, batch_of, chances, logits

ITEMS = 30
#: Some beyond the longest window, one without a request.
COUNTS = (FEWEST, 55, FEWEST + 21, FEWEST - 1)
SMALL = replace(RECIPE, dim=16, longest=25)


def made_up(counts: tuple[int, ...] = COUNTS) -> Histories:
    draw = np.random.default_rng(5)
    users = [
        History(
            str(count),
            draw.integers(0, ITEMS, count),
            draw.integers(1, 6, count),
            880_000_000_000 + np.cumsum(draw.integers(0, 400_000_000, count)),
        )
        for count in counts
    ]
    return Histories(users, [str(item) for item in range(ITEMS)], True, ("", "1", "2", "3", "4", "5"))


def run_of(form: str, folder: Path) -> DlrmRun:
    data = made_up()
    return DlrmRun(data, SMALL, folder, forms(SMALL, len(data.users), ITEMS)[form])


@pytest.mark.parametrize("form", ["published", "gaps", "no times"])
def test_a_batch_scores_as_the_served_model(form: str, tmp_path: Path) -> None:
    run = run_of(form, tmp_path)
    with torch.no_grad():
        for value in run.model.parameters():
            value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    run.average = dict(run.model.named_parameters())
    requests = [run.request(user, stop) for user in run.users for stop in (1, 9, 11, 30)]  # both sides of the gate
    served = chances(run.served(), requests)
    with torch.no_grad():
        trained = torch.sigmoid(logits(run.model, batch_of(run.model, requests))).numpy()
    assert served.std() > 0.05
    np.testing.assert_allclose(trained, served, atol=1e-5)


def test_training_asks_each_rating_once_and_none_of_those_that_validation_and_test_ask(tmp_path: Path) -> None:
    run = run_of("gaps", tmp_path)
    assert sum(len(batch.liked) for batch in run.batches(np.random.default_rng(1))) > 0
    assert [len(run.data.users[user]) for user in run.users] == list(COUNTS[:3])
    for user in run.users:
        known = run.data.users[user]
        made = []
        for seed in range(50):
            stops = run.stops(user, np.random.default_rng(seed))
            assert len(set(stops)) == len(stops)
            assert all(abs(one - other) >= ASKED for one in stops for other in stops if one != other)
            made += stops
        assert max(made) + ASKED <= len(known) - 2 * ASKED
        validation, test = (run.last_requests(before)[user].asked.times for before in (ASKED, 0))
        np.testing.assert_array_equal(np.concatenate([validation, test]), known.times[-2 * ASKED :])


def write(file: Path, lines: list[str]) -> Path:
    file.write_text("\n".join([*lines, ""]))
    return file


def test_the_command_ends_with_both_forms_and_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    users = made_up((45, 60, 50)).users
    rows = [
        f"{user.user},{item},{rating},{at // 1000}"
        for user in users
        for item, rating, at in zip(user.items, user.actions, user.times, strict=True)
    ]
    file = write(tmp_path / "log.csv", ["user,item,rating,time", *rows])
    command = ["--data", str(file), "--out", str(tmp_path / "out"), "--quick"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert main(command) == 0
    again = capsys.readouterr().out
    assert first.count("epoch   2/2") == 3
    assert "epoch" not in again
    assert first[first.index("3 users, 10 candidates each") :] == again[again.index("3 users, 10 candidates each") :]
    assert main([*command, "--seed", "9"]) == 1
    assert "is of another run: seed = 1, now 9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["1 2"] * 50, "has no times"),
        (["user,item,time", *(f"1,{n},{10**9 + n}" for n in range(50))], "has no ratings"),
        (["user,item,action,time", *(f"1,{n},view,{10**9 + n}" for n in range(50))], "the action 'view'; expected"),
        (["user,item,rating,time", *(f"1,{n},9,{10**9 + n}" for n in range(50))], "the action '9'; expected ratings"),
        (["user,item,rating,time", *(f"1,{n},5,{10**9 + n}" for n in range(39))], "no user has 40 ratings"),
    ],
)
def test_a_log_without_what_the_task_needs_is_refused(
    lines: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--data", str(write(tmp_path / "log.csv", lines)), "--out", str(tmp_path / "out")]) == 1
    assert words in (said := capsys.readouterr().err)
    assert said.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_a_gain_in_auc_is_that_of_all_users_together() -> None:
    liked = np.tile([True, False], (40, 5))
    good, none = liked + np.random.default_rng(1).normal(0, 0.1, liked.shape), np.zeros(liked.shape)
    assert auc_gain(good, none, liked).mean == pytest.approx(0.5, abs=0.01)
    assert auc_gain(good, good, liked) == (0, 0, 0)
