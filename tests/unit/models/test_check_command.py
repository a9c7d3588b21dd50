"""`relaygr model check`: what it prints, and the line of the author's code that it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from relaygr_stream import settings
from relaygr_stream.cli.main import main
from relaygr_stream.models.api import RankingModel
from relaygr_stream.models.loading import save_random
from tests.unit.models.broken_models import ByBatchSize

SHAPE = settings.Model(layers=2, dim=16, heads=2, dqk=8, dv=8, vocab=50, max_positions=200)
SETTINGS = [
    "--set", "relay.max_prefix_tokens=40", "--set", "relay.max_suffix_tokens=16", "--set", "relay.max_candidates=20",
]  # fmt: skip


def small(folder: Path) -> list[str]:
    """The options of a small model with random weights."""
    return [*SETTINGS, "--set", f"model.checkpoint={save_random(SHAPE, folder / 'small').checkpoint}"]


def test_the_command(tmp_path: Any) -> None:
    factory = "relaygr_stream.models.transformer:make"
    done = CliRunner().invoke(main, ["model", "check", factory, *small(tmp_path)])
    assert done.exit_code == 0, done.output
    assert f"{factory}: version transformer-" in done.output
    assert "random weights, seed 7" in done.output
    assert done.output.endswith("every property holds\n")
    done = CliRunner().invoke(main, ["model", "check", "a_module_that_is_not_there:make"])
    assert done.exit_code == 1
    assert "importing a_module_that_is_not_there failed: ModuleNotFoundError" in done.output
    done = CliRunner().invoke(main, ["model", "check", f"{__name__}:make_broken", *small(tmp_path)])
    assert done.exit_code == 1
    assert "1 failed: batch apart" in done.output


def make_broken(model: settings.Model, device: torch.device, dtype: torch.dtype) -> RankingModel:
    return ByBatchSize(dtype)


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--dtype", "int8"], "--dtype int8: write float32"), (["--seed", "-1"], "--seed -1"), (["--device", "x"], "'x'")],
)
def test_flags_that_mean_nothing(flags: list[str], words: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["model", "check", *small(tmp_path), *flags])
    assert done.exit_code == 1
    assert words in done.output


FAILS_IN_HALF = """
import torch
from relaygr_stream.models.transformer import make as sound

def make(model, device, dtype):
    histories = "local-of-the-factory"
    if dtype is torch.bfloat16:
        raise TypeError("Got unsupported ScalarType BFloat16")
    return sound(model, device, dtype)
"""


def test_a_factory_that_raises_in_a_type_is_a_finding_and_its_locals_are_not_printed(tmp_path: Path) -> None:
    (tmp_path / "fails_in_half.py").write_text(FAILS_IN_HALF)
    words = ["model", "check", "fails_in_half:make", "--set", f"model.path={tmp_path}", *small(tmp_path)]
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 1
    assert "1 failed: version" in found.output
    assert "torch.bfloat16" in found.output
    assert "TypeError: Got unsupported ScalarType BFloat16" in found.stderr
    assert "Traceback (most recent call last)" in found.stderr
    assert "local-of-the-factory" not in found.output
    assert len(found.stderr.splitlines()) < 30
    assert (
        found.output.count('fails_in_half.py:8, in make: `raise TypeError("Got unsupported ScalarType BFloat16")`') == 1
    )


RAISES = """
import torch
from relaygr_stream.models.transformer import Transformer, TransformerConfig, shape_of

class Mine(Transformer):
    def {method}(self, *of_a_user):
        return helper(*of_a_user)

def helper(*histories):
    return torch.zeros(2) @ torch.zeros(3)  # here

def make(model, device, dtype):
    return Mine(TransformerConfig(**shape_of(model)), 7, device, dtype)
