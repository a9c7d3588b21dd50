from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from relaygr_stream import settings
from relaygr_stream.errors import ModelError
from relaygr_stream.models.loading import load_checkpoint, load_model, save_checkpoint
from tests.unit.models.small_models import full_scores, random_items, random_tokens, small_model

Weights = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(small_model(max_attn_len=5), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("changes", [{}, {"oov_rows": 5}, {"group_norm": True, "contextual_seq_len": 2}])
def test_a_round_trip_keeps_scores_and_version(tmp_path: Path, changes: dict[str, Any]) -> None:
    model, random = small_model(**changes), np.random.default_rng(0)
    save_checkpoint(model, tmp_path / "new" / "folder")
    again = load_checkpoint(tmp_path / "new" / "folder")
    assert again.config == model.config
    assert again.version == model.version
    assert again.note == ""
    history, candidates = random_tokens(random, 10), random_items(random, 4)
    assert torch.equal(full_scores(again, history, candidates), full_scores(model, history, candidates))
    assert sorted(file.name for file in (tmp_path / "new" / "folder").iterdir()) == ["config.json", "model.safetensors"]


def test_saving_over_a_checkpoint_replaces_it(folder: Path) -> None:
    other = small_model(seed=99)
    save_checkpoint(other, folder)
    assert load_checkpoint(folder).version == other.version


def test_the_version_tells_weights_configuration_and_dtype_apart(folder: Path) -> None:
    version = load_checkpoint(folder).version
    halved = load_checkpoint(folder).place(torch.device("cpu"), torch.bfloat16).version
    edit_config(folder, lambda config: config.update(scale_tokens=33))
    other = load_checkpoint(folder).version
    weights = load_file(folder / "model.safetensors")
    weights["head.bias"][0] += 1e-3
    save_file(weights, folder / "model.safetensors")
    assert len({version, halved, other, load_checkpoint(folder).version}) == 4


def test_without_oov_rows_file_and_version_are_as_before_there_was_such_a_field(folder: Path) -> None:
    assert "oov_rows" not in json.loads((folder / "config.json").read_text())
    assert small_model().version == "hstu-eea3636511baed48-float32"  # of the release before it
    assert small_model(oov_rows=1).version != small_model().version
    edit_config(folder, lambda config: config.update(oov_rows=2))
    with pytest.raises(ModelError, match=r"`embedding.item` has shape \(50, 16\), but config.json asks for \(52, 16\)"):
        load_checkpoint(folder)


def test_weights_stored_in_half_precision_are_taken(folder: Path) -> None:
    weights = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    assert load_checkpoint(folder).layout.dtype == torch.float32


def test_weights_stored_in_8_bits_are_taken(folder: Path) -> None:
    weights = {name: value.to(torch.float8_e4m3fn) for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    assert load_checkpoint(folder).layout.dtype == torch.float32


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 7e4), (torch.bfloat16, 3.4e38)], ids=str)
def test_weights_beyond_the_workers_type_are_named(folder: Path, dtype: torch.dtype, value: float) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["stack.layers.1.uvqk_bias"][3] = value
    save_file(weights, folder / "model.safetensors")
    model, relay = settings.Model(checkpoint=str(folder)), settings.Relay()
    load_model(model, relay, device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ModelError, match=r"`stack.layers.1.uvqk_bias` has values beyond .*, the largest in torch\."):
        load_model(model, relay, device=torch.device("cpu"), dtype=dtype)


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda config: config.pop("dim"), "missing required field `dim`"),
        (lambda config: config.update(dmi=3), "unknown field `dmi`"),
        (lambda config: config.update(heads="2"), r"Expected `int`, got `str` - at `\$.heads`"),
        (lambda config: config.update(layers=0), r"`int` >= 1 - at `\$.layers`"),
        (lambda config: config.update(tasks=[]), r"length >= 1 - at `\$.tasks`"),
        (lambda config: config.update(tasks=["a", "a"]), "`tasks` names a score column twice: a, a"),
        (lambda config: config.update(architecture="gpt"), "must be 'hstu' or 'dlrm-hstu' or 'sasrec', found 'gpt'"),
        (lambda config: config.pop("format"), "`format` must be 1, found None"),
        (lambda config: config.update(format=True), "`format` must be 1, found True"),
        (lambda config: config.update(vocab=10**16), r"`int` <= 2147483647 - at `\$.vocab`"),
        (lambda config: config.update(dim=10**30), r"`int` <= 2147483647 - at `\$.dim`"),
        (lambda config: config.update(dim=-1), r"`int` >= 1 - at `\$.dim`"),
        (lambda config: config.update(dim=True), r"Expected `int`, got `bool` - at `\$.dim`"),
        (lambda config: config.update(dim=1.5), r"Expected `int`, got `float` - at `\$.dim`"),
        (lambda config: config.update(dim=None), r"Expected `int`, got `null` - at `\$.dim`"),
        (lambda config: config.update(dim=float("nan")), "not a JSON object"),
        (lambda config: config.update(layers=10**7), r"`int` <= 4096 - at `\$.layers`"),
        (lambda config: config.update(relative_times=10**12), r"`int` <= 2147483647 - at `\$.relative_times`"),
        (lambda config: config.update(format="x" * 10_000), "`format` must be 1, found 'x{70}"),
        (lambda config: config.update(tasks="deep"), "Expected `array`, got `str`"),
    ],
)
def test_a_wrong_configuration_is_named(folder: Path, edit: Callable[[dict[str, Any]], object], words: str) -> None:
    edit_config(folder, edit)
    with pytest.raises(ModelError, match=f"config.json: .*{words}"):
        load_checkpoint(folder)


