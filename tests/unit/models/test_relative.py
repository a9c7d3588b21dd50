"""A bias on relative positions and times: the buckets, times in a region, and what the model must refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.errors import ModelError
from relaygr_stream.models.api import ScoreInput, Tokens
from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.models.kv import KVLayout, KVRegion
from relaygr_stream.models.relative import MOST_BUCKETS, time_buckets
from relaygr_stream.wire.behaviours import Behaviours
from tests.properties import examples
from tests.unit.models.small_models import small_model

CANDIDATES = np.arange(4)
HOUR = 3_600_000


@given(st.integers(-(2**40), 2**53), st.integers(1, MOST_BUCKETS))
def test_a_bucket_is_the_logarithm_of_the_time(apart: int, count: int) -> None:
    exact = np.log(max(apart, 1)) / 0.301
    if abs(exact - round(exact)) > 1e-9:
        assert time_buckets(torch.tensor([apart]), count).item() == min(int(exact), count - 1)


@settings(max_examples=examples(50))
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.lists(st.integers(-(2**62), 2**62), max_size=6),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_times_are_exact_in_a_region_of_any_type_and_go_with_its_tokens(
    dtype: torch.dtype, values: list[int], width: int, state: int
) -> None:
    layout = KVLayout(1, 1, width, 2, dtype, state, times=True)
    first, second = (KVRegion.new(layout, size) for size in (7, 9))
    first.layer(0)[0].fill_(1)
    first.set_times(1, torch.tensor(values, dtype=torch.int64))
    second.copy_from(first, 1 + len(values))
    assert second.times(1, 1 + len(values)).tolist() == values
    assert bool((first.layer(0)[0] == 1).all())  # times overwrite no keys
    assert bool((first.layer(0)[1] == 0).all())


def scores(model: HSTUModel, times: list[int], cut: int) -> torch.Tensor:
    """The candidates' scores behind behaviours at these times, the first `cut` of them as prefix."""
    count = len(times)
    tokens = Tokens.from_behaviours(
        Behaviours.from_arrays(np.arange(count), np.zeros(count, np.int64), np.array(times))
    )
    region = KVRegion.new(model.layout, count)
    model.prefill(region, tokens.slice(0, cut))
    return model.score([ScoreInput(region, tokens.slice(cut, count), CANDIDATES)])[0]


@pytest.mark.parametrize("cut", [0, 2, 5])
def test_scores_depend_on_how_far_apart_the_times_are_and_not_on_when(cut: int) -> None:
    model = small_model(relative_times=MOST_BUCKETS)
    times = [0, HOUR, HOUR + 1, 30 * HOUR, 900 * HOUR]
    later = [time + 5 * HOUR for time in times]
    assert torch.equal(scores(model, times, cut), scores(model, later, cut))
    with torch.no_grad():
        model.embedding.gap.zero_()  # what is left of times is the bias
    apart = scores(model, [0, HOUR, HOUR + 1, 30 * HOUR, 901 * HOUR + 500 * HOUR], cut)
    assert not torch.allclose(apart, scores(model, times, cut), atol=1e-3)


def test_contextual_tokens_and_a_relative_bias_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="contextual_seq_len"):
        small_model(relative_positions=4, contextual_seq_len=2)
    with pytest.raises(ValueError, match="over 128 buckets"):
        small_model(relative_times=MOST_BUCKETS + 1)


def test_kernels_that_do_not_compute_the_bias_are_refused_by_name_and_avoided_by_default() -> None:
    model = small_model(relative_positions=4, dim=32, dqk=32, dv=32)
    assert model.kernels == "torch"
    with pytest.raises(ModelError, match="bias on relative positions"):
        model.place(torch.device("cpu"), torch.float32, "avx2")


def test_a_model_without_the_bias_keeps_its_fields_and_version() -> None:
    assert not {"relative_positions", "relative_times"} & small_model().config.fields().keys()
    assert small_model(relative_times=9).version != small_model(relative_times=8).version
