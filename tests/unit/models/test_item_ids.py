"""Ids that a checkpoint lists: the model finds their rows, whatever numbers they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from relaygr_stream.errors import ConfigError, ModelError
from relaygr_stream.models.api import ScoreInput, Tokens
from relaygr_stream.models.hstu_model import HSTUConfig, HSTUModel
from relaygr_stream.models.item_ids import ITEMS_FILE, ItemIds
from relaygr_stream.models.loading import load_checkpoint, random_model, save_checkpoint
from relaygr_stream.settings import Model
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.workload.rows import read_log_for
from tests.unit.models.small_models import prefilled

CONFIG = HSTUConfig(
    layers=1, dim=8, heads=2, dqk=4, dv=4, vocab=6, oov_rows=5, max_positions=32, scale_tokens=16, tasks=("click",)
)
IDS = [2**63 - 1, 0, 2**53 + 1, 2**32, 5, 2**31]
UNKNOWN = [1, 2, 3, 4, 2**53, 2**63 - 2]


def written(folder: Path, ids: list[Any] = IDS) -> tuple[HSTUModel, HSTUModel]:
    """The same weights, once by rows and once by ids."""
    save_checkpoint(random_model(CONFIG, 3), folder)
    by_rows = load_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"listed_items": True}))
    (folder / ITEMS_FILE).write_text(json.dumps(ids))
    return by_rows, load_checkpoint(folder)


def scores(model: HSTUModel, history: list[int], suffix: list[int], candidates: list[int]) -> torch.Tensor:
    def tokens(items: list[int]) -> Tokens:
        array = np.zeros((3, len(items)), np.int64)
        array[0], array[2] = items, 1000
        return Tokens(array)

    kv = prefilled(model, tokens(history))
    return model.score([ScoreInput(kv, tokens(suffix), np.array(candidates, np.int64))])[0]


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("texts", [False, True])
def test_a_listed_id_is_its_row(tmp_path: Path, texts: bool, kernels: Any) -> None:
    by_rows, by_ids = written(tmp_path, [str(each) for each in IDS] if texts else IDS)
    for model in (by_rows, by_ids):
        model.place(torch.device("cpu"), torch.float32, kernels)
    found = scores(by_ids, [IDS[2], IDS[0], IDS[5]], [IDS[4]], IDS)
    assert torch.equal(found, scores(by_rows, [2, 0, 5], [4], list(range(6))))
    assert by_ids.unknown_items == 0 and by_ids.version != by_rows.version


def test_any_other_id_is_hashed_even_one_that_looks_like_a_row(tmp_path: Path) -> None:
    by_rows, by_ids = written(tmp_path)
    found = scores(by_ids, UNKNOWN, [], UNKNOWN)
    hashed = [-1 - each for each in UNKNOWN]
    assert torch.equal(found, scores(by_rows, hashed, [], hashed))
    assert by_ids.unknown_items == by_rows.unknown_items == 2 * len(UNKNOWN)


def test_requests_are_not_changed() -> None:
    ids = ItemIds(np.array(IDS))
    tokens = Tokens.from_behaviours(Behaviours.from_arrays([*IDS, *UNKNOWN], [1] * 12, range(12)))
    before = tokens.array.copy()
    assert ids.tokens(tokens).array[0].tolist() == [*range(6), *(-1 - each for each in UNKNOWN)]
    assert (tokens.array == before).all()


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        (IDS[:5], "an id for each of 6 rows; 5 ids"),
        ([*IDS[:5], 5], "the id 5 stands there twice"),
        ([*IDS[:5], 2**63], "row 5 is '9223372036854775808', no integer within"),
        ([*IDS[:5], -1], "row 5 is '-1'"),
        ([*IDS[:5], "sku-7"], "row 5 is 'sku-7'"),
        ([*IDS[:5], 1.5], "cannot be read as a list"),
        ({"a": 1}, "cannot be read as a list"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(tmp_path: Path, ids: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        written(tmp_path, ids)


def test_what_is_not_listed_needs_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs `oov_rows`"):
        msgspec.structs.replace(CONFIG, oov_rows=0, listed_items=True)
    written(tmp_path)
    (tmp_path / ITEMS_FILE).unlink()
    with pytest.raises((ConfigError, ModelError), match="no such file"):
        load_checkpoint(tmp_path)


def test_a_log_keeps_its_ids(tmp_path: Path) -> None:
    written(tmp_path / "ck")
    rows = [f"u,{each},{1_700_000_000 + at}" for at, each in enumerate([*IDS, *UNKNOWN])]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,time", *rows]))
    log = read_log_for(tmp_path / "log.csv", Model(checkpoint=str(tmp_path / "ck")))
    assert log.items.tolist() == [*IDS, *UNKNOWN] and not log.note
