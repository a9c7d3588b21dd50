"""The functions in C against the same formulas in float64 by torch, and what happens on machines without them."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import shlex
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from relaygr_stream.errors import ModelError
from relaygr_stream.models.api import ScoreInput
from relaygr_stream.models.hstu import HSTUStack
from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.loading import load_model
from relaygr_stream.models.native import layers, objects
from relaygr_stream.models.native.layers import KINDS
from relaygr_stream.models.native.objects import OBJECTS, Unavailable
from relaygr_stream.models.stu import RankingRows, StackConfig
from relaygr_stream.settings import Kernels, Model, Relay
from tests.properties import examples
from tests.unit.models.built_kernels import SOURCES, build_kernels
from tests.unit.models.small_models import (
    deviation,
    full_scores,
    held,
    prefilled,
    random_items,
    random_tokens,
    small_model,
)

CPU = torch.device("cpu")
#: Of two layers, relative to the largest value. bfloat16 has 8 bits, and a dozen roundings follow each other.
ROUNDING = {torch.bfloat16: 0.03, torch.float32: 3e-6}

#: The kernels for AMX with software_tiles.h, so that they are tested on processors without AMX, too.
IN_SOFTWARE = "amx_in_software"
DTYPES = {kind: dtype for dtype, kinds in KINDS.items() for kind in kinds} | {IN_SOFTWARE: torch.bfloat16}


@cache
def library(kind: str) -> ctypes.CDLL | None:
    """The object of this name, also in software; None where this processor or this clone has none."""
    try:
        found = objects.library([kind.replace(IN_SOFTWARE, "avx512_bf16")])
    except Unavailable:
        return None
    if kind != IN_SOFTWARE:
        return found
    header = shlex.quote(str(Path(__file__).with_name("software_tiles.h")))
    return ctypes.CDLL(str(build_kernels(f"-mavx512f -mavx512bf16 -include {header}", "amx") / "amx.so"))


def needs(kind: str) -> pytest.MarkDecorator:
    processor = "avx512_bf16" if kind == IN_SOFTWARE else kind
    return pytest.mark.skipif(
        library(kind) is None, reason=f"needs a CPU with {processor}, and make setup with a C compiler"
    )


in_each_kind = pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs(kind)) for kind in DTYPES])
in_each_half = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs(kind)) for kind, dtype in DTYPES.items() if dtype == torch.bfloat16]
)
#: Where sums are made in one order, wherever the columns lie.
to_the_bit = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs(kind)) for kind in DTYPES if "amx" not in kind]
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def every_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor is said to have all instructions; nothing was said of missing objects yet."""
    monkeypatch.setattr(objects, "instructions", lambda _: {each for kind in OBJECTS.values() for each in kind})
    objects.warn_once.cache_clear()


def place(placed: HSTUStack | HSTUModel, kind: str) -> None:
    """Place it on the CPU, with the layers of this kind."""
    only = patch.object(layers, "library", lambda *_: library(kind)) if kind in DTYPES else nullcontext()
    with only:
        placed.place(CPU, DTYPES.get(kind, torch.float64))


def stack_of(config: StackConfig, seed: int, kind: str) -> HSTUStack:
    """Random weights that bfloat16 can say, so that the same stack in float64, of no kind, is the truth."""
    stack, random = HSTUStack(config), torch.Generator().manual_seed(seed)
    for weight in stack.parameters():
        weight.copy_((torch.randn(weight.shape, generator=random) * weight.shape[0] ** -0.5).bfloat16())
    place(stack, kind)
    assert (stack.native is not None) == (kind in DTYPES)
    return stack


def region_of(config: StackConfig, dtype: torch.dtype, capacity: int) -> KVRegion:
    return KVRegion.new(config.layout(dtype), capacity, math.nan)


def outputs(stack: HSTUStack, config: StackConfig, x: torch.Tensor, cuts: tuple[int, int, int]) -> list[torch.Tensor]:
    """K and V, the last behaviours' outputs, and a ranking's, of rows x: prefix | more | suffix | candidates."""
    first, second, third = cuts
    region = region_of(config, x.dtype, second + 3)
    if first:
        stack.append(region, x[:first])
    made = [stack.prefill(region, x[first:second])] if second > first else []
    made.append(stack.score([RankingRows(region, third - second, len(x) - third)], x[second:]))
    return [*made, *(part[:, :second] for index in range(config.layers) for part in region.layer(index))]


configs = st.builds(
    StackConfig,
    layers=st.just(2),
    dim=st.sampled_from((32, 96)),
    heads=st.sampled_from((1, 3)),
    dqk=st.sampled_from((32, 64, 96)),
    dv=st.sampled_from((32, 64, 128)),
    scale_tokens=st.just(64),
    contextual_seq_len=st.sampled_from((0, 0, 5, 300)),
    max_attn_len=st.sampled_from((0, 0, 20, 300)),
    group_norm=st.booleans(),
)


