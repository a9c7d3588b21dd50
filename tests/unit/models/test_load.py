from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from relaygr_stream import settings
from relaygr_stream.errors import ConfigError, ModelError
from relaygr_stream.models.api import KVLayout, RankingModel, digest, unknown_items
from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.models.loading import load_model, save_checkpoint
from tests.unit.models.small_models import full_scores, random_items, random_tokens, small_model

CPU = torch.device("cpu")
SMALL = settings.Model(layers=1, dim=8, heads=2, dqk=4, dv=4, vocab=30, max_positions=20, tasks=("click", "buy"))
NO_SUFFIX = settings.Relay(max_suffix_tokens=0)


def load(model: settings.Model, relay: settings.Relay | None = None, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(model, relay or settings.Relay(), device=CPU, dtype=dtype)


def test_without_a_checkpoint_the_weights_are_random_and_said_to_be() -> None:
    model = load(SMALL)
    assert isinstance(model, HSTUModel)
    assert model.note == "random weights, seed 7"
    assert model.tasks == ("click", "buy")
    assert model.incremental
    assert load(replace(SMALL, seed=-8)).note == "random weights, seed -8"


def test_the_settings_reach_the_model() -> None:
    shape = replace(SMALL, max_attn_len=3, group_norm=True, contextual_seq_len=2, scale_tokens=77, oov_rows=6)
    config = load(shape, NO_SUFFIX).config
    assert (config.max_attn_len, config.group_norm, config.contextual_seq_len) == (3, True, 2)
    assert (config.layers, config.dim, config.heads, config.dqk, config.dv) == (1, 8, 2, 4, 4)
    assert (config.vocab, config.oov_rows, config.max_positions, config.scale_tokens) == (30, 6, 20, 77)


def test_settings_that_exclude_each_other_and_a_model_beyond_memory_are_typed() -> None:
    """They ended a worker with a traceback, and `relaygr up` started it again for ever."""
    with pytest.raises(ConfigError, match=r"random weights: contextual_seq_len and a bias on relative positions"):
        load(replace(SMALL, contextual_seq_len=2, relative_positions=4), NO_SUFFIX)
    with pytest.raises(ModelError, match="a model of this size cannot be made"):
        load(replace(SMALL, vocab=10**15))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_model_scores_in_the_type_asked_for(dtype: torch.dtype) -> None:
    model, random = load(SMALL, dtype=dtype), np.random.default_rng(0)
    assert model.layout.dtype == dtype
    scores = full_scores(model, random_tokens(random, 5), random_items(random, 3))
    assert scores.shape == (3, 2)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()


@pytest.mark.stack  # torch imported anew
def test_one_seed_is_one_model_in_every_process() -> None:
    program = textwrap.dedent("""
        import hashlib, torch
        from relaygr_stream import settings
        from relaygr_stream.models.loading import load_model
        torch.manual_seed(2)
        tasks = ("click", "buy")
        shape = settings.Model(layers=1, dim=8, heads=2, dqk=4, dv=4, vocab=30, max_positions=20, tasks=tasks)
        model = load_model(shape, settings.Relay(), device=torch.device("cpu"), dtype=torch.float32)
        weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        print(model.version, hashlib.sha256(weights).hexdigest())
    """)
    torch.manual_seed(1)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    here = load(SMALL)
    weights = b"".join(value.numpy().tobytes() for value in here.state_dict().values())
    assert done.stdout.split() == [here.version, hashlib.sha256(weights).hexdigest()]
    assert load(replace(SMALL, seed=8)).version != load(SMALL).version


@pytest.mark.parametrize("tasks", [(), ("click", ""), ("",), ("click", "", "like")])
def test_empty_task_names_are_refused(tasks: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"`tasks` = .*: write one or more names"):
        load(replace(SMALL, tasks=tasks))


def test_a_task_name_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`tasks` = \['a', 'a'\]: a name stands there twice"):
        load(replace(SMALL, tasks=("a", "a")))


def test_contextual_tokens_with_a_suffix_are_refused_naming_both_settings(tmp_path: Path) -> None:
    both = r"contextual_seq_len = 2 .*`relay\.max_suffix_tokens` = 256"
    shape = replace(SMALL, contextual_seq_len=2)
    with pytest.raises(ConfigError, match=both):
        load(shape)
    assert not load(shape, NO_SUFFIX).incremental
    save_checkpoint(small_model(contextual_seq_len=2), tmp_path)
    with pytest.raises(ConfigError, match=both.replace(" .*", rf" \(in {re.escape(str(tmp_path))}\).*")):
        load(replace(SMALL, checkpoint=str(tmp_path)))


def test_a_checkpoint_brings_its_own_shape(tmp_path: Path) -> None:
    saved = small_model()
    save_checkpoint(saved, tmp_path)
    model = load(replace(SMALL, checkpoint=str(tmp_path)))
    assert model.version == saved.version
    assert model.config == saved.config
    assert model.note == ""


USERS_MODULE = """
import torch
from relaygr_stream.models.api import KVLayout

class Mine:
    layout = KVLayout(1, 1, 4, 4, torch.float32)
    version, note, tasks, incremental = "mine-1", "", ("click",), True
    def prefill(self, kv, tokens): ...
    def score(self, batch): ...

def make(model, device, dtype):
    mine = Mine()
    mine.asked = (model.seed, device, dtype)
    return mine

def broken(model, device, dtype):
    raise RuntimeError("no weights today")

def takes_nothing():
    return Mine()

def _but(**changes):
    def factory(model, device, dtype):
        mine = Mine()
        for name, value in changes.items():
            setattr(mine, name, value)
        return mine
    return factory

nothing = lambda model, device, dtype: None
no_layout = _but(layout=(1, 2))
no_tasks = _but(tasks=())
same_tasks = _but(tasks=("a", "a"))
no_version = _but(version="")
note_missing = _but(note=None)
no_count = _but(unknown_items=None)
not_finite = _but(unknown_items=float("nan"))
counts = _but(unknown_items=torch.tensor(3))
not_callable = 3

class Half:
    prefill = Mine.prefill

half = lambda model, device, dtype: Half()

class NoFlag(Half):
    score = Mine.score
    layout, version, note, tasks = Mine.layout, Mine.version, Mine.note, Mine.tasks

no_flag = lambda model, device, dtype: NoFlag()

class SaysSuffix(Mine):
    takes_suffix = "behind the prefix"

says_suffix = lambda model, device, dtype: SaysSuffix()
"""


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"users_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(USERS_MODULE)
    (tmp_path / f"{name}_fails.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize("value", [-1, True, float("nan"), 1.5, None])
def test_a_layout_of_no_numbers_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"a layout's `dv` must be an integer of at least 0"):
        KVLayout(1, 1, 4, value, torch.float32)


def test_a_count_may_be_anything_that_is_a_number(users_module: str) -> None:
    assert unknown_items(load(replace(SMALL, factory=f"{users_module}:counts"))) == 3
    assert unknown_items(load(SMALL)) == 0
    with pytest.raises(ModelError, match="`unknown_items` must be a count, found None"):
        unknown_items(SimpleNamespace(unknown_items=None))


def test_a_users_own_model(users_module: str) -> None:
    shape = replace(SMALL, factory=f"{users_module}:make", checkpoint="/not/used")
    model = load(shape, dtype=torch.bfloat16)
    assert isinstance(model, RankingModel)
    assert model.asked == (7, CPU, torch.bfloat16)  # type: ignore[attr-defined]  # the test's own attribute


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{}", "write module:factory"),
        (":make", "write module:factory"),
        ("{}:", "write module:factory"),
        ("{}_absent:make", "importing .*_absent failed: ModuleNotFoundError.*model\\.path"),
        ("{}_fails:make", "importing .* failed: ModuleNotFoundError: No module named 'a_package_that_is_not_there'"),
        ("{}:other", "has no `other`"),
        ("{}:not_callable", "`not_callable` is a int, not callable"),
        ("{}:broken", "failed with RuntimeError: no weights today"),
        ("{}:takes_nothing", r"failed with TypeError.*called with \(settings.Model, torch.device, torch.dtype\)"),
        ("{}:nothing", "returned a NoneType, but it has no method `prefill`"),
        ("{}:half", "returned a Half, but it has no method `score`"),
        ("{}:no_flag", r"it has no attribute `incremental` \(bool\)"),
        ("{}:says_suffix", "its `takes_suffix` must be a bool, found 'behind the prefix'"),
        ("{}:no_layout", r"its `layout` must be a KVLayout, found \(1, 2\)"),
        ("{}:note_missing", "its `note` must be a str, found None"),
        ("{}:no_tasks", r"its `tasks` must be one or more different names, found \(\)"),
        ("{}:same_tasks", "its `tasks` must be one or more different names"),
        ("{}:no_version", "its `version` is empty"),
        ("{}:no_count", "its `unknown_items` must be a count, found None"),
        ("{}:not_finite", "its `unknown_items` must be a count, found nan"),
    ],
)
def test_what_is_wrong_with_a_factory_is_said(users_module: str, name: str, words: str) -> None:
    factory = name.format(users_module)
    with pytest.raises(ModelError, match=rf"`model\.factory` = {factory!r}.*{words}"):
        load(replace(SMALL, factory=factory))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool], ids=str)
def test_weights_of_any_type_and_layout_have_a_digest(dtype: torch.dtype) -> None:
    """A user's factory digests what it serves: bfloat16, gradients, scalars, views."""
    value = torch.arange(6.0).view(2, 3).to(dtype)
    known = digest({}, {"w": value, "one": value[0, 1]})
    assert known == digest({}, {"w": value.t().contiguous().t(), "one": value[0, 1].clone()})
    assert known != digest({}, {"w": value.flip(0), "one": value[0, 1]})
    assert digest({}, {"w": value[:0]}) != digest({}, {})
    if dtype.is_floating_point:
        assert known == digest({}, {"w": torch.nn.Parameter(value), "one": value[0, 1]})


def test_the_same_bits_of_another_type_are_other_weights_and_float32_keeps_its_digest() -> None:
    bits = torch.tensor([1, 2], dtype=torch.int16)
    assert len({digest({}, {"w": bits.view(dtype)}) for dtype in (torch.bfloat16, torch.float16, torch.int16)}) == 3
    assert digest({"a": 1}, {"w": torch.ones(2, 2)}) == "219a7faa1f683209"