"""


@pytest.mark.parametrize("method", ["prefill", "score"])
def test_the_line_of_the_authors_code_that_raised_is_shown(method: str, tmp_path: Path) -> None:
    """Of a helper, not of torch below it, and not of the checker above it."""
    found = check_file(tmp_path, f"raises_in_{method}", RAISES.format(method=method))
    assert found.exit_code == 1
    line = f"raises_in_{method}.py:10, in helper: `return torch.zeros(2) @ torch.zeros(3)  # here`"
    assert re.search(rf"^    At \S*{re.escape(line)}$", found.output, re.M)


WRONG = """
import torch
from relaygr_stream.models.transformer import Transformer, TransformerConfig, shape_of

class Mine(Transformer):
    note = ""

    @torch.no_grad()
    def {method}(self, *arguments):
        {wrong}

def make(model, device, dtype):
    return Mine(TransformerConfig(**shape_of(model)), 7, device, dtype)
"""


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("score", "return [one.half() for one in super().score(*arguments)]"),
        ("prefill", "pass"),
        ("score", "return [one + one.mean() for one in super().score(*arguments)]"),
        ("__init__", "super().__init__(*arguments); self.version = 'always'"),
    ],
    ids=["type", "length", "candidates", "version"],
)
def test_where_nothing_raised_the_method_is_shown(method: str, wrong: str, tmp_path: Path) -> None:
    module = f"wrong_{abs(hash((method, wrong)))}"
    found = check_file(tmp_path, module, WRONG.format(method=method, wrong=wrong))
    assert found.exit_code == 1
    assert f"{module}.py:9: `def {method}(self, *arguments):`" in found.output


def test_a_method_that_is_not_the_authors_own_is_shown_by_the_class(tmp_path: Path) -> None:
    source = """
from relaygr_stream.models.transformer import Transformer, TransformerConfig, shape_of

class Mine(Transformer):
    def _score(self, one):
        return super()._score(one).half()

def make(model, device, dtype):
    return Mine(TransformerConfig(**shape_of(model)), 7, device, dtype)
"""
    found = check_file(tmp_path, "inherits", source)
    assert "inherits.py:4: `class Mine(Transformer):`" in found.output


BROKEN_DECODER = """
import torch
from relaygr_stream import DecoderModel
class Broken(torch.nn.Module):
    def forward(self, **inputs):
        raise KeyError('weights')
def make(model, device, dtype):
    return DecoderModel(
        Broken(), torch.nn.Identity(), device=device, dtype=dtype, tasks=("click",), config={},
        behaviours=lambda tokens: {"ids": tokens.array[0]}, candidates=lambda one: {"ids": one.candidates},
    )
"""


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "def make(model, device, dtype):\n    return model.nonsense",
            ":2, in make: `return model.nonsense`; it is called",
        ),
        (
            "from relaygr_stream import ModelError\ndef make(*_):\n    raise ModelError('no weights')",
            ":3, in make: `raise ModelError('no weights')`",
        ),
        (BROKEN_DECODER, ":6, in forward: `raise KeyError('weights')`"),
        ("import json\nCONFIG = json.loads('{')\n", ":2: `CONFIG = json.loads('{')`; is it installed"),
        ("def make(model device):\n    pass\n", ":1: `def make(model device):`; is it installed"),
        ("import no_such_module\n", ":1: `import no_such_module`; is it installed"),
    ],
    ids=["factory", "refusal", "decoder", "import", "syntax", "other module"],
)
def test_the_line_at_which_a_factory_or_its_module_failed_is_shown(source: str, words: str, tmp_path: Path) -> None:
    module = f"fails_{abs(hash(source))}"
    found = check_file(tmp_path, module, source)
    assert found.exit_code == 1
    assert f"/{module}.py{words}" in found.output


def check_file(folder: Path, module: str, source: str) -> Result:
    (folder / f"{module}.py").write_text(source)
    words = ["model", "check", f"{module}:make", "--set", f"model.path={folder}", *small(folder)]
    return CliRunner().invoke(main, words)
