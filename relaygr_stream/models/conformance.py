"""Compares the HSTU stack with reference arrays: full inference, cached inference, and the K/V cache itself.

In float32 every value must be within LIMIT. In half precision cached, chunked and cut results must be no further from
the float32 reference than full inference in that type is.

"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.errors import ModelError
from relaygr_stream.models.check.probe import HALF_LIMIT
from relaygr_stream.models.hstu import HSTUStack
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.reference_arrays import META, ReferenceArrays
from relaygr_stream.models.stu import RankingRows, StackConfig
from relaygr_stream.settings import Kernels

#: Largest absolute deviation that conforms. Outputs are about 20, so it allows a few float32 roundings per layer.
LIMIT: Final = 1e-4
#: Seed of the random chunk boundaries: a file gives the same result in each run.
CHUNK_SEED: Final = 0
#: Cuts of each history into prefix and suffix. All candidates of a cut share the roundings of its suffix, so one cut is
#: too few in half precision: the ratio to full inference was 0.75…1.53 with 1 cut, 0.91…1.22 with 32.
CUTS: Final = 32
#: Unused tokens behind each region's length. They hold NaN, so reading them shows in every output.
SLACK: Final = 5

#: Parameter of an STU layer → name in the file.
WEIGHTS: Final = {
    "input_norm_weight": "input_norm_weight",
    "input_norm_bias": "input_norm_bias",
    "uvqk_weight": "uvqk_weight",
    "uvqk_bias": "uvqk_beta",
    "output_norm_weight": "output_norm_weight",
    "output_norm_bias": "output_norm_bias",
    "output_weight": "output_weight",
    "relative_position": "relative_position",
    "relative_time": "relative_time",
}
#: Comparison → its column in the table.
COMPARISONS: Final = {
    "full_history": "full hist",
    "full_candidates": "full cand",
    "cached_candidates": "cached cand",
    "chunked_history": "chunks hist",
    "chunked_candidates": "chunks cand",
    "suffix_candidates": "suffix cand",
    "full_kv": "full K/V",
    "kv_cache": "cached K/V",
    "chunked_kv": "chunks K/V",
}
#: In half precision: comparison → the result of full inference that it is measured against.
FULL: Final = {
    "cached_candidates": "full_candidates",
    "chunked_history": "full_history",
    "chunked_candidates": "full_candidates",
    "suffix_candidates": "full_candidates",
    "kv_cache": "full_kv",
    "chunked_kv": "full_kv",
}
#: In half precision: largest RMS deviation of full inference over the RMS of the reference. bfloat16 keeps 8 bits; the
#: reference's variants reach 2.3 %.
HALF_NOISE: Final = 0.1


@dataclass
class VariantResult:
    """The result of one variant in one type. deviations: the largest absolute deviation by key of COMPARISONS."""

    name: str
    users: int
    config: StackConfig
    dtype: torch.dtype
    deviations: dict[str, float] = field(default_factory=dict)
    _errors: dict[str, float] = field(default_factory=dict)  # sums of squares, of deviations and of the reference
    _signals: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """The largest deviation of all comparisons; NaN if one is NaN."""
        return float(np.max(list(self.deviations.values())))

    @property
    def conforms(self) -> bool:
        """float32: whether no deviation exceeds LIMIT. Half precision: whether all are within full inference's own."""
        if self.dtype == torch.float32:
            return bool(self.worst <= LIMIT)  # False for NaN
        quiet = all(self.noise(key) <= HALF_NOISE for key in set(FULL.values()))
        return quiet and all(self.ratio(key) <= HALF_LIMIT for key in FULL if key in self.deviations)

    def ratio(self, comparison: str) -> float:
        """RMS deviation of `comparison` (a key of FULL) from the reference, over that of full inference."""
        full = self._errors[FULL[comparison]]
        per_value = self._errors[comparison] / self._counts[comparison] * self._counts[FULL[comparison]]
        return math.sqrt(per_value / full) if full else float(per_value > 0)

    def noise(self, comparison: str) -> float:
        """RMS deviation of `comparison` from the reference, over the RMS of the reference."""
        return math.sqrt(self._errors[comparison] / max(self._signals[comparison], 1e-300))

    def add(self, comparison: str, found: torch.Tensor, expected: npt.NDArray[Any]) -> None:
        """Compare one array and keep the largest deviation."""
        difference = np.abs(found.double().numpy() - expected.astype(np.float64))
        worst = float(np.max(difference, initial=0.0))
        self.deviations[comparison] = float(np.max([worst, self.deviations.get(comparison, 0.0)]))
        self._errors[comparison] = self._errors.get(comparison, 0.0) + float((difference**2).sum())
        self._counts[comparison] = self._counts.get(comparison, 0) + expected.size
        signal = float((expected.astype(np.float64) ** 2).sum())
        self._signals[comparison] = self._signals.get(comparison, 0.0) + signal

    def shown(self, comparison: str) -> str:
        """The table's cell for `comparison`."""
        if comparison not in self.deviations:
            return "–"
        if self.dtype == torch.float32:
            return f"{self.deviations[comparison]:.1e}"
        return f"{self.ratio(comparison):.2f}×" if comparison in FULL else f"{self.noise(comparison):.1e}"


