"""Our processes import nothing from the working directory, unless a setting names it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from relaygr_stream.errors import ConfigError
from relaygr_stream.models.loading import load_model, save_random
from relaygr_stream.ops import children
from relaygr_stream.ops import supervisor as supervised
from relaygr_stream.settings.schema import Relay
from relaygr_stream.settings.worker import Model

#: Names that a start imports early and late; each says that it was imported, and ends the process.
SHADOWS = ("click", "msgspec", "torch", "tomllib", "my_model")
#: A model within these is checked in a second.
LIMITS = ("prefix_tokens=64", "suffix_tokens=8", "candidates=8")


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files that are called like libraries."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('imported ./{name}.py')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path


async def test_children_import_no_library_from_the_working_directory(trap: Path) -> None:
    child = children.Child("show", ["config", "show"], trap)
    assert await child.wait() == 0, child.log_tail()
    again = supervised.Supervised("show", ["config", "show"], trap)
    await again.start()
    assert await again.ended() == 0


def relaygr(*arguments: str) -> str:
    """`python -m`, as somebody may call it by hand, without -P; what it said."""
    # What runpy itself needs of these is imported before our code can help it.
    for early in ("click", "msgspec", "tomllib"):
        Path(f"{early}.py").unlink()
    command = [sys.executable, "-m", "relaygr_stream", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.stack  # three processes that import torch
def test_a_model_is_found_by_the_setting_alone(trap: Path) -> None:
    assert "imported" not in (without := relaygr("model", "check", "my_model:make"))
    assert "importing my_model failed: ModuleNotFoundError" in without
    assert "`model.path`" in without
    (trap / "my_model.py").write_text("from relaygr_stream.models.transformer import make")
    for early in ("click", "msgspec", "tomllib"):
        Path(f"{early}.py").touch()
    save_random(Model(layers=1, dim=16, max_positions=200), trap / "shape")
    shape = ["--set=model.checkpoint=shape", *(f"--set=relay.max_{each}" for each in LIMITS)]
    found = relaygr("model", "check", "my_model:make", "--set=model.path=.", *shape)
    assert "version transformer-" in found, found
    assert "imported ./torch.py" not in found


def test_a_path_that_is_no_folder_is_refused() -> None:
    model = Model(factory="my_model:make", path="nowhere")
    with pytest.raises(ConfigError, match=r"`model\.path` = 'nowhere': 'nowhere' is no folder"):
        load_model(model, Relay(), device=torch.device("cpu"), dtype=torch.float32)
