"""Small models, tokens and regions for the tests, and the property-test strategies that make them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from relaygr_stream.models.api import ROWS, RankingModel, ScoreInput, Tokens
from relaygr_stream.models.hstu_model import HSTUConfig, HSTUModel
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.loading import random_model
from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema, Table, Values

SHAPE: dict[str, Any] = {
    "layers": 3, "dim": 16, "heads": 2, "dqk": 8, "dv": 12, "vocab": 50, "max_positions": 40, "scale_tokens": 32,
    "tasks": ("click", "like"),
}  # fmt: skip

#: Candidates that are not scored, beside which the scores of a few are judged.
MORE = 20

#: Every shape of attention that takes prefixes apart; contextual models do not.
INCREMENTAL: tuple[dict[str, Any], ...] = (
    {},
    {"max_attn_len": 6},
    {"group_norm": True},
    {"max_attn_len": 1, "group_norm": True},
    {"relative_positions": 12},
    {"relative_times": 70, "max_attn_len": 6},
    {"relative_positions": 60, "relative_times": 128},
)


def small_model(seed: int = 3, **changes: Any) -> HSTUModel:
    return random_model(HSTUConfig(**{**SHAPE, **changes}), seed)


def random_tokens(random: np.random.Generator, count: int, schema: FeatureSchema = NO_FEATURES) -> Tokens:
    """A sequence: the user's token first, if the schema has features of the user."""
    tokens = Tokens.zeros(count, schema)
    array, first = tokens.array, tokens.context
    array[0, first:] = random.integers(0, 1 << 32, count)[first:]
    array[1, first:] = random.integers(0, 256, count)[first:]
    array[2, first:] = random.integers(0, 1 << 30, count)[first:]
    tables: tuple[tuple[Table, slice], ...] = (("user", slice(0, first)), ("behaviour", slice(first, count)))
    for table, rows in tables:
        size = len(range(count)[rows])
        packed = schema.pack(random_features(random, table, size, schema), {table: size})[table]
        schema.to_words(table, packed, array[ROWS:, rows])  # type: ignore[arg-type]
    return tokens


def random_features(random: np.random.Generator, table: Table, rows: int, schema: FeatureSchema) -> dict[str, Any]:
    return {
        one.name: random.standard_normal((rows, one.width), np.float32)
        if one.dtype == "float32"
        else random.integers(-5, 20, (rows, one.width)).astype(one.dtype)
        for one in schema.table(table)
    }


def random_items(random: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    return random.integers(0, 1 << 32, count)


def empty_region(model: RankingModel, capacity: int) -> KVRegion:
    """A region whose every element is NaN until it is written."""
    return KVRegion.new(model.layout, capacity, torch.nan)


def prefilled(model: RankingModel, tokens: Tokens, *, slack: int = 0, chunks: tuple[int, ...] = ()) -> KVRegion:
    """A region holding `tokens`, extended up to each of the bounds in `chunks` in turn and then to the end."""
    region = empty_region(model, len(tokens) + slack)
    for stop in (*chunks, len(tokens)):
        model.prefill(region, tokens.slice(region.length, stop))
    return region


def full_scores(
    model: RankingModel, history: Tokens, candidates: npt.NDArray[np.int64], features: Values | None = None
) -> torch.Tensor:
    """Full inference: everything into scratch, then the candidates."""
    return model.score([ScoreInput(prefilled(model, history), history.slice(0, 0), candidates, features or {})])[0]


def held(region: KVRegion) -> torch.Tensor:
    """All K and V of the tokens in the region, as one vector."""
    parts = [part[:, : region.length].flatten() for i in range(region.layout.layers) for part in region.layer(i)]
    return torch.cat(parts)


def deviation(found: torch.Tensor, expected: torch.Tensor, beside: torch.Tensor | None = None) -> float:
    """Largest deviation relative to the largest expected value; NaN anywhere counts as infinite.

    beside: other expected values, which tell how large they are: a single candidate's scores may nearly cancel.
    """
    if found.numel() == 0:
        return 0.0
    largest = (expected if beside is None else torch.cat((expected, beside))).double().abs().max().clamp(min=1e-30)
    worst = float((found.double() - expected.double()).abs().max() / largest)
    return float("inf") if np.isnan(worst) else worst


@st.composite
def splits(draw: st.DrawFn, longest: int = 24) -> tuple[int, tuple[int, ...]]:
    """A length and ascending bounds within it."""
    length = draw(st.integers(0, longest))
    bounds = draw(st.lists(st.integers(0, length), max_size=5))
    return length, tuple(sorted(bounds))