def run_conformance(
    file: str | Path | ReferenceArrays, dtype: torch.dtype = torch.float32, kernels: Kernels = "auto"
) -> list[VariantResult]:
    """Compare every variant of the file, computing in `dtype` on the CPU. kernels: as the setting worker.kernels.

    Raises ModelError if `kernels` cannot run a variant, InputError if the file cannot be read or has no variant, or if
    a key is missing or has another shape.
    """
    if kernels == "triton":
        raise ModelError(
            "the comparison with reference arrays runs on the CPU, and Triton kernels are for cuda; use "
            "`relaygr model check --device cuda --set worker.kernels=triton`"
        )
    arrays = file if isinstance(file, ReferenceArrays) else ReferenceArrays(Path(file))
    return [_run_variant(arrays, name, dtype, kernels) for name in arrays.variants()]


def format_table(results: Iterable[VariantResult]) -> str:
    """A table with one line per variant and a column that says whether it conforms.

    float32: largest absolute deviations. Half precision: for full inference the relative RMS deviation from the float32
    reference, for the others the multiple of that deviation.
    """
    header = ["variant", "users", *COMPARISONS.values(), "conforms"]
    rows = [header]
    for result in results:
        shown = (result.shown(key) for key in COMPARISONS)
        rows.append([result.name, str(result.users), *shown, "yes" if result.conforms else "NO"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


def _run_variant(arrays: ReferenceArrays, name: str, dtype: torch.dtype, kernels: Kernels) -> VariantResult:
    stack = _stack(arrays, name).place(torch.device("cpu"), dtype, kernels)
    config, users = stack.config, arrays.users(name)
    result = VariantResult(name, len(users), config, dtype)
    chunking = np.random.default_rng(CHUNK_SEED)
    regions: dict[str, list[KVRegion]] = {"full_kv": [], "kv_cache": [], "chunked_kv": []}
    for user in users:
        history = arrays.inputs(f"{name}/in/hist{user}", config.dim).to(dtype)
        candidates = arrays.inputs(f"{name}/in/cand{user}", config.dim).to(dtype)
        times = arrays.times(f"{name}/in/times{user}", len(history)) if config.relative_times else None
        expected_history = arrays.get(f"{name}/out_full/hist{user}", tuple(history.shape))
        expected = arrays.get(f"{name}/out_full/cand{user}", tuple(candidates.shape))
        expected_cached = arrays.get(f"{name}/out_cached/cand{user}", tuple(candidates.shape))

        full = _region(stack, len(history), dtype, slack=0)
        result.add("full_history", stack.prefill(full, history, times), expected_history)
        result.add("full_candidates", _score(stack, full, history[:0], candidates, _part(times, stop=0)), expected)

        # Prefill as the worker runs it: into a larger region, without the last layer's outputs.
        cached = _region(stack, len(history), dtype)
        stack.append(cached, history, times)
        scores = _score(stack, cached, history[:0], candidates, _part(times, stop=0))
        result.add("cached_candidates", scores, expected_cached)
        regions["full_kv"].append(full)
        regions["kv_cache"].append(cached)

        if stack.incremental:
            chunked = _region(stack, len(history), dtype)
            outputs = [
                stack.prefill(chunked, history[start:stop], _part(times, start, stop))
                for start, stop in _chunks(len(history), chunking)
            ]
            regions["chunked_kv"].append(chunked)
            result.add("chunked_history", torch.cat([history[:0], *outputs]), expected_history)
            scores = _score(stack, chunked, history[:0], candidates, _part(times, stop=0))
            result.add("chunked_candidates", scores, expected)

            for prefix in chunking.integers(0, len(history) + 1, CUTS):
                shorter = _region(stack, int(prefix), dtype)
                stack.append(shorter, history[:prefix], _part(times, stop=prefix))
                scores = _score(stack, shorter, history[prefix:], candidates, _part(times, prefix))
                result.add("suffix_candidates", scores, expected)
    for comparison, held in regions.items():
        if held:
            _compare_cache(arrays, result, comparison, held)
    return result


def _compare_cache(arrays: ReferenceArrays, result: VariantResult, comparison: str, regions: list[KVRegion]) -> None:
    config, total = result.config, sum(region.length for region in regions)
    for layer in range(config.layers):
        for index, (key, width) in enumerate((("k_cache_jagged", config.dqk), ("v_cache_jagged", config.dv))):
            expected = arrays.get(f"{result.name}/layer{layer}/{key}", (total, config.heads * width))
            held = [region.layer(layer)[index][:, : region.length].transpose(0, 1).flatten(1) for region in regions]
            result.add(comparison, torch.cat(held), expected)


def _stack(arrays: ReferenceArrays, name: str) -> HSTUStack:
    meta = dict(zip(META, arrays.meta(f"{name}/meta"), strict=True))
    config = StackConfig(
        layers=meta["layers"],
        dim=meta["D"],
        heads=meta["H"],
        dqk=meta["dqk"],
        dv=meta["dv"],
        scale_tokens=meta["N"],
        contextual_seq_len=meta["contextual_seq_len"],
        max_attn_len=meta["max_attn_len"],
        group_norm=bool(meta["group_norm"]),
        relative_positions=arrays.length(f"{name}/layer0/relative_position"),
        relative_times=arrays.length(f"{name}/layer0/relative_time"),
    )
    stack = HSTUStack(config)
    weights = {}
    for parameter, value in stack.state_dict().items():
        _, layer, own_name = parameter.split(".")
        array = arrays.get(f"{name}/layer{layer}/{WEIGHTS[own_name]}", tuple(value.shape))
        weights[parameter] = torch.from_numpy(array.astype(np.float32))
    stack.load_state_dict(weights)
    return stack


def _region(stack: HSTUStack, tokens: int, dtype: torch.dtype, slack: int = SLACK) -> KVRegion:
    return KVRegion.new(stack.config.layout(dtype), tokens + slack, torch.nan)


def _score(
    stack: HSTUStack, kv: KVRegion, suffix: torch.Tensor, candidates: torch.Tensor, times: torch.Tensor | None
) -> torch.Tensor:
    rows = torch.cat((suffix, candidates))
    return stack.score([RankingRows(kv, len(suffix), len(candidates), times)], rows)[len(suffix) :]


def _part(times: torch.Tensor | None, start: int = 0, stop: int | None = None) -> torch.Tensor | None:
    return None if times is None else times[start:stop]


def _chunks(length: int, random: np.random.Generator) -> Iterable[tuple[int, int]]:
    start = 0
    while start < length:
        stop = int(random.integers(start + 1, length + 1))
        yield start, stop
        start = stop
