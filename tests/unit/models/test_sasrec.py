"""SASRec of RecBole and gSASRec: their scores against the formulas, what is imported, and what is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from relaygr_stream import settings as relaygr_settings
from relaygr_stream.cli.main import main
from relaygr_stream.errors import ConfigError, ModelError
from relaygr_stream.models.api import ScoreInput, Tokens
from relaygr_stream.models.check.probe import Probe, RequestBounds
from relaygr_stream.models.check.run import check_model
from relaygr_stream.models.importer.sasrec import ImportedSasRec, SasRecChoices, describe, import_checkpoint, model_of
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.loading import load_any_checkpoint, load_model
from relaygr_stream.models.map_items import map_items
from relaygr_stream.models.sasrec.model import ACTIVATIONS, SasRec
from tests.properties import examples
from tests.unit.models.naive_sasrec import GSASREC, RECBOLE, Shape, scores, state_dict

CPU = torch.device("cpu")
TIED = replace(GSASREC, own_output=False)
FORMS = pytest.mark.parametrize("shape", [RECBOLE, GSASREC, TIED], ids=["recbole", "gsasrec", "gsasrec, one table"])
QUERY = "trm_encoder.layer.1.multi_head_attention.query.weight"


def imported(shape: Shape, **changes: torch.Tensor) -> ImportedSasRec:
    return model_of(Path("x.pt"), state_dict(shape) | changes, choices(shape))


def choices(shape: Shape) -> SasRecChoices:
    return SasRecChoices(shape.heads, shape.activation)


def tokens(items: list[int]) -> Tokens:
    array = np.zeros((3, len(items)), np.int64)
    array[0] = items
    return Tokens(array)


def served(model: SasRec, history: list[int], stops: list[int], candidates: list[int]) -> torch.Tensor:
    """Scores (m,) of a prefix that is prefilled up to each of `stops`; the rest of the history is the suffix."""
    region = KVRegion.new(model.layout, max([1, *stops]), torch.nan)
    for stop in stops:
        model.prefill(region, tokens(history[region.length : stop]))
    one = ScoreInput(region, tokens(history[region.length :]), np.array(candidates))
    (found,) = model.score([one])
    assert found.dtype == torch.float32
    assert found.shape == (len(candidates), 1)
    return found[:, 0]


shapes = st.builds(
    lambda heads, width, **rest: Shape(dim=heads * width, heads=heads, **rest),
    heads=st.integers(1, 4),
    width=st.integers(1, 6),
    form=st.sampled_from(["recbole", "gsasrec"]),
    layers=st.integers(1, 3),
    hidden=st.integers(1, 9),
    items=st.integers(1, 30),
    window=st.integers(1, 12),
    activation=st.sampled_from(["", *ACTIVATIONS]),
).flatmap(lambda shape: st.sampled_from([shape, replace(shape, own_output=shape.form == "gsasrec")]))


@settings(max_examples=examples(200), deadline=None)
@given(shapes, st.data())
def test_scores_are_those_of_full_attention_wherever_the_history_is_cut(shape: Shape, data: st.DataObject) -> None:
    """Behind the window, across its edge, and within it; in one prefill, in chunks, and with a suffix."""
    ids = st.integers(1, shape.items)
    history = data.draw(st.lists(ids, max_size=3 * shape.window + 2))
    stops = sorted(data.draw(st.lists(st.integers(0, len(history)), max_size=4)))
    candidates = data.draw(st.lists(ids, min_size=1, max_size=5))
    expected = scores(shape, state_dict(shape), history, candidates)
    found = served(imported(shape).model, history, stops, candidates)
    assert float((found - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


@FORMS
def test_the_longest_history_of_the_window_and_the_next_one(shape: Shape) -> None:
    history = [1 + (7 * place) % shape.items for place in range(shape.window + 2)]
    for length in range(shape.window - 1, shape.window + 3):
        expected = scores(shape, state_dict(shape), history[:length], [1, shape.items])
        for cut in (1, length - 1, length):
            found = served(imported(shape).model, history[:length], [cut], [1, shape.items])
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


# ---- importing ----


def as_state_dict(folder: Path, shape: Shape) -> Path:
    torch.save(state_dict(shape), folder / "plain.pt")
    return folder / "plain.pt"


def as_training_state(folder: Path, shape: Shape) -> Path:
    """As RecBole's file, without the object that is its configuration."""
    wrapped = {f"module._orig_mod.{name}": value for name, value in state_dict(shape).items()}
    rest = {"epoch": 3, "other_parameter": {"seen": torch.ones(3)}, "optimizer": {"state": {0: torch.ones(3)}}}
    torch.save({"state_dict": wrapped} | rest, folder / "t.pth")
    return folder / "t.pth"


