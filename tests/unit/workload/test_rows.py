"""A log's ids become rows of the checkpoint's table by one mapping, wherever the two meet."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from relaygr_stream.errors import InputError, ModelError
from relaygr_stream.models.item_ids import ITEMS_FILE
from relaygr_stream.models.loading import save_checkpoint
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Model
from relaygr_stream.workload.logs import InteractionLog
from relaygr_stream.workload.publish import LogOptions, PublishOptions, prepare
from relaygr_stream.workload.replay import ReplayOptions
from relaygr_stream.workload.report import LiveLine
from relaygr_stream.workload.rows import read_log_for
from tests.unit.models.small_models import small_model

NAMES = ["7", "07", "007", "B1", "900000"]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    save_checkpoint(small_model(vocab=len(NAMES)), tmp_path / "ck")
    (tmp_path / "ck" / ITEMS_FILE).write_text(json.dumps(NAMES))
    return Model(checkpoint=str(tmp_path / "ck"))


def log_of(tmp_path: Path, items: list[str]) -> Path:
    path = tmp_path / "log.csv"
    lines = [f"u,{item},{1_400_000_000 + at}\n" for at, item in enumerate(items)]
    path.write_text("user,item,time\n" + "".join(lines))
    return path


def test_replay_sends_rows(tmp_path: Path, model: Model) -> None:
    options = ReplayOptions(min_history=2, suffix=0, candidates=2, requests=3)
    source = LogOptions(path=log_of(tmp_path, ["900000", "7", "900000", "7", "900000"]), replay=options)
    settings = replace(Settings(), model=model)
    workload = prepare(PublishOptions(source=source), settings, LiveLine(), asyncio.Event())
    assert workload.log is not None
    assert workload.log.items.tolist() == [4, 0, 4, 0, 4]


def test_ids_are_text_in_training_and_here(tmp_path: Path, model: Model) -> None:
    assert read_log_for(log_of(tmp_path, NAMES), model).items.tolist() == [0, 1, 2, 3, 4]
    assert read_log_for(log_of(tmp_path, ["7"] * 3), model).items.tolist() == [0, 0, 0]


def test_an_id_without_a_row_is_left_out_counted_and_said(tmp_path: Path, model: Model) -> None:
    log = read_log_for(log_of(tmp_path, ["7"] * 19 + ["8"]), model)
    assert len(log) == 19
    assert log.offsets.tolist() == [0, 19]
    assert "1 interactions are left out: the model has no row for 1 of its items, '8'" in log.facts()
    with pytest.raises(InputError, match="no row for 1 of its items, '8'"):
        read_log_for(log_of(tmp_path, ["7"] * 8 + ["8"] * 2), model)


def test_without_a_list_the_ids_are_the_rows(tmp_path: Path, model: Model) -> None:
    (Path(model.checkpoint) / ITEMS_FILE).unlink()
    assert read_log_for(log_of(tmp_path, ["4"] * 19 + ["5"]), model).items.tolist() == [4] * 19


def test_names_that_no_list_knows_are_said(tmp_path: Path, model: Model) -> None:
    (Path(model.checkpoint) / ITEMS_FILE).unlink()
    path = tmp_path / "names.csv"
    path.write_text("user,item,event,time\nu,shoe,view,1400000000\nu,hat,buy,1400000001\n")
    log = read_log_for(path, model)
    facts = log.facts()
    assert log.item_names == ("shoe", "hat"), "whoever stores them sees that they are none of the model's"
    assert "its items are names, numbered anew" in facts
    assert "its actions are names, numbered anew" in facts


# ---- actions ----

STARS = ["", "0.5", "1", "1.5", "2", "2.5", "3", "3.5", "4", "4.5", "5"]  # of a training on half stars


def rated(tmp_path: Path, actions: list[str], trained: list[str] | None) -> InteractionLog:
    save_checkpoint(small_model(vocab=9, actions=tuple(trained or ())), tmp_path / "ck")
    path = tmp_path / "ratings.csv"
    lines = [f"u,1,{action},{1_400_000_000 + at}\n" for at, action in enumerate(actions)]
    path.write_text("user,item,rating,time\n" + "".join(lines))
    return read_log_for(path, Model(checkpoint=str(tmp_path / "ck")))


def test_actions_have_their_trainings_rows_whatever_else_a_file_has(tmp_path: Path) -> None:
    for stars in (["1", "2", "5", "4.0"], ["0.5", "2", "5", "4"]):
        log = rated(tmp_path, stars, STARS)
        assert [STARS[row] for row in log.actions.tolist()] == [f"{float(text):g}" for text in stars]
        assert not log.note


def test_named_actions_have_their_trainings_rows_in_any_order(tmp_path: Path) -> None:
    assert rated(tmp_path, ["buy", "view", "buy"], ["", "view", "", "buy"]).actions.tolist() == [3, 1, 3]


@pytest.mark.parametrize(
    ("trained", "actions", "rows", "said"),
    [
        (STARS, ["0", "3", "7", "9", "7"], [0, 6, 0, 0, 0], "3 interactions are sent without their action.* 2 actions"),
        ([""], ["3", "4"], [0, 0], "'3' among them; it was trained with none"),
        (["", "view"], ["view", "cart"], [1, 0], "'cart' among them; it was trained with 'view'"),
    ],
)
def test_an_action_without_a_row_is_sent_as_none_counted_and_said(
    tmp_path: Path, trained: list[str], actions: list[str], rows: list[int], said: str
) -> None:
    log = rated(tmp_path, actions, trained)
    assert log.actions.tolist() == rows
    assert re.search(said, log.facts())


def test_a_checkpoint_that_does_not_name_its_actions_gets_the_files_numbers(tmp_path: Path) -> None:
    log = rated(tmp_path, ["0.5", "2"], None)
    assert (log.actions.tolist(), log.halves, log.note) == ([1, 4], True, "")


def test_an_action_has_one_row(tmp_path: Path) -> None:
    save_checkpoint(small_model(vocab=9, actions=("", "view", "", "buy")), tmp_path / "ck")
    config = tmp_path / "ck" / "config.json"
    config.write_text(config.read_text().replace("buy", "view"))
    with pytest.raises(ModelError, match="`actions` has a name twice"):
        read_log_for(log_of(tmp_path, ["1"]), Model(checkpoint=str(tmp_path / "ck")))