@in_each_kind
@settings(max_examples=examples(25))
@given(configs, st.integers(0, 600), st.integers(0, 300), st.integers(0, 40), st.integers(1, 300), st.integers(0, 999))
def test_any_stack_is_the_formula(
    kind: str, config: StackConfig, prefix: int, more: int, suffix: int, candidates: int, seed: int
) -> None:
    if config.contextual_seq_len:
        prefix, more, suffix = 0, prefix + more, 0
    x = torch.randn(prefix + more + suffix + candidates, config.dim, generator=torch.Generator().manual_seed(seed))
    x, cuts = x.to(DTYPES[kind]), (prefix, prefix + more, prefix + more + suffix)
    found = outputs(stack_of(config, seed, kind), config, x, cuts)
    expected = outputs(stack_of(config, seed, "none"), config, x.double(), cuts)
    for mine, true in zip(found, expected, strict=True):
        assert deviation(mine, true) <= ROUNDING[DTYPES[kind]]


@in_each_kind
def test_nothing_stays_of_columns_that_were_not_numbers(kind: str) -> None:
    config = StackConfig(2, 64, 2, 64, 64, 64)
    stack, x = stack_of(config, 1, kind), torch.randn(40, 64).to(DTYPES[kind])
    good, broken = (region_of(config, x.dtype, 40) for _ in range(2))
    stack.append(good, x[:33])
    expected = stack.score([RankingRows(good, 0, 7)], x[33:])
    broken.length = 40  # all of it NaN
    assert stack.score([RankingRows(broken, 0, 7)], x[33:]).isnan().all()
    assert torch.equal(stack.score([RankingRows(good, 0, 7)], x[33:]), expected)


@in_each_kind
def test_chunks_and_neighbours_change_no_bit(kind: str) -> None:
    config = StackConfig(2, 64, 2, 64, 64, 64)
    stack, x = stack_of(config, 1, kind), torch.randn(900, 64).to(DTYPES[kind])
    whole, parts = (region_of(config, x.dtype, 700) for _ in range(2))
    stack.append(whole, x[:640])
    for start, stop in ((0, 1), (1, 65), (65, 400), (400, 640)):
        stack.append(parts, x[start:stop])
    for index in range(config.layers):
        for mine, other in zip(whole.layer(index), parts.layer(index), strict=True):
            assert torch.equal(mine[:, :640], other[:, :640])
    batch = [RankingRows(whole, 3, 30), RankingRows(parts, 0, 227)]
    together = stack.score(batch, x[640:])
    assert torch.equal(together[:33], stack.score(batch[:1], x[640:673]))
    assert torch.equal(together[33:], stack.score(batch[1:], x[673:]))


@in_each_kind
@pytest.mark.parametrize("size", [1e-3, 1.0, 9.0, 30.0, 3e4])
def test_silu_over_all_magnitudes(size: float, kind: str) -> None:
    # A layer of zeros but for q, the first unit vector, and the output: o passes through it.
    config, dtype = StackConfig(1, 32, 1, 32, 32, 1), DTYPES[kind]
    stack = HSTUStack(config)
    layer = stack.stu_layers()[0]
    for weight in layer.parameters():
        weight.zero_()
    layer.uvqk_bias[64] = math.sqrt(32)
    layer.output_weight[32:64] = torch.eye(32)
    place(stack, kind)
    scores, batch = torch.linspace(-size, size, 333).to(dtype), []
    for score in scores:
        region = region_of(config, dtype, 1)
        region.storage.zero_()
        keys, values = region.layer(0)
        keys[0, 0, 0], values[0, 0], region.length = score, 1.0, 1
        batch.append(RankingRows(region, 0, 1))
    found = stack.score(batch, torch.zeros(333, 32, dtype=dtype))[:, 0].double()
    # sqrt(32) in bfloat16 is a little less than itself.
    true = torch.nn.functional.silu(scores.double() * float(layer.uvqk_bias[64]) / math.sqrt(32))
    if dtype == torch.bfloat16:
        assert torch.allclose(found, true, rtol=2**-7, atol=5e-4 if size > 10 else 1e-30)
    else:
        assert torch.allclose(found, true, rtol=2e-6, atol=1e-30)


@needs("amx")
def test_products_of_torch_are_right_before_and_after() -> None:
    # oneDNN keeps its tile configuration loaded between products, and does not look whether it still is.
    config = StackConfig(1, 32, 1, 32, 32, 1)
    stack, a = stack_of(config, 0, "amx"), torch.randint(-3, 4, (64, 32)).bfloat16()
    for _ in range(3):
        assert torch.equal((a @ a.t()).float(), a.float() @ a.float().t())
        stack.append(region_of(config, a.dtype, 64), a)


