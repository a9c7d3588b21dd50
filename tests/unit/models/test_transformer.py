"""The second built-in model against its formulas, and through the same settings as any user's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec.structs import replace

from relaygr_stream import settings
from relaygr_stream.errors import ConfigError
from relaygr_stream.models.api import RankingModel, ScoreInput
from relaygr_stream.models.loading import load_model, save_random
from relaygr_stream.models.softmax import BLOCK_ROWS
from relaygr_stream.models.transformer import Transformer, TransformerConfig
from tests.properties import examples
from tests.unit.models.naive_transformer import naive_scores
from tests.unit.models.small_models import MORE, deviation, prefilled, random_items, random_tokens, splits
from tests.unit.models.test_check import SMALL
from tests.unit.models.test_extend_and_score import seeds

CPU = torch.device("cpu")
FACTORY = replace(SMALL, factory="relaygr_stream.models.transformer:make")
CONFIG = TransformerConfig(
    layers=3, dim=16, heads=2, dqk=8, dv=12, vocab=50, max_positions=40, tasks=("click", "like")
)  # fmt: skip
MODEL = Transformer(CONFIG, 3, CPU, torch.float32)


@hypothesis_settings(max_examples=examples(60))
@given(splits(), st.integers(1, 9), seeds)
def test_scores_are_those_of_the_formulas_however_history_is_cut(
    split: tuple[int, tuple[int, ...]], count: int, seed: int
) -> None:
    length, bounds = split
    random = np.random.default_rng(seed)
    history, candidates = random_tokens(random, length), random_items(random, count + MORE)
    region = prefilled(MODEL, history.slice(0, bounds[-1] if bounds else length), slack=3, chunks=bounds[:-1])
    (scores,) = MODEL.score([ScoreInput(region, history.slice(region.length, length), candidates[:count])])
    expected = naive_scores(MODEL, CONFIG, history, candidates)
    assert deviation(scores, expected[:count], expected[count:]) <= 1e-5


@pytest.mark.parametrize("rows", [BLOCK_ROWS - 1, BLOCK_ROWS, 2 * BLOCK_ROWS + 3])
def test_blocks_of_rows_do_not_show(rows: int) -> None:
    random = np.random.default_rng(rows)
    history, candidates = random_tokens(random, rows + 9), random_items(random, rows)
    region = prefilled(MODEL, history.slice(0, rows), slack=9, chunks=(5,))
    (scores,) = MODEL.score([ScoreInput(region, history.slice(rows, rows + 9), candidates)])
    assert deviation(scores, naive_scores(MODEL, CONFIG, history, candidates)) <= 1e-5


def test_the_settings_make_it() -> None:
    model = load_model(FACTORY, settings.Relay(), device=CPU, dtype=torch.bfloat16)
    assert isinstance(model, RankingModel)
    assert model.note == "random weights, seed 7"
    assert model.version.startswith("transformer-")
    assert model.version.endswith("-bfloat16")
    assert model.tasks == ("click", "like")
    layout = model.layout
    assert (layout.layers, layout.heads, layout.dqk, layout.dv, layout.dtype) == (2, 2, 8, 12, torch.bfloat16)
    other = load_model(replace(FACTORY, seed=8), settings.Relay(), device=CPU, dtype=torch.bfloat16)
    assert other.version != model.version


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("contextual_seq_len", 2),
        ("max_attn_len", 3),
        ("group_norm", True),
        ("oov_rows", 4),
        ("relative_positions", 5),
        ("relative_times", 6),
    ],
)
def test_a_shape_of_the_built_in_model_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"`{name}` = .* is of the built-in HSTU"):
        load_model(replace(FACTORY, **{name: value}), settings.Relay(), device=CPU, dtype=torch.float32)


def test_its_shape_may_be_a_checkpoints(tmp_path: Path) -> None:
    served = save_random(replace(FACTORY, contextual_seq_len=0), tmp_path / "shape")
    assert served == settings.Model(factory=FACTORY.factory, checkpoint=str(tmp_path / "shape"))
    here, there = (load_model(each, settings.Relay(), device=CPU, dtype=torch.float32) for each in (FACTORY, served))
    assert here.version == there.version


def test_a_region_without_room_is_refused_and_unchanged() -> None:
    random = np.random.default_rng(0)
    region = prefilled(MODEL, random_tokens(random, 5), slack=2)
    with pytest.raises(ValueError, match="3 tokens behind 5 do not fit into a region of 7"):
        MODEL.prefill(region, random_tokens(random, 3))
    assert region.length == 5
