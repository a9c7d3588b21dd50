"""A log's ids become rows of the checkpoint's table by one mapping, wherever the two meet."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from relaygr_stream.errors import InputError
from relaygr_stream.models.loading import save_checkpoint
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Model
from relaygr_stream.workload.publish import LogOptions, PublishOptions, prepare
from relaygr_stream.workload.replay import ReplayOptions
from relaygr_stream.workload.report import LiveLine
from relaygr_stream.workload.rows import ITEMS_FILE, read_log_for
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