def test_a_large_table_is_refused_by_the_weights_before_it_takes_memory(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(vocab=2**31 - 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=r"model.safetensors: `embedding.item` has shape"):
        load_checkpoint(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.module."])
def test_a_wrappers_prefix_is_no_part_of_the_names(folder: Path, prefix: str) -> None:
    version, weights = load_checkpoint(folder).version, load_file(folder / "model.safetensors")
    save_file({prefix + name: value for name, value in weights.items()}, folder / "model.safetensors")
    assert load_checkpoint(folder).version == version


@pytest.mark.parametrize("prefix", ["model.", "module.net."])
def test_another_prefix_is_named(folder: Path, prefix: str) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({prefix + name: value for name, value in weights.items()}, folder / "model.safetensors")
    rest = re.escape(prefix.removeprefix("module."))
    with pytest.raises(ModelError, match=rf"`{rest}embedding\.\w+` is there: leave `{rest}` out"):
        load_checkpoint(folder)


def test_a_prefix_of_some_names_is_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "stack.layers.1.uvqk_bias"
    weights[f"_orig_mod.{name}"] = weights.pop(name)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"`{name}` is missing.*leave `_orig_mod\.` out"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pointer", "pipe", "device", "folder", "absent"])
def test_what_is_no_file_of_a_checkpoint_is_called_what_it_is(folder: Path, name: str, kind: str) -> None:
    file = folder / name
    file.unlink()
    if kind == "pointer":
        file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "folder":
        file.mkdir()
    words = {"pointer": "Git LFS pointer.*git lfs pull", "absent": "[Nn]o such file"}.get(kind, f"is a {kind}")
    with pytest.raises(ModelError, match=rf"{name}: .*{words}"):
        load_checkpoint(folder)


def test_a_configuration_with_a_byte_order_mark_is_read(folder: Path) -> None:
    version = load_checkpoint(folder).version
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + (folder / "config.json").read_bytes())
    assert load_checkpoint(folder).version == version


@pytest.mark.parametrize(
    "content", [b"{", b"[1]", b"\xff\xfe", b'{"a":' + b"[" * 100_000, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"]
)
def test_a_configuration_that_is_no_json_object(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json: not a JSON object"):
        load_checkpoint(folder)


def _drop(weights: Weights) -> None:
    del weights["stack.layers.1.uvqk_weight"]


def _add(weights: Weights) -> None:
    weights["stack.layers.3.uvqk_bias"] = torch.zeros(3)


def _transpose(weights: Weights) -> None:
    weights["stack.layers.0.output_weight"] = weights["stack.layers.0.output_weight"].t().contiguous()


def _integers(weights: Weights) -> None:
    weights["embedding.gap"] = weights["embedding.gap"].int()


def _not_finite(weights: Weights) -> None:
    weights["head.weight"][1, 1] = torch.nan


def _beyond_float32(weights: Weights) -> None:
    weights["head.weight"] = weights["head.weight"].double()
    weights["head.weight"][1, 1] = 1e39


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_drop, "`stack.layers.1.uvqk_weight` is missing; expected it with shape (16, 80)"),
        (_add, "`stack.layers.3.uvqk_bias` is no weight of this model (1 such keys)"),
        (_transpose, "`stack.layers.0.output_weight` has shape (16, 72), but config.json asks for (72, 16)"),
        (_integers, "`embedding.gap` has type torch.int32, expected a floating type"),
        (_not_finite, "`head.weight` contains values that are not finite"),
        (_beyond_float32, "`head.weight` contains values that are not finite in float32"),
    ],
)
def test_wrong_weights_are_named(folder: Path, edit: Callable[[Weights], None], words: str) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=re.escape(f"model.safetensors: {words}")):
        load_checkpoint(folder)


def test_files_that_are_not_there_or_not_readable(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere: no such folder; a checkpoint is a folder with config\.json"):
        load_checkpoint(tmp_path / "nowhere")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a readable safetensors file"):
        load_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors: no such file"):
        load_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: cannot be read: No such file"):
        load_checkpoint(folder)