@in_each_half
def test_the_model_in_bfloat16_relays_and_batches(kind: str) -> None:
    exact = small_model(dim=32, dqk=32, dv=32)
    half, random = small_model(dim=32, dqk=32, dv=32), np.random.default_rng(1)
    place(half, kind)
    batch, relayed_errors, full_errors = [], [], []
    for length, prefix in ((300, 290), (90, 64), (40, 40), (513, 500)):
        tokens, candidates = random_tokens(random, length), random_items(random, 33)
        region = prefilled(half, tokens.slice(0, prefix), slack=3, chunks=(7, 31))
        batch.append(ScoreInput(region, tokens.slice(prefix, length), candidates))
        truth = full_scores(exact, tokens, candidates)
        relayed_errors.append((half.score(batch[-1:])[0] - truth).flatten())
        full_errors.append((full_scores(half, tokens, candidates) - truth).flatten())
    relayed, full = (float(torch.cat(errors).square().mean().sqrt()) for errors in (relayed_errors, full_errors))
    assert 0 < full < 0.1
    assert relayed <= 1.15 * full  # 264 errors: their root mean square is known to about 7 %
    for one, found in zip(batch, half.score(batch), strict=True):
        assert deviation(found, half.score([one])[0]) <= ROUNDING[torch.bfloat16]


@to_the_bit
@settings(max_examples=examples(25))
@given(
    st.integers(1, 700), st.integers(0, 16), st.integers(1, 130), st.lists(st.integers(1, 200), max_size=5),
    st.sampled_from((0, 0, 5, 33)), st.integers(0, 99),
)  # fmt: skip
def test_a_relayed_score_is_that_of_full_inference_to_the_bit(
    kind: str, prefix: int, suffix: int, candidates: int, chunks: list[int], window: int, seed: int
) -> None:
    model, random = small_model(dim=32, dqk=32, dv=32, max_attn_len=window), np.random.default_rng(seed)
    place(model, kind)
    tokens, items = random_tokens(random, prefix + suffix), random_items(random, candidates)
    region = prefilled(model, tokens.slice(0, prefix), slack=3, chunks=tuple(chunks))
    relayed = model.score([ScoreInput(region, tokens.slice(prefix, prefix + suffix), items)])[0]
    assert torch.equal(relayed, full_scores(model, tokens, items))
    whole = prefilled(model, tokens.slice(0, prefix))
    assert torch.equal(held(region), held(whole))  # says more: a candidate's scores hide most of the history's bits


@to_the_bit
def test_a_window_sums_its_columns_in_one_order_wherever_a_chunk_begins(kind: str) -> None:
    # Large values cancel in the sums, so another order shows. x is zero, all scores are equal, o passes through.
    config, behind = StackConfig(1, 32, 1, 32, 32, 1, max_attn_len=8), 40
    stack = HSTUStack(config)
    layer = stack.stu_layers()[0]
    for weight in layer.parameters():
        weight.zero_()
    layer.uvqk_bias[64], layer.uvqk_bias[96] = 1.0, 8.0
    layer.output_weight[32:64] = torch.eye(32)
    place(stack, kind)
    random, found = torch.Generator().manual_seed(0), []
    values = 1 + torch.rand(behind, 32, generator=random)
    values[0::4], values[2::4] = 2.0**20, -(2.0**20)
    for chunks in ((0, 6), (0, 1, 6), (0, 2, 3, 6)):
        region = region_of(config, DTYPES[kind], behind + 6)
        for part, content in zip(region.layer(0), (torch.eye(32)[0] * 8, values), strict=True):
            part[0, :behind] = content.to(part.dtype)
        region.length = behind
        parts = [
            stack.prefill(region, torch.zeros(stop - start, 32, dtype=DTYPES[kind])) for start, stop in pairwise(chunks)
        ]
        found.append(torch.cat(parts))
    assert bool(found[0].isfinite().all()) and bool(found[0][3:].abs().max() > 0)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.usefixtures("every_instruction")
def test_without_the_objects_torch_does_it_and_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(objects, "FOLDER", tmp_path)
    with capture_logs() as logs:
        for dtype in KINDS:
            model = small_model(dim=32, dqk=32, dv=32).place(CPU, dtype)
            assert model.kernels == "torch"
            random = np.random.default_rng(0)
            assert bool(full_scores(model, random_tokens(random, 40), random_items(random, 5)).isfinite().all())
    warnings = [line for line in logs if line["log_level"] == "warning"]
    assert {line["event"] for line in warnings} == {"native layers unavailable"}
    assert [line["reason"].partition(":")[0] for line in warnings] == ["avx512.so is missing", "amx.so is missing"]
    assert {line["instead"] for line in warnings} == {"torch operators"}


