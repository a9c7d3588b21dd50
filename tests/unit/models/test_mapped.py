"""Item tables that stay in their files: the same rows as in memory, whatever the shards, types and device."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.cli.main import main
from relaygr_stream.errors import ModelError
from relaygr_stream.models.api import ScoreInput
from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.models.loading import load_any_checkpoint, save_checkpoint
from relaygr_stream.models.map_items import map_items, quantised
from relaygr_stream.models.mapped import HotRows, MappedTable
from tests.properties import examples
from tests.unit.models.small_models import prefilled, random_tokens, small_model

CPU = torch.device("cpu")
OOV = 3


def mapped(folder: Path, dtype: Any = "float32", shard_rows: int = 20) -> tuple[HSTUModel, Any]:
    """A model with its table in memory, and the same with the table in files."""
    model = small_model(oov_rows=OOV)
    save_checkpoint(model, folder / "plain")
    size = getattr(torch, dtype).itemsize
    map_items(folder / "plain", folder / "mapped", dtype, shard_rows * model.config.dim * size)
    return model, load_any_checkpoint(folder / "mapped")


def scores(model: Any) -> torch.Tensor:
    random = np.random.default_rng(5)
    history, suffix = random_tokens(random, 9), random_tokens(random, 3)
    found = model.score([ScoreInput(prefilled(model, history), suffix, random.integers(0, 90, 12))])
    whole: torch.Tensor = found[0]
    return whole


@pytest.mark.parametrize("shard_rows", [7, 20, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_the_table_in_memory(tmp_path: Path, shard_rows: int, dtype: torch.dtype) -> None:
    plain, served = mapped(tmp_path, shard_rows=shard_rows)
    assert served.embedding.table is not None and "embedding.item" not in served.state_dict()
    assert len(list((tmp_path / "mapped").glob("item-*"))) == -(-53 // shard_rows)
    for model in (plain, served):
        model.place(CPU, dtype, "torch")
    assert torch.equal(scores(served), scores(plain))
    assert served.unknown_items == plain.unknown_items > 0


@pytest.mark.parametrize(
    ("dtype", "share"), [("float32", 0.0), ("float16", 2**-11), ("bfloat16", 2**-8), ("int8", 1 / 254)]
)
def test_rows_in_fewer_bits_differ_by_no_more_than_is_said(tmp_path: Path, dtype: str, share: float) -> None:
    plain, served = mapped(tmp_path, dtype)
    table = plain.state_dict()["embedding.item"]
    found = served.embedding.table.rows(np.arange(53))
    wrong = (found - table).abs()
    assert (wrong <= (share + 1e-6) * table.abs().amax(1)[:, None]).all()
    assert (wrong.max() > 0) == (share > 0)
    again = map_items(tmp_path / "plain", tmp_path / "again", dtype, 1 << 20)  # type: ignore[arg-type]
    assert again.error == pytest.approx(float(wrong.max()), rel=1e-3) and again.share <= share + 1e-6


def test_a_row_of_zeros_is_one_and_its_scale_too() -> None:
    stored, scale = quantised(torch.tensor([[0.0, 0.0], [1e-30, -1e-30], [3.0, -1.5]]))
    assert stored[0].tolist() == [0, 0] and scale[0] == 0
    assert stored[2].tolist() == [127, -64]


def test_the_version_is_that_of_the_rows(tmp_path: Path) -> None:
    plain, served = mapped(tmp_path)
    again = load_any_checkpoint(tmp_path / "mapped")
    assert served.version == again.version != plain.version
    with torch.no_grad():
        plain.embedding.item[17, 3] += 1  # of more rows than a sample has, the digest in the file tells
    save_checkpoint(plain, tmp_path / "newer")
    map_items(tmp_path / "newer", tmp_path / "newer-mapped", "float32", 1 << 20)
    assert load_any_checkpoint(tmp_path / "newer-mapped").version != served.version


@pytest.mark.parametrize("change", ["shortened", "written to"])
def test_a_shard_that_changes_while_it_is_mapped_gives_no_more_rows(tmp_path: Path, change: str) -> None:
    _, served = mapped(tmp_path)
    shard = sorted((tmp_path / "mapped").glob("item-*"))[1]
    if change == "shortened":
        os.truncate(shard, 4096)
    else:
        with shard.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(bytes(8))
    for _ in range(2):  # of another shard, too: a worker must see that its model is of no use any more
        with pytest.raises(ModelError, match=f"{shard.name} was changed while it is mapped"):
            served.embedding.table.rows(np.zeros(1, np.int64))


IDS = st.lists(st.lists(st.integers(0, 52), min_size=1, max_size=40), min_size=1, max_size=8)


@given(IDS, st.integers(1, 60))
@settings(max_examples=examples(100))
def test_hot_rows_are_the_rows(calls: list[list[int]], slots: int) -> None:
    table = torch.arange(53 * 2, dtype=torch.float32).view(53, 2)
    hot = HotRows(slots, 2, CPU, torch.float32)
    read = list[int]()

    def gather(ids: Any) -> torch.Tensor:
        read.extend(ids.tolist())
        return table[torch.from_numpy(ids)]

    for ids in calls:
        assert torch.equal(hot.rows(np.array(ids), gather), table[torch.tensor(ids)])
    assert hot.found + hot.missed == sum(len(set(ids)) for ids in calls) and hot.missed == len(read)


def test_rows_in_frequent_use_stay() -> None:
    table, slots = torch.zeros((10_000, 1)), 64
    hot = HotRows(slots, 1, CPU, torch.float32)
    often = np.arange(16)
    random = np.random.default_rng(1)
    for _ in range(200):
        hot.rows(np.concatenate([often, random.integers(16, 10_000, 8)]), lambda ids: table[torch.from_numpy(ids)])
    before = hot.missed
    hot.rows(often, lambda ids: table[torch.from_numpy(ids)])
    assert hot.missed - before <= 4  # those that share a slot with another one in frequent use


def test_a_table_on_a_device_keeps_its_hot_rows(tmp_path: Path) -> None:
    """The way of an accelerator, on the CPU: HotRows stands where `place` puts it for any other device."""
    plain, served = mapped(tmp_path)
    table = served.embedding.table
    table._hot = HotRows(16, table.dim, CPU, torch.float32)
    for model in (plain, served):
        model.use(None, None)
        model._ends = None
    assert torch.equal(scores(served), scores(plain)) and torch.equal(scores(served), scores(plain))
    assert table._hot.found


@pytest.mark.parametrize("room", [1000, 20_000])  # no shard fits in, or all and not the other weights
def test_a_disk_that_gets_full_is_told_of_and_nothing_stays(tmp_path: Path, room: int) -> None:
    save_checkpoint(small_model(), tmp_path / "plain")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(ModelError, match="full: cannot be written"):
            map_items(tmp_path / "plain", tmp_path / "full", "float32", 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "full").exists()


def test_a_half_type_that_does_not_hold_the_table_is_refused(tmp_path: Path) -> None:
    model = small_model()
    with torch.no_grad():
        model.embedding.item[3, 3] = 1e6
    save_checkpoint(model, tmp_path / "plain")
    map_items(tmp_path / "plain", tmp_path / "mapped", "float32", 1 << 20)
    with pytest.raises(ModelError, match=r"another `worker\.dtype`"):
        load_any_checkpoint(tmp_path / "mapped").place(CPU, torch.float16)
    with pytest.raises(ModelError, match=r"not finite in torch\.float16"):
        map_items(tmp_path / "plain", tmp_path / "half", "float16", 1 << 20)
    map_items(tmp_path / "plain", tmp_path / "half", "bfloat16", 1 << 20)  # what failed left nothing
    with pytest.raises(ModelError, match=r"model\.safetensors: no such folder.*`relaygr model import` makes one"):
        map_items(tmp_path / "plain" / "model.safetensors", tmp_path / "other", "float32", 1 << 20)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _changed(old: bytes, new: bytes) -> Any:
    def change(file: Path) -> None:
        data = file.read_bytes()
        assert old in data
        file.write_bytes(data.replace(old, new, 1))

    return change


BROKEN = {
    "cut": (_cut, "of .* is not"),
    "empty": (lambda file: file.write_bytes(b""), "no header of safetensors"),
    "pointer": (lambda file: file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "pointer"),
    "header": (lambda file: file.write_bytes(b"\xff" * 2000), "no header of safetensors"),
    "json": (_changed(b'{"rows"', b'["rows"'), "no shard of an item table"),
    "type": (_changed(b'"F32"', b'"F64"'), "a tensor of F64"),
    "int8 without scales": (_changed(b'"F32"', b'"I8" '), "is not"),
    "offset": (_changed(b'"data_offsets":[0,', b'"data_offsets":[1,'), "is not"),
    "gone": (lambda file: file.unlink(), "shards are"),
}


@pytest.mark.parametrize(("change", "error"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_shard_is_named(tmp_path: Path, change: Any, error: str) -> None:
    mapped(tmp_path)
    change(tmp_path / "mapped" / "item-00002-of-00003.safetensors")
    with pytest.raises(ModelError, match=rf"mapped.*{error}"):
        load_any_checkpoint(tmp_path / "mapped")


def test_a_table_of_another_shape_is_refused_and_a_mapped_model_is_not_written(tmp_path: Path) -> None:
    _, served = mapped(tmp_path)
    with pytest.raises(ModelError, match="copy its folder"):
        save_checkpoint(served, tmp_path / "written")
    with pytest.raises(ModelError, match="has 53 rows of 16, expected 54 of 16"):
        MappedTable.found(tmp_path / "mapped", 54, 16)
    with pytest.raises(ModelError, match="in shards already"):
        map_items(tmp_path / "mapped", tmp_path / "twice", "int8", 1 << 20)
    with pytest.raises(ModelError, match="not an empty folder"):
        map_items(tmp_path / "plain", tmp_path / "mapped", "int8", 1 << 20)


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    save_checkpoint(small_model(), tmp_path / "plain")
    arguments = ["model", "map-items", str(tmp_path / "plain"), str(tmp_path / "out"), "--dtype", "int8"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert "50 rows in 1 files" in done.output and "of its row's largest value" in done.output
    small = ["--set", "relay.max_prefix_tokens=33", "--set", "relay.max_suffix_tokens=7"]
    checked = CliRunner().invoke(main, ["model", "check", "--set", f"model.checkpoint={tmp_path / 'out'}", *small])
    assert "every property holds" in checked.output
    packaged = CliRunner().invoke(main, ["model", "map-items", "demo", str(tmp_path / "demo")])
    assert "4,000 rows in 1 files" in packaged.output
