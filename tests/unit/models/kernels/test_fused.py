"""The model on fused kernels against the same model on torch operators; in Triton's interpreter where no GPU is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.models.api import ScoreInput
from relaygr_stream.models.check.probe import HALF_LIMIT
from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.models.kv import KVRegion
from tests.properties import examples
from tests.unit.models.kernels.interpreter import HINT
from tests.unit.models.kernels.models import DEVICE, fused_model, plain_model, region_of
from tests.unit.models.small_models import INCREMENTAL, MORE, deviation, held, random_items, random_tokens

pytestmark = pytest.mark.stack  # Triton's interpreter: ten seconds of a core

pytest.importorskip("triton", reason=HINT)

#: Heads of widths that are no power of two, and wider than the smallest tile.
WIDE: dict[str, Any] = {"layers": 1, "dqk": 24, "dv": 40, "heads": 1}
#: Models with a bias on positions or times get no such kernels (models/kernels/choice.py).
SHAPES = [*(shape for shape in INCREMENTAL if not shape.keys() & {"relative_positions", "relative_times"}), WIDE]
MODELS = [(fused_model(**changes), plain_model(**changes)) for changes in SHAPES]
#: (prefix in two steps, suffix, candidates) of a ranking.
rankings = st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 6), st.integers(1, 40))


@settings(max_examples=examples(15))
@given(st.sampled_from(MODELS), st.lists(rankings, min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_prefix_and_scores_are_those_of_torch(
    models: tuple[HSTUModel, HSTUModel], shapes: list[tuple[int, int, int, int]], seed: int
) -> None:
    fused, plain = models
    random = np.random.default_rng(seed)
    batches: tuple[list[ScoreInput], list[ScoreInput]] = ([], [])
    for first, second, suffix, candidates in shapes:
        tokens, later = random_tokens(random, first + second), random_tokens(random, suffix)
        items = random_items(random, candidates + MORE)
        for model, batch, count in zip(models, batches, (candidates, candidates + MORE), strict=True):
            batch.append(ScoreInput(region_of(model, tokens, first), later, items[:count]))
    for one, other in zip(*batches, strict=True):
        assert deviation(held(one.kv), held(other.kv)) <= 1e-5
    for (*_, count), found, expected in zip(shapes, fused.score(batches[0]), plain.score(batches[1]), strict=True):
        assert deviation(found, expected[:count], expected[count:]) <= 1e-5


@pytest.mark.parametrize("changes", [{}, {"max_attn_len": 290}])
def test_a_long_prefix_is_cut_along_its_columns(changes: dict[str, Any]) -> None:
    fused, plain = (make(max_positions=800, layers=2, **changes) for make in (fused_model, plain_model))
    random = np.random.default_rng(1)
    tokens, later, items = random_tokens(random, 700), random_tokens(random, 9), random_items(random, 30)
    prefix = region_of(plain, tokens)
    batch = [ScoreInput(prefix, later, items)]
    assert deviation(fused.score(batch)[0], plain.score(batch)[0]) <= 1e-5
    extension = random_tokens(random, 2)
    for model in (fused, plain):
        longer = KVRegion(prefix.layout, prefix.storage.clone(), prefix.capacity, prefix.length)
        model.prefill(longer, extension)
        if model is fused:
            found = held(longer)
    assert deviation(found, held(longer)) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", [{}, {"max_attn_len": 6}, WIDE])
def test_half_precision_is_no_further_from_the_truth(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    fused, plain, exact = fused_model(dtype, **changes), plain_model(dtype, **changes), plain_model(**changes)
    random = np.random.default_rng(3)
    errors: dict[str, list[torch.Tensor]] = {"fused": [], "plain": []}
    for _ in range(6):  # the scores of one history share its roundings
        tokens, later, items = random_tokens(random, 60), random_tokens(random, 10), random_items(random, 16)
        truth = exact.score([ScoreInput(region_of(exact, tokens), later, items)])[0]
        for name, model in (("fused", fused), ("plain", plain)):
            found = model.score([ScoreInput(region_of(model, tokens, 13), later, items)])[0]
            errors[name].append((found - truth).flatten())
    fused_rms, plain_rms = (float(torch.cat(errors[name]).square().mean().sqrt()) for name in ("fused", "plain"))
    assert 0 < plain_rms < 0.1
    assert fused_rms <= HALF_LIMIT * plain_rms


def test_neighbours_do_not_change_one_bit_of_attention() -> None:
    """Whether a neighbour is long enough to be cut decides which kernel writes; the sums are the same."""
    from relaygr_stream.models.kernels.fused import FusedStack
    from relaygr_stream.models.kernels.silu_attention import silu_attention
    from relaygr_stream.models.stu import RankingRows

    model = plain_model(max_positions=800)
    random = np.random.default_rng(2)
    short, long = (region_of(model, random_tokens(random, length)) for length in (50, 600))
    fused = FusedStack(model.config, torch.float32)
    batch = [RankingRows(short, 3, 20), RankingRows(long, 0, 9)]
    uvqk = torch.randn((32, 2 * 2 * (12 + 8)), device=DEVICE)
    outputs = []
    for some, split in ((batch[:1], False), (batch, True)):
        room = torch.zeros((32, 3 * 2 * 12), device=DEVICE)
        tiles = torch.from_numpy(fused.table(some)).to(DEVICE)
        silu_attention(fused.shape, tiles, 1, uvqk, room, split=split)
        outputs.append(room[:23])
    assert outputs[0].abs().sum() > 0
    assert torch.equal(outputs[0], outputs[1])