def as_safetensors(folder: Path, shape: Shape) -> Path:
    save_file(state_dict(shape), folder / "a.safetensors")
    return folder / "a.safetensors"


def as_distributed(folder: Path, shape: Shape) -> Path:
    from torch.distributed.checkpoint.state_dict_saver import save as save_distributed  # a second

    save_distributed({"model": state_dict(shape), "step": 7}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", [as_state_dict, as_training_state, as_safetensors, as_distributed])
@FORMS
def test_every_form_of_a_checkpoint_is_the_same_model(tmp_path: Path, save: Any, shape: Shape) -> None:
    made = import_checkpoint(save(tmp_path, shape), tmp_path / "out", choices(shape))
    loaded = load_any_checkpoint(tmp_path / "out")
    assert isinstance(loaded, SasRec)
    assert loaded.version == made.model.version == imported(shape).model.version
    assert made.left_out == (("other_parameter.seen",) if save is as_training_state else ())
    assert loaded.config == made.model.config


@pytest.mark.parametrize(
    ("shape", "change", "words"),
    [
        (RECBOLE, {QUERY: None}, f"`{QUERY}` is missing; expected it with shape"),
        (RECBOLE, {QUERY: torch.ones(12, 13)}, rf"`{QUERY}` has shape \(12, 13\)"),
        (RECBOLE, {QUERY: torch.full((12, 12), torch.nan)}, f"`{QUERY}` contains values that are not finite"),
        (RECBOLE, {QUERY: torch.ones(12, 12, dtype=torch.int64)}, "expected a floating type"),
        (RECBOLE, {"item_embedding.weight": None}, r"`item_embedding\.weight` is missing"),
        (RECBOLE, {"item_embedding.weight": torch.ones(9)}, r"has shape \(9,\), expected 2 dimensions"),
        (RECBOLE, {"item_embedding.weight": torch.ones(1, 12)}, r"has shape \(1, 12\), expected at least 2"),
        (GSASREC, {"item_embedding.weight": torch.eye(12).to_sparse()}, "expected a dense tensor"),
        (RECBOLE, {"position_embedding.weight": None}, "which every SASRec of RecBole and gSASRec-pytorch has"),
        (RECBOLE, {"position_embedding.weight": torch.ones(60, 11)}, r"the shape of others asks for \(60, 12\)"),
        (RECBOLE, {"feature_embed_layer.weight": torch.ones(3)}, "`feature_embed_layer.weight` is no weight of this"),
        (RECBOLE, {"transformer_blocks.0.dense1.bias": torch.ones(12)}, "and both are there"),
        (RECBOLE, {"output_embedding.weight": torch.ones(41, 12)}, "`output_embedding.weight` is no weight of this"),
        (RECBOLE, {"ema.position_embedding.weight": torch.ones(60, 12)}, "keep one of them"),
        (RECBOLE, {"module.LayerNorm.bias": torch.ones(12)}, "is there twice"),
        (GSASREC, {"output_embedding.weight": torch.ones(41, 12)}, r"`output_embedding\.weight` has shape \(40, 12\)"),
        (GSASREC, {"seq_norm.bias": None}, r"`seq_norm\.bias` is missing"),
        (replace(RECBOLE, heads=5), {}, "5 heads do not divide the width 12"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_its_name(shape: Shape, change: dict[str, Any], words: str) -> None:
    weights = {name: value for name, value in (state_dict(shape) | change).items() if value is not None}
    with pytest.raises(ModelError, match=words):
        model_of(Path("x.pt"), weights, choices(shape))


def test_another_model_is_refused() -> None:
    with pytest.raises(ModelError, match="and neither is there"):
        model_of(Path("x.pt"), {"position_embedding.weight": torch.ones(3, 4)}, SasRecChoices(2))


class Config:
    """RecBole's configuration, an object in its checkpoints."""


def test_a_file_with_an_object_is_not_read_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    torch.save({"config": Config(), "state_dict": state_dict(RECBOLE)}, tmp_path / "SASRec.pth")
    words = ["model", "import", "sasrec", str(tmp_path / "SASRec.pth"), str(tmp_path / "out"), "--heads", "3"]
    said = CliRunner().invoke(main, words)
    assert said.exit_code == 1
    assert "Config" in said.stderr
    assert 'torch.save(torch.load(FILE, weights_only=False)["state_dict"], NEW)' in said.stderr
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_made_and_needs_the_heads(tmp_path: Path) -> None:
    words = ["model", "import", "sasrec", str(as_state_dict(tmp_path, RECBOLE)), str(tmp_path / "out")]
    assert "--heads" in CliRunner().invoke(main, words).stderr
    said = CliRunner().invoke(main, [*words, "--heads", "3", "--activation", "relu", "--norm-eps", "1e-6"])
    assert said.exit_code == 0, said.output
    assert "item ids 1 to 40" in said.output
    assert "served incrementally up to 60 behaviours" in said.output
    found = load_any_checkpoint(tmp_path / "out").config
    assert (found.activation, found.norm_eps) == ("relu", 1e-6)  # type: ignore[union-attr]
    assert "positions count from the newest" in describe(imported(GSASREC))
    with pytest.raises(ModelError, match="is there already"):
        import_checkpoint(tmp_path / "plain.pt", tmp_path / "out", SasRecChoices(3))


# ---- serving ----


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.stack
def test_an_imported_model_keeps_the_protocol(tmp_path: Path, shape: Shape, dtype: torch.dtype) -> None:
    import_checkpoint(as_state_dict(tmp_path, shape), tmp_path / "out", choices(shape))
    model = relaygr_settings.Model(checkpoint=str(tmp_path / "out"))
    said: list[str] = []
    probe = Probe(
        lambda wanted: load_model(model, relaygr_settings.Relay(), device=CPU, dtype=wanted), CPU, dtype,
        RequestBounds(prefix=200, suffix=16, candidates=20, items=shape.items + 1, max_stale=9), seed=1,
    )  # fmt: skip
    assert check_model(probe, said.append), "\n".join(said)


@FORMS
def test_an_id_without_a_row_shares_one_and_is_counted_and_the_padding_is_never_scored(shape: Shape) -> None:
    poisoned = state_dict(shape)
    for name in ("item_embedding.weight", "output_embedding.weight"):
        if name in poisoned:
            poisoned[name][[0, *([-1] if shape.form == "gsasrec" else [])]] = 1e30
    model = model_of(Path("x.pt"), poisoned, choices(shape)).model
    last = shape.items
    known = served(model, [last, 1, 2], [3], [last, 1, 2])
    assert model.unknown_items == 0
    unknown = served(model, [0, last + 1, 2 + 5 * last], [3], [0, last + 1, 2 + 5 * last])
    assert model.unknown_items == 6
    assert torch.equal(unknown, known)
    assert float(known.abs().max()) < 1e6


def test_a_region_without_room_is_refused_and_left_as_it_was() -> None:
    model = imported(RECBOLE).model
    region = KVRegion.new(model.layout, 4)
    model.prefill(region, tokens([1, 2, 3]))
    with pytest.raises(ValueError, match="2 tokens behind 3 do not fit into a region of 4"):
        model.prefill(region, tokens([4, 5]))
    assert region.length == 3


def test_kernels_and_types_that_do_not_compute_it_are_refused() -> None:
    with pytest.raises(ModelError, match=r'worker\.kernels = "amx", but only torch operators'):
        imported(RECBOLE).model.place(CPU, torch.float32, "amx")
    with pytest.raises(ValueError, match="dtype must be one of"):
        imported(RECBOLE).model.place(CPU, torch.float64)


@FORMS
def test_a_mapped_item_table_gives_the_same_scores(tmp_path: Path, shape: Shape) -> None:
    made = import_checkpoint(as_state_dict(tmp_path, shape), tmp_path / "out", choices(shape))
    map_items(tmp_path / "out", tmp_path / "mapped", "float32", 1 << 9)
    mapped = load_any_checkpoint(tmp_path / "mapped")
    assert isinstance(mapped, SasRec)
    assert mapped.version != made.model.version
    history = [1 + place % shape.items for place in range(70)]
    for stop in (30, 65):
        found = served(mapped, history, [stop], [1, 5])
        assert torch.equal(found, served(made.model, history, [stop], [1, 5]))


def test_a_factory_of_another_model_does_not_take_the_checkpoint(tmp_path: Path) -> None:
    import_checkpoint(as_state_dict(tmp_path, RECBOLE), tmp_path / "out", choices(RECBOLE))
    model = relaygr_settings.Model(checkpoint=str(tmp_path / "out"), factory="relaygr_stream.models.transformer:make")
    with pytest.raises(ConfigError, match="is no HSTU, whose shape"):
        load_model(model, relaygr_settings.Relay(), device=CPU, dtype=torch.float32)