#: worker.kernels → what computes float32, and bfloat16.
FORCED: dict[Kernels, tuple[str, str]] = {
    "torch": ("torch", "torch"),
    "avx2": ("avx2", "avx2_widened"),
    "avx512": ("avx512", "avx512_widened"),
    "avx512_bf16": ("avx512", "avx512_bf16"),
    "amx": ("avx512", "amx"),
}


@pytest.mark.parametrize("kernels", FORCED)
def test_the_setting_bounds_the_instructions(kernels: Kernels) -> None:
    lacking = set(OBJECTS.get(kernels, ())) - objects.instructions(objects.CPUINFO)
    if lacking or library("avx2") is None:
        pytest.skip(f"needs a CPU with {kernels}, and make setup with a C compiler")
    shape, dtypes = Model(layers=1, dim=32, heads=1), (torch.float32, torch.bfloat16)
    models = [load_model(shape, Relay(), device=CPU, dtype=dtype, kernels=kernels) for dtype in dtypes]
    assert tuple(model.kernels for model in models if isinstance(model, HSTUModel)) == FORCED[kernels]


@pytest.mark.parametrize(
    ("kernels", "dtype", "dim", "has", "words"),
    [
        ("amx", torch.bfloat16, 32, OBJECTS["avx512_bf16"], "this processor has no amx_tile, amx_bf16; set it to"),
        ("avx512_bf16", torch.float32, 32, OBJECTS["avx512"], "this processor has no avx512_bf16; set it to"),
        ("avx512", torch.float32, 32, OBJECTS["avx2"], "no avx512f, avx512bw, avx512vl, avx512dq"),
        ("avx2", torch.float32, 32, ("avx2",), "this processor has no fma; set it to"),
        ("avx512", torch.float32, 32, OBJECTS["avx512"], "avx512.so is missing: .* without a C compiler"),
        ("avx512", torch.float32, 48, OBJECTS["avx512"], "D, dqk, dv are 48, 32, 32: multiples of 32"),
        ("avx512", torch.float16, 32, OBJECTS["avx512"], "computes in torch.float16"),
    ],
)
def test_instructions_that_cannot_be_used_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels: Kernels, dtype: torch.dtype, dim: int,
    has: tuple[str, ...], words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(objects, "instructions", lambda _: set(has))
    monkeypatch.setattr(objects, "FOLDER", tmp_path)
    with pytest.raises(ModelError, match=f'worker.kernels = "{kernels}", but .*{words}'):
        small_model(dim=dim, dqk=32, dv=32).place(CPU, dtype, kernels)


@pytest.mark.usefixtures("every_instruction")
def test_an_object_that_does_not_load_leaves_the_work_to_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("amx", "avx512_bf16", "avx512_widened"):
        (tmp_path / f"{name}.so").write_text("this is no object")
    if library("avx2_widened") is None:
        pytest.skip("needs an object that loads: make setup with a C compiler")
    shutil.copy(objects.FOLDER / "avx2_widened.so", tmp_path)
    monkeypatch.setattr(objects, "FOLDER", tmp_path)
    with capture_logs() as logs:
        found = [objects.library(KINDS[torch.bfloat16]) for _ in range(2)]
    assert Path(found[0]._name).stem == "avx2_widened"
    (line,) = logs
    assert "amx.so" in line["reason"] and line["instead"] == "avx2_widened"


@pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler"
)
def test_the_objects_are_those_of_the_sources() -> None:
    sources = [path for path in SOURCES.rglob("*") if path.suffix in (".c", ".h")]
    newest = max(path.stat().st_mtime for path in sources)
    found = {path.stem for path in objects.FOLDER.glob("*.so") if path.stat().st_mtime >= newest}
    assert found == set(OBJECTS), "kernels are missing or older than their sources: make setup"


def test_instructions_are_those_of_the_flags_line(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert objects.instructions(cpuinfo) == set()
    cpuinfo.write_text("model name : amx_tile\nflags\t\t: fpu amx_bf16\nflags : other\n", encoding="utf-8")
    assert objects.instructions(cpuinfo) == {"fpu", "amx_bf16"}
    cpuinfo.write_text("no flags here\n", encoding="utf-8")
    assert objects.instructions(cpuinfo) == set()


@pytest.mark.parametrize(
    ("dtype", "dim", "dqk", "dv"),
    [
        (torch.float64, 32, 32, 32),
        (torch.float16, 32, 32, 32),
        (torch.float32, 48, 32, 32),
        (torch.float32, 32, 32, 160),
        (torch.bfloat16, 48, 32, 32),
        (torch.bfloat16, 32, 40, 32),
        (torch.bfloat16, 32, 32, 160),
    ],
)
def test_what_does_not_fit(dtype: torch.dtype, dim: int, dqk: int, dv: int) -> None:
    stack = HSTUStack(StackConfig(1, dim, 1, dqk, dv, 1))
    stack.place(CPU, dtype)
    assert stack.native is None
