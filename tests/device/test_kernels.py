"""The fused kernels and recorded graphs on a GPU, at sizes of the real thing. What the interpreter cannot show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from relaygr_stream.models.api import ScoreInput
from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.models.kv import KVRegion
from tests.unit.models.kernels.models import region_of
from tests.unit.models.small_models import deviation, held, random_items, random_tokens, small_model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs a CUDA device, its driver and a CUDA build of torch: make test-device",
    ),
]

CUDA = torch.device("cuda", 0)
SIZE: dict[str, Any] = {"layers": 8, "dim": 256, "heads": 4, "dqk": 64, "dv": 64, "max_positions": 4096}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES: list[dict[str, Any]] = [{}, {"max_attn_len": 700}, {"group_norm": True}, {"dqk": 24, "dv": 40}]


def placed(dtype: torch.dtype, kernels: Any, **changes: Any) -> HSTUModel:
    return small_model(**{**SIZE, **changes}).place(CUDA, dtype, kernels)


@pytest.fixture
def _sync_debug_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def batch_for(model: HSTUModel, seed: int) -> list[ScoreInput]:
    """The same rankings for any model: its own prefix KV of the same tokens."""
    random = np.random.default_rng(seed)
    return [
        ScoreInput(
            region_of(model, random_tokens(random, length), length // 3),
            random_tokens(random, suffix),
            random_items(random, candidates),
        )
        for length, suffix, candidates in ((2048, 0, 64), (700, 33, 100), (0, 5, 3), (65, 0, 512))
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_auto_finds_that_they_agree(dtype: torch.dtype) -> None:
    with structlog.testing.capture_logs() as logged:
        assert placed(dtype, "auto").stack.fused is not None
    assert [line["event"][:38] for line in logged if "native layers" not in line["event"]] == [
        "attention runs on fused Triton kernels"
    ]


@pytest.mark.parametrize("changes", SHAPES)
def test_float32_is_that_of_torch(changes: dict[str, Any]) -> None:
    fused, plain = placed(torch.float32, "triton", **changes), placed(torch.float32, "torch", **changes)
    batches = batch_for(fused, 1), batch_for(plain, 1)
    for one, other in zip(*batches, strict=True):
        assert deviation(held(one.kv), held(other.kv)) <= 1e-5
    for found, expected in zip(fused.score(batches[0]), plain.score(batches[1]), strict=True):
        assert deviation(found, expected) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", SHAPES)
def test_half_precision_is_no_further_from_the_truth(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    exact = placed(torch.float32, "torch", **changes)
    truth = torch.cat(exact.score(batch_for(exact, 2)))
    fused, plain = placed(dtype, "triton", **changes), placed(dtype, "torch", **changes)
    fused_rms, plain_rms = (
        float((torch.cat(model.score(batch_for(model, 2))) - truth).square().mean().sqrt()) for model in (fused, plain)
    )
    assert fused_rms <= 1.1 * plain_rms


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_scores_are_live_ones(dtype: torch.dtype) -> None:
    """The first score of a size is live, the second records and replays, the others replay."""
    model = placed(dtype, "triton")
    limit = 1e-5 if dtype == torch.float32 else 5e-2
    with structlog.testing.capture_logs() as logged:
        batches = [batch_for(model, seed) for seed in range(4)]
        live = model.score(batches[0])
        model.score(batches[1])
        replayed = [model.score(batch) for batch in (*batches, batches[0])]
        for one, other, again in zip(live, replayed[0], replayed[-1], strict=True):
            assert deviation(other, one) <= limit
            assert torch.equal(again, other)
    assert logged == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", SHAPES)
def test_recorded_prefills_are_live_ones(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    """Chunks of the same bucket: the first is live, the second is recorded, the others replay."""
    model, plain = placed(dtype, "triton", **changes), placed(torch.float32, "torch", **changes)
    random = np.random.default_rng(4)
    with structlog.testing.capture_logs() as logged:
        for _ in range(4):
            tokens = random_tokens(random, 1600)
            found, exact = (KVRegion.new(one.layout, 1600, torch.nan, CUDA) for one in (model, plain))
            for stop in (1000, 1040, 1600):
                model.prefill(found, tokens.slice(found.length, stop))
            plain.prefill(exact, tokens)
            limit = 1e-5 if dtype == torch.float32 else 5e-2
            assert deviation(held(found).float(), held(exact)) <= limit
    assert logged == []


@pytest.mark.usefixtures("_sync_debug_mode")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_a_replay_waits_for_nothing() -> None:
    model = placed(torch.bfloat16, "triton")
    batch = batch_for(model, 3)
    for _ in range(2):
        model.score(batch)
    region = region_of(model, random_tokens(np.random.default_rng(0), 200))
    for _ in range(2):
        region.length = 100
        model.prefill(region, random_tokens(np.random.default_rng(1), 20))
    torch.cuda.set_sync_debug_mode("error")
    model.score(batch)
    region.length = 100
    model.prefill(region, random_tokens(np.random.default_rng(1), 20))
