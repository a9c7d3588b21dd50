from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from relaygr_stream.errors import InputError, ModelError
from relaygr_stream.models import conformance
from relaygr_stream.models.check.probe import HALF_LIMIT
from relaygr_stream.models.conformance import COMPARISONS, FULL, LIMIT, VariantResult, format_table, run_conformance
from relaygr_stream.models.reference_arrays import META
from relaygr_stream.models.stu import StackConfig
from relaygr_stream.settings import Kernels
from tests.unit.models.naive_hstu import arrays_for_kernels, conformance_arrays

REFERENCE = Path(__file__).parents[2] / "data" / "hstu_reference.npz"
ONLY_INCREMENTAL = {"chunked_history", "chunked_candidates", "suffix_candidates", "chunked_kv"}


def meta(**changes: int) -> dict[str, int]:
    plain = dict(zip(META, (24, 3, 8, 12, 2, 0, 0, 0, 50, 4), strict=True))
    return plain | changes


def reference(*variants: str) -> dict[str, npt.NDArray[Any]]:
    """Of the reference, these variants: running all five takes a second."""
    return {key: value for key, value in np.load(REFERENCE).items() if key.partition("/")[0] in variants}


def write(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]  # its stub takes the second keyword for allow_pickle
    return path


@pytest.fixture
def fewer_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of them, where all were compared in float32, or where it is about the comparison itself."""
    monkeypatch.setattr(conformance, "CUTS", conformance.CUTS // 4)


def test_every_variant_of_the_reference_is_reproduced_full_and_cached() -> None:
    results = run_conformance(REFERENCE)
    assert [result.name for result in results] == ["base", "ctx4", "maxattn8", "groupnorm", "ctx4_maxattn8"]
    for result in results:
        contextual = result.config.contextual_seq_len > 0
        assert set(result.deviations) == set(COMPARISONS) - (ONLY_INCREMENTAL if contextual else set())
        assert result.worst <= LIMIT, result
        assert result.conforms


def test_another_file_with_other_shapes_and_users(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    variants: dict[str, tuple[dict[str, int], list[int]]] = {
        "one": (meta(), [3, 40, 0, 1]),
        "windowed": (meta(max_attn_len=5, H=1, dv=20), [18]),
        "seen by all": (meta(contextual_seq_len=3, max_attn_len=4, group_norm=1, layers=1), [3, 12]),
        "no candidates": (meta(candidates=0), [7]),
    }
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, (shape, histories) in variants.items():
        arrays |= conformance_arrays(random, name, shape, histories)
    results = run_conformance(write(tmp_path / "other.npz", arrays))
    assert [(result.name, result.users) for result in results] == [
        (name, len(histories)) for name, (_, histories) in variants.items()
    ]
    assert all(result.worst < 1e-5 for result in results), format_table(results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_bias_on_relative_positions_and_times_conforms_whole_cached_chunked_and_cut(
    tmp_path: Path, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    if dtype != torch.float32:
        request.getfixturevalue("fewer_cuts")
    random = np.random.default_rng(4)
    arrays: dict[str, npt.NDArray[Any]] = {}
    wide = meta(D=32, H=2, dv=16, dqk=16, candidates=9)
    for name, shape, positions, times in (
        ("positions", meta(), 7, 0),
        ("times", meta(group_norm=1), 0, 90),
        ("both", wide, 64, 128),
        ("windowed", meta(max_attn_len=5, layers=3), 4, 20),
    ):
        arrays |= conformance_arrays(random, name, shape, [17, 1, 0, 40], positions, times)
    results = run_conformance(write(tmp_path / "relative.npz", arrays), dtype)
    assert len(results) == 4
    assert all(result.conforms for result in results), format_table(results)
    assert all(set(result.deviations) == set(COMPARISONS) for result in results)


def test_a_relative_bias_without_times_is_refused_by_name(tmp_path: Path) -> None:
    arrays = conformance_arrays(np.random.default_rng(4), "timed", meta(), [5], times=9)
    del arrays["timed/in/times0"]
    with pytest.raises(InputError, match="`timed/in/times0` is missing"):
        run_conformance(write(tmp_path / "timeless.npz", arrays))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernels", ["avx2", "avx512", "avx512_bf16", "amx"])
def test_each_instruction_set_reproduces_arrays_of_its_widths(
    tmp_path: Path, kernels: Kernels, dtype: torch.dtype
) -> None:
    file = write(tmp_path / "wide.npz", arrays_for_kernels())
    try:
        results = run_conformance(file, dtype, kernels)
    except ModelError as error:  # it never falls back to torch operators
        pytest.skip(str(error))
    assert len(results) == 4
    assert all(result.conforms for result in results), format_table(results)


def test_kernels_that_do_not_run_on_the_cpu_are_refused() -> None:
    with pytest.raises(ModelError, match="runs on the CPU, and Triton kernels are for cuda"):
        run_conformance(REFERENCE, kernels="triton")


@pytest.mark.usefixtures("fewer_cuts")
@pytest.mark.parametrize("key", ["out_full/hist1", "out_full/cand0", "out_cached/cand2", "layer1/v_cache_jagged"])
def test_a_deviation_in_any_output_is_found(tmp_path: Path, key: str) -> None:
    arrays = reference("base", "groupnorm")
    arrays[f"groupnorm/{key}"][2, 3] += 1e-3
    conforming = [result.name for result in run_conformance(write(tmp_path / "off.npz", arrays)) if result.conforms]
    assert conforming == ["base"]


@pytest.mark.usefixtures("fewer_cuts")
def test_nan_does_not_conform(tmp_path: Path) -> None:
    arrays = reference("base")
    arrays["base/layer0/uvqk_weight"][0, 0] = np.nan
    assert not run_conformance(write(tmp_path / "nan.npz", arrays))[0].conforms


@pytest.mark.usefixtures("fewer_cuts")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision_no_result_is_further_off_than_full_inference(dtype: torch.dtype) -> None:
    results = run_conformance(REFERENCE, dtype)
    assert len(results) == 5
    for result in results:
        assert result.worst > LIMIT
        assert result.conforms, format_table([result])
        assert all(result.ratio(key) <= HALF_LIMIT for key in FULL if key in result.deviations)


@pytest.mark.parametrize("comparison", FULL)
@pytest.mark.parametrize(("share", "conforms"), [(0.99, True), (1.01, False)])
def test_in_half_precision_what_is_further_off_does_not_conform(comparison: str, share: float, conforms: bool) -> None:
    result = VariantResult("toy", 1, StackConfig(3, 24, 2, 8, 12, 50), torch.bfloat16)
    ones, noise = np.ones(1000), 0.01
    for full in set(FULL.values()):
        result.add(full, torch.full((1000,), 1 + noise), ones)
    for key in FULL:
        result.add(key, torch.full((1000,), 1 + noise / 2), ones)
    assert result.conforms
    off = noise * math.sqrt(2 * (share * HALF_LIMIT) ** 2 - 1 / 4)  # with the half above: share × HALF_LIMIT × noise
    result.add(comparison, torch.full((1000,), 1 + off), ones)
    assert result.ratio(comparison) == pytest.approx(share * HALF_LIMIT, rel=1e-3)
    assert result.conforms is conforms


@pytest.mark.usefixtures("fewer_cuts")
def test_in_half_precision_noise_and_nan_do_not_conform(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    good = conformance_arrays(random, "good", meta(layers=2), [17, 1, 0, 40])
    for value, shape in ((np.nan, (0, 0)), (1e4, (slice(None), 0))):
        bad = conformance_arrays(random, "bad", meta(layers=2), [17, 1, 0, 40])
        bad["bad/layer0/uvqk_weight"][shape] = value
        arrays = bad | good
        results = run_conformance(write(tmp_path / "x.npz", arrays), torch.bfloat16)
        assert {result.name: result.conforms for result in results} == {"bad": False, "good": True}


@pytest.mark.usefixtures("fewer_cuts")
def test_the_table_names_every_variant_and_its_verdict(tmp_path: Path) -> None:
    arrays = reference("base", "ctx4")
    arrays["ctx4/out_full/hist0"] += 1
    table = format_table(run_conformance(write(tmp_path / "off.npz", arrays))).splitlines()
    assert len(table) == 3
    assert table[0].split()[0] == "variant"
    assert {line.split()[0]: line.split()[-1] for line in table[1:]} == {"base": "yes", "ctx4": "NO"}


@pytest.mark.parametrize(
    "missing", ["base/layer2/uvqk_beta", "base/in/cand1", "base/out_full/hist0", "base/layer0/k_cache_jagged"]
)
def test_a_missing_key_is_named(tmp_path: Path, missing: str) -> None:
    arrays = reference("base")
    del arrays[missing]
    with pytest.raises(InputError, match=f"`{missing}` is missing"):
        run_conformance(write(tmp_path / "less.npz", arrays))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("base/layer0/output_weight", np.zeros((95, 32), np.float32), "95 × 32 .*expected 96 × 32"),
        ("base/in/hist0", np.zeros((17, 31), np.float32), "17 × 31 .*expected any × 32"),
        ("base/out_full/cand0", np.array([["a"]]), "of numbers"),
        ("base/meta", np.arange(9), "9 of.*expected 10 of"),
        ("base/meta", np.array([32, 0, 16, 24, 3, 0, 0, 0, 64, 6]), "H = 0, expected at least 1"),
    ],
)
def test_a_misshapen_key_is_named(tmp_path: Path, key: str, value: npt.NDArray[Any], words: str) -> None:
    arrays = reference("base") | {key: value}
    with pytest.raises(InputError, match=f"`{key}` (is|has) .*{words}"):
        run_conformance(write(tmp_path / "bad.npz", arrays))


def test_files_that_are_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a readable npz file"):
        run_conformance(tmp_path / "absent.npz")
    (tmp_path / "text.npz").write_text("variant base")
    with pytest.raises(InputError, match="not a readable npz file"):
        run_conformance(tmp_path / "text.npz")
    (tmp_path / "cut.npz").write_bytes(REFERENCE.read_bytes()[:5000])
    with pytest.raises(InputError, match="not a readable npz file"):
        run_conformance(tmp_path / "cut.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(InputError, match="a single array"):
        run_conformance(tmp_path / "one.npy")
    with pytest.raises(InputError, match="no variant"):
        run_conformance(write(tmp_path / "other.npz", {"something": np.zeros(3)}))
    arrays = {key: value for key, value in np.load(REFERENCE).items() if "/in/hist" not in key}
    with pytest.raises(InputError, match="`base/in/hist0` is missing"):
        run_conformance(write(tmp_path / "nobody.npz", arrays))
