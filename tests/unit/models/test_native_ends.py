"""Vectors and logits in C against the operators of torch that they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.models.api import Tokens
from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.native.ends import NativeEnds, Sequences
from relaygr_stream.models.native.layers import KINDS
from relaygr_stream.models.native.objects import Unavailable, library
from tests.properties import examples
from tests.unit.models.small_models import deviation, small_model

CPU = torch.device("cpu")
THREE = Tokens(np.zeros((3, 3), np.int64))


def missing(names: Sequence[str]) -> str:
    """Why none of these objects runs here; "" if one does."""
    try:
        library(names)
    except Unavailable as error:
        return str(error)
    return ""


in_each_dtype = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=pytest.mark.skipif(bool(missing(kinds)), reason=missing(kinds)))
        for dtype, kinds in KINDS.items()
    ],
)
#: Whatever a message may hold, the ends of its types and the tables' sizes among it.
numbers = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from((0, 1, -1, 49, 50, 255, 256, 2**41 - 1, 2**41, 2**63 - 1, -(2**63))),
)


@st.composite
def rankings(draw: st.DrawFn) -> tuple[Tokens, int, npt.NDArray[np.int64]]:
    """Numbers that lie close together, apart, or where no number of eight bytes should begin, as in a message."""
    behaviours, candidates = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    each = np.array(draw(st.lists(numbers, min_size=3 * behaviours, max_size=3 * behaviours)), np.int64)
    items = np.array(draw(st.lists(numbers, min_size=candidates, max_size=candidates)), np.int64)
    if draw(st.booleans()):
        items = np.frombuffer(b"odd" + items.tobytes(), np.int64, offset=3)
    if draw(st.booleans()):
        items = np.repeat(items, 2)[::2]
    array = each.reshape(3, behaviours)
    if draw(st.booleans()):
        array = np.asfortranarray(array)
    return Tokens(array), draw(st.sampled_from((0, 7, 38, 39, 40, 10**9))), items


def model_of(dtype: torch.dtype, oov_rows: int = 0) -> tuple[HSTUModel, NativeEnds]:
    """A model, and what lies before and behind its layers in C."""
    model = small_model(dim=32, dqk=32, dv=32, oov_rows=oov_rows).place(CPU, dtype)
    ends = model.stack.native_ends(model.embedding, model.head)
    assert ends is not None
    return model, ends


@in_each_dtype
@settings(max_examples=examples(100))
@given(batch=st.lists(rankings(), min_size=1, max_size=4), oov_rows=st.sampled_from((0, 1, 7)))
def test_vectors_are_those_of_torch_to_the_bit(
    dtype: torch.dtype, batch: list[tuple[Tokens, int, npt.NDArray[np.int64]]], oov_rows: int
) -> None:
    model, ends = model_of(dtype, oov_rows)
    assert torch.equal(ends.embed(Sequences(batch)), model.embedding.rankings(batch))
    in_c_and_torch = model.unknown_items
    model.embedding.rankings(batch)
    assert in_c_and_torch == 2 * (model.unknown_items - in_c_and_torch)  # each counts them alike
    tokens, first, _ = batch[0]
    assert torch.equal(ends.behaviours(tokens, first), model.embedding.behaviours(tokens, first))


@in_each_dtype
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
def test_logits_are_the_heads_of_candidates_alone(dtype: torch.dtype, size: float) -> None:
    (model, ends), none = model_of(dtype), np.zeros(0, np.int64)
    batch = [
        (Tokens(np.zeros((3, n), np.int64)), 0, none if m == 0 else np.arange(m)) for n, m in ((2, 3), (0, 4), (5, 0))
    ]
    outputs = (size * torch.randn(14, 32, generator=torch.Generator().manual_seed(1)) + 5 * size).to(dtype)
    # Rows 0, 1 are behaviours, 2 to 4 candidates, 5 to 8 candidates, 9 to 13 behaviours.
    assert deviation(ends.logits(Sequences(batch), outputs), model.head.logits(outputs[2:9])) <= 1e-5
    spread = outputs.repeat_interleave(2, 1)[:, ::2]  # rows whose numbers do not lie side by side
    assert torch.equal(ends.logits(Sequences(batch), spread), ends.logits(Sequences(batch), outputs))


def test_models_that_the_layers_do_not_fit_have_none() -> None:
    model = small_model(dim=16)
    assert model.stack.native_ends(model.embedding, model.head) is None


@in_each_dtype
def test_a_models_scores_are_made_with_them(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = model_of(dtype)
    monkeypatch.setattr(NativeEnds, "behaviours", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.prefill(KVRegion.new(model.layout, 4), THREE)


@pytest.mark.parametrize("rows", [0, 1, 2, 4])
def test_tokens_of_other_rows_are_refused_before_the_c_reads_them(rows: int) -> None:
    with pytest.raises(ValueError, match="unpack"):
        Sequences([(Tokens(np.zeros((rows, 5), np.int64)), 0, np.zeros(3, np.int64))])
