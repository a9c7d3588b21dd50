"""The functions in C against the same formulas in float32 by torch, and what happens on machines without them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.models import attention
from relaygr_stream.models.attention import Visibility
from relaygr_stream.models.native import attention as native
from relaygr_stream.models.native import build
from relaygr_stream.models.protocol import ScoreInput
from tests.unit.models.small_models import deviation, extended, full_scores, random_items, random_tokens, small_model

CPU = torch.device("cpu")
#: bfloat16 has 8 bits; scores and sums are each rounded once, errors of many terms partly cancel.
ROUNDING = 0.01

needs_amx = pytest.mark.skipif(build.library() is None, reason="needs a CPU with AMX and a C compiler")


@pytest.fixture
def afresh() -> Iterator[None]:
    """Whatever the process has compiled is forgotten, before and after."""
    build.library.cache_clear()
    yield
    build.library.cache_clear()


@needs_amx
@settings(deadline=None, max_examples=60)
@given(
    st.builds(Visibility, st.integers(0, 40), st.integers(0, 300)),
    st.integers(0, 700),
    st.integers(1, 140),
    st.integers(0, 600),
    st.sampled_from(((32, 32), (64, 64), (64, 96), (128, 32))),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_any_block_is_the_formula(
    visibility: Visibility, row0: int, rows: int, cols: int, widths: tuple[int, int], accumulate: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    heads, (dqk, dv), history = 2, widths, max(row0, cols)
    blocks = visibility.blocks(row0, rows, 0, cols, history, 1 << 30)
    # As the stack has them: heads side by side in a row, K and V in a region with room behind what they hold.
    q = torch.randn(rows, heads, dqk).bfloat16().transpose(0, 1)
    k, v = (
        torch.full((heads, cols + 5, dqk), math.nan).bfloat16(),
        torch.full((heads, cols + 5, dv), math.nan).bfloat16(),
    )
    k[:, :cols], v[:, :cols] = torch.randn(heads, cols, dqk), torch.randn(heads, cols, dv)
    before = (
        torch.randn(heads, rows, dv).bfloat16() if accumulate else torch.full((heads, rows, dv), math.nan).bfloat16()
    )
    found, expected = before.clone(), before.float()
    attention.attend(q, k, v, found, blocks, scale=dqk**-0.5, weight=0.03, accumulate=accumulate)
    kinds = q.float(), k.float(), v.float()
    attention.attend(*kinds, expected, blocks, scale=dqk**-0.5, weight=0.03, accumulate=accumulate)
    assert deviation(found, expected) <= ROUNDING


@needs_amx
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 3e4])
def test_silu_over_all_magnitudes(size: float) -> None:
    queries = torch.linspace(-size, size, 333).bfloat16()[None, :, None].repeat(1, 1, 32)
    queries[:, :, 1:] = 0
    ones = torch.ones(1, 1, 32, dtype=torch.bfloat16)
    out = torch.empty(1, 333, 32, dtype=torch.bfloat16)
    blocks = Visibility().blocks(1, 333, 0, 1, 1, 1 << 30)
    attention.attend(queries, ones, ones, out, blocks, scale=1.0, weight=1.0)
    expected = torch.nn.functional.silu(queries[0, :, 0].float())
    assert torch.allclose(out[0, :, 0].float(), expected, rtol=2**-7, atol=1e-30)


@needs_amx
def test_a_row_with_itself_and_the_gate() -> None:
    torch.manual_seed(0)
    rows, heads, width = 37, 2, 32
    uvqk = torch.randn(rows, 4 * heads * width).bfloat16()
    q, k, v, o = uvqk.view(rows, 4, heads, width).unbind(1)
    for weight in (0.2, torch.rand(rows, 1, 1)):
        found, expected = o.clone(), o.float()
        attention.attend_to_self(q, k, v, found, scale=0.2, weight=weight)
        attention.attend_to_self(q.float(), k.float(), v.float(), expected, scale=0.2, weight=weight)
        assert deviation(found, expected) <= ROUNDING
    room = torch.randn(rows, 3 * heads * width).bfloat16()
    held = room[:, heads * width : 2 * heads * width].clone()
    norm = torch.rand(2, heads * width).bfloat16()
    native.gate(uvqk, room, norm[0], norm[1], 1e-6)
    u = torch.nn.functional.silu(uvqk[:, : heads * width].float())
    normed = torch.nn.functional.layer_norm(held.float(), (heads * width,), norm[0].float(), norm[1].float(), 1e-6)
    assert deviation(room, torch.cat((u, held.float(), u * normed), dim=1)) <= ROUNDING


@needs_amx
def test_products_of_torch_are_right_before_and_after() -> None:
    # oneDNN keeps its tile configuration loaded between products, and does not look whether it still is.
    a = torch.randint(-3, 4, (64, 32)).bfloat16()
    q = torch.randn(1, 40, 32).bfloat16()
    for _ in range(3):
        assert torch.equal((a @ a.t()).float(), a.float() @ a.float().t())
        attention.attend(q, q, q, torch.empty_like(q), Visibility().blocks(0, 40, 0, 40, 40, 64), scale=1.0, weight=1.0)


@needs_amx
def test_the_model_in_bfloat16_relays_and_batches() -> None:
    exact = small_model(dim=32, dqk=32, dv=32)
    half, random = small_model(dim=32, dqk=32, dv=32).place(CPU, torch.bfloat16), np.random.default_rng(1)
    batch, relayed_errors, full_errors = [], [], []
    for length, prefix in ((300, 290), (90, 64), (40, 40), (513, 500)):
        tokens, candidates = random_tokens(random, length), random_items(random, 33)
        region = extended(half, tokens.slice(0, prefix), slack=3, chunks=(7, 31))
        batch.append(ScoreInput(region, tokens.slice(prefix, length), candidates))
        truth = full_scores(exact, tokens, candidates)
        relayed_errors.append((half.score(batch[-1:])[0] - truth).flatten())
        full_errors.append((full_scores(half, tokens, candidates) - truth).flatten())
    relayed, full = (float(torch.cat(errors).square().mean().sqrt()) for errors in (relayed_errors, full_errors))
    assert 0 < full < 0.1
    assert relayed <= 1.15 * full  # 264 errors: their root mean square is known to about 7 %
    for one, found in zip(batch, half.score(batch), strict=True):
        assert deviation(found, half.score([one])[0]) <= ROUNDING


@pytest.mark.usefixtures("afresh")
def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_instructions", lambda _: set(build.INSTRUCTIONS))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build.library() is None
    q = torch.randn(1, 40, 32).bfloat16()
    out = torch.empty_like(q)
    attention.attend(q, q, q, out, Visibility().blocks(0, 40, 0, 40, 40, 64), scale=1.0, weight=1.0)
    assert bool(out.isfinite().all())


@pytest.mark.usefixtures("afresh")
def test_a_compiler_that_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "attention.c"
    broken.write_text("this is no C", encoding="utf-8")
    monkeypatch.setattr(build, "_instructions", lambda _: set(build.INSTRUCTIONS))
    monkeypatch.setattr(build, "SOURCE", broken)
    assert build.library() is None


def test_instructions_are_those_of_the_flags_line(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert build._instructions(cpuinfo) == set()
    cpuinfo.write_text("model name : amx_tile\nflags\t\t: fpu amx_bf16\nflags : other\n", encoding="utf-8")
    assert build._instructions(cpuinfo) == {"fpu", "amx_bf16"}
    cpuinfo.write_text("no flags here\n", encoding="utf-8")
    assert build._instructions(cpuinfo) == set()


def test_what_does_not_fit() -> None:
    for device, dtype, dqk, dv in (
        (torch.device("meta"), torch.bfloat16, 32, 32),
        (CPU, torch.float32, 32, 32),
        (CPU, torch.float16, 32, 32),
        (CPU, torch.bfloat16, 33, 32),
        (CPU, torch.bfloat16, 32, 160),
    ):
        assert not native.fits(device, dtype, dqk, dv)
