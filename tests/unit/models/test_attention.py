from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.models.attention import FEW_ROWS, Visibility, attend, attend_to_self, block_rows
from relaygr_stream.models.reference_arrays import META
from tests.unit.models.naive_hstu import valid_attention
from tests.unit.models.test_conformance import REFERENCE

rules = st.builds(Visibility, st.integers(0, 5), st.integers(0, 9))


def dense(visibility: Visibility, row0: int, rows: int, col0: int, cols: int, history: int, block: int) -> torch.Tensor:
    """The pairs that `attend` counts, as a 0/1 matrix: with q·k large, equal scores and one-hot values."""
    queries, keys = torch.full((1, rows, 1), 40.0), torch.ones(1, cols, 1)
    out = torch.full((1, rows, cols), torch.nan)
    blocks = visibility.blocks(row0, rows, col0, cols, history, block)
    attend(queries, keys, torch.eye(cols)[None], out, blocks, scale=1.0, weight=1 / 40)
    return out[0]


@given(rules, st.integers(0, 30), st.integers(0, 4), st.integers(1, 12))
def test_history_and_candidates_see_what_the_reference_says(
    visibility: Visibility, history: int, candidates: int, block: int
) -> None:
    # The reference leaves histories shorter than the contextual tokens undefined: there, everyone sees no one.
    history += visibility.contextual
    expected = valid_attention(history, candidates, visibility.contextual, visibility.window)
    rows = dense(visibility, 0, history, 0, history, history, block)
    assert np.array_equal(rows.numpy() > 0.5, expected[:history, :history])
    ranked = dense(visibility, history, candidates, 0, history, history, block)
    assert np.array_equal(ranked.numpy() > 0.5, expected[history:, :history])


@given(st.integers(0, 9), st.integers(0, 12), st.integers(0, 12), st.integers(0, 4), st.integers(1, 7))
def test_a_suffix_behind_a_prefix_sees_what_it_would_in_one_history(
    window: int, prefix: int, suffix: int, candidates: int, block: int
) -> None:
    visibility, history = Visibility(0, window), prefix + suffix
    expected = valid_attention(history, candidates, 0, window)[prefix:, :history]
    rows = suffix + candidates
    on_prefix = dense(visibility, prefix, rows, 0, prefix, history, block)
    on_suffix = dense(visibility, prefix, rows, prefix, suffix, history, block)
    assert np.array_equal(torch.cat((on_prefix, on_suffix), dim=1).numpy() > 0.5, expected)


@pytest.mark.parametrize("variant", ["base", "ctx4", "maxattn8", "ctx4_maxattn8"])
def test_the_masks_of_the_reference_arrays(variant: str) -> None:
    arrays: dict[str, npt.NDArray[np.bool_]] = dict(np.load(REFERENCE))
    meta = dict(zip(META, arrays[f"{variant}/meta"].tolist(), strict=True))
    visibility = Visibility(int(meta["contextual_seq_len"]), int(meta["max_attn_len"]))
    for user in range(3):
        mask, history = arrays[f"{variant}/mask{user}"], len(arrays[f"{variant}/in/hist{user}"])
        found = dense(visibility, 0, history, 0, history, history, 5)
        assert np.array_equal(found.numpy() > 0.5, mask[:history, :history])


def test_a_short_history_of_contextual_tokens_only_is_seen_by_all() -> None:
    visibility = Visibility(contextual=6, window=2)
    assert dense(visibility, 0, 4, 0, 4, 4, 3).min() > 0.5
    assert dense(visibility, 4, 3, 0, 4, 4, 3).min() > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attend_is_the_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = 2 * FEW_ROWS  # one block of many rows, one of few
    q, k, v = torch.randn(3, rows, 8), torch.randn(3, rows, 8), torch.randn(3, rows, 5)
    scores = torch.nn.functional.silu(q @ k.transpose(1, 2) / math.sqrt(8)).tril()
    expected = scores @ v / 16
    out = torch.full((3, rows, 5), torch.nan, dtype=dtype)
    blocks = Visibility().blocks(0, rows, 0, rows, rows, FEW_ROWS + 10)
    attend(q.to(dtype), k.to(dtype), v.to(dtype), out, blocks, scale=1 / math.sqrt(8), weight=1 / 16)
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    assert torch.allclose(out.float(), expected, atol=tolerance)
    attend(q.to(dtype), k.to(dtype), v.to(dtype), out, blocks, scale=1 / math.sqrt(8), weight=1 / 16, accumulate=True)
    assert torch.allclose(out.float(), 2 * expected, atol=2 * tolerance)


