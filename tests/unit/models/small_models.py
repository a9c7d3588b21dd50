"""Small models, tokens and regions for the tests, and the property-test strategies that make them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from relaygr_stream.models.api import KVRegion, RankingModel, ScoreInput, Tokens
from relaygr_stream.models.hstu_model import HSTUConfig, HSTUModel
from relaygr_stream.models.loading import random_model

SHAPE: dict[str, Any] = {
    "layers": 3, "dim": 16, "heads": 2, "dqk": 8, "dv": 12, "vocab": 50, "max_positions": 40, "scale_tokens": 32,
    "tasks": ("click", "like"),
}  # fmt: skip

#: Every shape of attention that takes prefixes apart; contextual models do not.
INCREMENTAL: tuple[dict[str, Any], ...] = (
    {},
    {"max_attn_len": 6},
    {"group_norm": True},
    {"max_attn_len": 1, "group_norm": True},
)


def small_model(seed: int = 3, **changes: Any) -> HSTUModel:
    return random_model(HSTUConfig(**{**SHAPE, **changes}), seed)


def random_tokens(random: np.random.Generator, count: int) -> Tokens:
    array = np.empty((3, count), np.int64)
    array[0] = random.integers(0, 1 << 32, count)
    array[1] = random.integers(0, 256, count)
    array[2] = random.integers(0, 1 << 30, count)
    return Tokens(array)


def random_items(random: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    return random.integers(0, 1 << 32, count)


def empty_region(model: RankingModel, capacity: int) -> KVRegion:
    """A region whose every element is NaN until it is written."""
    layout = model.layout
    return KVRegion(layout, torch.full((layout.elements(capacity),), torch.nan, dtype=layout.dtype), capacity)


def prefilled(model: RankingModel, tokens: Tokens, *, slack: int = 0, chunks: tuple[int, ...] = ()) -> KVRegion:
    """A region holding `tokens`, extended up to each of the bounds in `chunks` in turn and then to the end."""
    region = empty_region(model, len(tokens) + slack)
    for stop in (*chunks, len(tokens)):
        model.prefill(region, tokens.slice(region.length, stop))
    return region


def full_scores(model: RankingModel, history: Tokens, candidates: npt.NDArray[np.int64]) -> torch.Tensor:
    """Full inference: everything into scratch, then the candidates."""
    return model.score([ScoreInput(prefilled(model, history), history.slice(0, 0), candidates)])[0]


def held(region: KVRegion) -> torch.Tensor:
    """All K and V of the tokens in the region, as one vector."""
    parts = [part[:, : region.length].flatten() for i in range(region.layout.layers) for part in region.layer(i)]
    return torch.cat(parts)


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest deviation relative to the largest expected value; NaN anywhere counts as infinite."""
    if found.numel() == 0:
        return 0.0
    worst = float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30))
    return float("inf") if np.isnan(worst) else worst


@st.composite
def splits(draw: st.DrawFn, longest: int = 24) -> tuple[int, tuple[int, ...]]:
    """A length and ascending bounds within it."""
    length = draw(st.integers(0, longest))
    bounds = draw(st.lists(st.integers(0, length), max_size=5))
    return length, tuple(sorted(bounds))
