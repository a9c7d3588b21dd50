"""The demo's packaged checkpoint: small, loadable, and better than chance on users that it never saw."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from relaygr_lab.demo.run import _shape
from relaygr_lab.processes import known_items

from examples.demo.requests import fresh_requests, offline_quality
from relaygr_stream.models.importer.sasrec import SasRecChoices, model_of
from relaygr_stream.models.loading import checkpoint_folder, load_checkpoint, save_checkpoint
from relaygr_stream.settings.load import load_settings
from relaygr_stream.settings.worker import Model
from tests.unit.models.naive_sasrec import RECBOLE, state_dict

SETTINGS = load_settings(["demo"]).settings
FOLDER = checkpoint_folder(SETTINGS.model.checkpoint)


def test_the_demo_names_the_model_that_it_shows(tmp_path: Path) -> None:
    assert _shape(SETTINGS.model) == "HSTU, 4 layers, D 128, checkpoint demo"
    save_checkpoint(model_of(tmp_path, state_dict(RECBOLE), SasRecChoices(RECBOLE.heads)).model, tmp_path)
    assert _shape(Model(checkpoint=str(tmp_path))).startswith("SASREC, 2 layers, D 12, checkpoint ")


def test_it_is_small_and_says_what_it_is() -> None:
    sizes = {file.name: file.stat().st_size for file in FOLDER.iterdir()}
    assert set(sizes) == {"README.md", "config.json", "model.safetensors"}
    assert sum(sizes.values()) <= 5_000_000


def test_it_ranks_the_next_item_of_new_users_far_better_than_chance_and_better_with_more_behaviours() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        requests = fresh_requests(SETTINGS, known_items(SETTINGS.model), 60, seed=4711)
        model = load_checkpoint(FOLDER)
        whole, newest = (offline_quality(model, requests, known).served for known in (None, 20))
    finally:
        torch.set_num_threads(threads)
    assert whole is not None and newest is not None
    # About 0.80 and 0.56 by the card; 60 requests tell each to within 0.13 with 19 chances of 20. Chance is 0.1.
    assert whole.hr > 0.55
    assert whole.hr > newest.hr + 0.05


def test_a_packaged_name_is_found_and_a_path_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)  # a folder of this name that lies here by chance is named ./demo
    assert (checkpoint_folder("demo") / "config.json").is_file()
    assert checkpoint_folder("./demo") == Path("demo")
    assert checkpoint_folder("unheard") == Path("unheard")