def test_attend_to_self_adds_each_rows_own_pair() -> None:
    torch.manual_seed(0)
    q, k, v, out = torch.randn(4, 2, 8), torch.randn(4, 2, 8), torch.randn(4, 2, 5), torch.randn(4, 2, 5)
    weight = torch.tensor([0.0, 0.1, 0.1, 0.0]).view(4, 1, 1)
    expected = out + weight * torch.nn.functional.silu((q * k).sum(-1, keepdim=True) / 3) * v
    attend_to_self(q, k, v, out, scale=1 / 3, weight=weight)
    assert torch.allclose(out, expected, atol=1e-6)


def test_a_small_scale_does_not_underflow_in_float16() -> None:
    # 1/N on the scores: 1e-3 / 65,536 is below float16's smallest number, and every score would be zero.
    q = torch.full((1, 64, 16), 0.01, dtype=torch.float16)
    out = torch.empty((1, 64, 16), dtype=torch.float16)
    blocks = Visibility().blocks(0, 64, 0, 64, 64, 64)
    attend(q, q, torch.full_like(q, 200.0), out, blocks, scale=1.0, weight=1 / 65536)
    expected = 0.0016 / 2 * 200 * 64 / 65536
    assert float(out[0, -1, 0]) == pytest.approx(expected, rel=0.02)


def test_scratch_memory_is_bounded_whatever_the_prefix() -> None:
    for device, dtype in ((torch.device("cpu"), torch.bfloat16), (torch.device("meta"), torch.float32)):
        few, many = block_rows(device, dtype, 4, 256), block_rows(device, dtype, 4, 1 << 24)
        assert many < few
        assert many >= 32


@given(rules, st.integers(0, 30), st.integers(0, 4), st.integers(1, 12), st.integers(1, 20))
def test_pieces_of_a_block_are_the_block(
    visibility: Visibility, history: int, candidates: int, rows: int, most: int
) -> None:
    """In float32 on the CPU a long block goes over its columns in pieces: each column once, hidden as before."""
    history += visibility.contextual
    for block in visibility.blocks(0, history + candidates, 0, history, history, rows):
        seen = torch.zeros(block.row_stop - block.row_start, block.col_stop - block.col_start)
        for piece in block.pieces(most):
            part = torch.ones(len(seen), piece.col_stop - piece.col_start)
            if piece.causal is not None:
                part[:, piece.causal_from :].tril_(piece.causal)
            if piece.recent is not None:
                part[:, : piece.recent_to].triu_(piece.recent)
            seen[:, piece.col_start - block.col_start : piece.col_stop - block.col_start] += part
        expected = torch.ones_like(seen)
        if block.causal is not None:
            expected[:, block.causal_from :].tril_(block.causal)
        if block.recent is not None:
            expected[:, : block.recent_to].triu_(block.recent)
        assert torch.equal(seen, expected)


def test_a_piece_has_no_more_columns_than_asked_for_but_along_the_diagonal() -> None:
    (*_, block) = Visibility().blocks(0, 256, 0, 4096, 4096, 64)
    pieces = list(block.pieces(100))
    assert [piece.col_stop - piece.col_start for piece in pieces[:-1]] == [100, 93]
    assert pieces[-1].col_stop - pieces[-1].col_start == 63  # below it, the first row sees all


def test_a_ranking_reads_its_prefix_once() -> None:
    (block,) = Visibility().blocks(row0=100, rows=80, col0=0, cols=100, history=116, block_rows=256)
    assert block == (0, 80, 0, 100, None, 0, None, 0)


def test_blocks_leave_out_what_their_rows_cannot_see() -> None:
    blocks = Visibility(window=8).blocks(row0=0, rows=64, col0=0, cols=64, history=64, block_rows=16)
    assert all(block.col_stop - block.col_start <= 16 + 8 for block in blocks)
    causal = Visibility().blocks(row0=0, rows=64, col0=0, cols=64, history=64, block_rows=16)
    assert [block.col_stop for block in causal] == [16, 32, 48, 64]
