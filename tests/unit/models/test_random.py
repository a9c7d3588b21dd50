"""`relaygr model random`: a folder with a model of the asked shape, the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from relaygr_stream.cli.main import main
from relaygr_stream.models.loading import load_model
from relaygr_stream.settings import Model, Relay

SMALL = ("--layers", "2", "--dim", "16", "--heads", "2", "--dqk", "8", "--dv", "12", "--vocab", "50")


def test_its_folder_is_the_model_of_that_shape_and_seed(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "model"
    options = (*SMALL, "--max-positions", "64", "--relative-times", "8", "--tasks", "click, buy", "--seed", "3")
    done = CliRunner().invoke(main, ["model", "random", *options, str(folder)])
    assert done.exit_code == 0, done.output
    shape: dict[str, Any] = {"layers": 2, "dim": 16, "heads": 2, "dqk": 8, "dv": 12, "vocab": 50, "max_positions": 64}
    shape |= {"relative_times": 8, "tasks": ["click", "buy"]}
    assert shape.items() <= json.loads((folder / "config.json").read_text()).items()
    same = Model(**{**shape, "tasks": ("click", "buy"), "seed": 3})
    expected = load_model(same, Relay(), device=torch.device("cpu"), dtype=torch.float32)
    assert (
        load_model(Model(checkpoint=str(folder)), Relay(), device=torch.device("cpu"), dtype=torch.float32).version
        == expected.version
    )  # a digest of configuration and weights


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tasks", ""), "write one or more names"),
        (("--tasks", "a,a"), "a name stands there twice"),
        (("--contextual-seq-len", "1", "--relative-times", "4"), "exclude each other"),
        (("--vocab", str(10**15)), "a model of this size cannot be made"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_and_leaves_nothing(
    options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(main, ["model", "random", *SMALL, *options, str(tmp_path / "model")])
    assert done.exit_code == 1
    assert words in done.stderr
    assert not (tmp_path / "model").exists()


def test_a_model_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    done = CliRunner().invoke(main, ["model", "random", *SMALL, str(tmp_path)])
    assert done.exit_code == 1
    assert "has a model; name a new folder" in done.stderr
    assert (tmp_path / "config.json").read_text() == "mine"
    (tmp_path / "file").touch()
    done = CliRunner().invoke(main, ["model", "random", *SMALL, str(tmp_path / "file" / "model")])
    assert done.exit_code == 1
    assert "cannot be written" in done.stderr
