"""The checker: it passes what is exact, and of a model that is not, names the property that was broken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace

from relaygr_stream import settings
from relaygr_stream.cli import main
from relaygr_stream.models.check.measure import Deviations, Measure
from relaygr_stream.models.check.probe import Bounds, Probe
from relaygr_stream.models.check.registry import PROPERTIES
from relaygr_stream.models.check.run import check_model, run_properties
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.load import load_model
from relaygr_stream.models.protocol import RankingModel, ScoreInput
from relaygr_stream.models.tokens import Tokens
from relaygr_stream.models.transformer import Transformer, TransformerConfig

CPU = torch.device("cpu")
CONFIG = TransformerConfig(
    layers=2, dim=16, heads=2, dqk=8, dv=8, vocab=50, max_positions=200, tasks=("click", "like")
)  # fmt: skip
BOUNDS = Bounds(prefix=120, suffix=16, candidates=20, items=50)
SMALL = settings.Model(layers=2, dim=16, heads=2, dqk=8, dv=12, vocab=50, max_positions=200, scale_tokens=64)
FLAGS = ("layers=2", "dim=16", "heads=2", "dqk=8", "dv=8", "vocab=50", "max_positions=200")
SETTINGS = [word for flag in FLAGS for word in ("--set", f"model.{flag}")] + [
    "--set", "relay.max_prefix_tokens=120", "--set", "relay.max_suffix_tokens=16", "--set", "relay.max_candidates=20",
]  # fmt: skip

Batch = Sequence[ScoreInput]


def failures(make: Callable[[torch.dtype], Any], dtype: torch.dtype = torch.float32) -> list[str]:
    probe = Probe(make, CPU, dtype, BOUNDS, seed=0)
    return [finding.about.name for finding in run_properties(probe) if finding.verdict == "FAILED"]


class Plain(Transformer):
    def __init__(self, dtype: torch.dtype, seed: int = 3) -> None:
        super().__init__(CONFIG, seed, CPU, dtype)


class NoAdvance(Plain):
    def extend(self, kv: KVRegion, tokens: Tokens) -> None:
        super().extend(kv, tokens)
        kv.length -= len(tokens)


class HalfScores(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        return [scores.half() for scores in super().score(batch)]


class Transposed(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        return [scores.T for scores in super().score(batch)]


class Dropout(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        return [scores + 0.01 * torch.rand(()) for scores in super().score(batch)]


class OneVersion(Plain):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.version = "v1"


class Unseeded(Plain):
    made = 0

    def __init__(self, dtype: torch.dtype) -> None:
        type(self).made += 1
        super().__init__(dtype, seed=self.made)
        self.version = f"v1-{dtype}"


class ReadsSlack(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        hidden = [one.kv.storage.sum() * 0 for one in batch]
        return [scores + zero for scores, zero in zip(super().score(batch), hidden, strict=True)]


class WritesSuffix(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        for one in batch:
            one.kv.layer(1)[0][:, one.kv.length : one.kv.length + len(one.suffix)] = 1.0
        return super().score(batch)


class Touches(Plain):
    """Moves earlier keys by one rounding: too little for any score, and still a write where others read."""

    def extend(self, kv: KVRegion, tokens: Tokens) -> None:
        start = kv.length
        super().extend(kv, tokens)
        keys = kv.layer(0)[0][:, :start]
        keys.copy_(torch.nextafter(keys, torch.full_like(keys, math.inf)))


class FromTheEnd(Plain):
    """Positions counted back from the newest behaviour."""

    def extend(self, kv: KVRegion, tokens: Tokens) -> None:
        start, ends = kv.length, kv.length + len(tokens)
        behaviours = self.embedding.behaviours
        self.embedding.behaviours = lambda wanted, first: behaviours(wanted, 200 - ends + first - start)  # type: ignore[method-assign,assignment]
        super().extend(kv, tokens)
        self.embedding.behaviours = behaviours  # type: ignore[method-assign]


class Acausal(Plain):
    """Contextual tokens that see what follows: the first token's K takes in the mean of the call's items."""

    def extend(self, kv: KVRegion, tokens: Tokens) -> None:
        start = kv.length
        super().extend(kv, tokens)
        if start == 0 and len(tokens):
            kv.layer(1)[0][:, 0] += 0.1 * float(tokens.array[0].mean())


class ForgetsChunks(Plain):
    """A chunk sees only itself."""

    def extend(self, kv: KVRegion, tokens: Tokens) -> None:
        own = KVRegion(kv.layout, torch.zeros_like(kv.storage), kv.capacity)
        super().extend(own, tokens)
        start, kv.length = kv.length, kv.length + len(tokens)
        for layer in range(kv.layout.layers):
            for target, source in zip(kv.layer(layer), own.layer(layer), strict=True):
                target[:, start : kv.length] = source[:, : len(tokens)]


class RefusesChunks(Plain):
    def extend(self, kv: KVRegion, tokens: Tokens) -> None:
        if kv.length and len(tokens):
            raise RuntimeError("only from the start")
        super().extend(kv, tokens)


class RemembersLength(Plain):
    """What it scored once, it takes to have that length for ever."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.seen: dict[int, tuple[KVRegion, int]] = {}

    def score(self, batch: Batch) -> list[torch.Tensor]:
        stale = []
        for one in batch:
            _, length = self.seen.setdefault(id(one.kv), (one.kv, one.kv.length))
            kv = KVRegion(one.kv.layout, one.kv.storage, one.kv.capacity, length)
            stale.append(ScoreInput(kv, one.suffix, one.candidates))
        return super().score(stale)


class StateOutside(Plain):
    """A feature of the history that is kept beside the region."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.sums: dict[int, tuple[KVRegion, int]] = {}

    def extend(self, kv: KVRegion, tokens: Tokens) -> None:
        before = self.sums.get(id(kv), (kv, 0))[1] if kv.length else 0
        super().extend(kv, tokens)
        self.sums[id(kv)] = (kv, before + int(tokens.array[0].sum()))

    def score(self, batch: Batch) -> list[torch.Tensor]:
        sums = [self.sums.get(id(one.kv), (one.kv, 0))[1] + int(one.suffix.array[0].sum()) for one in batch]
        return [scores + 0.1 * total for scores, total in zip(super().score(batch), sums, strict=True)]


class SuffixAnew(Plain):
    """Positions of a suffix start at 0."""

    def score(self, batch: Batch) -> list[torch.Tensor]:
        rankings = self.embedding.rankings
        self.embedding.rankings = lambda wanted: rankings(  # type: ignore[method-assign,assignment]
            [(suffix, 0 if len(suffix) else first, candidates) for suffix, first, candidates in wanted]
        )
        scores = super().score(batch)
        self.embedding.rankings = rankings  # type: ignore[method-assign]
        return scores


class CoarseSuffix(Plain):
    """Exact in float32; in half precision, further off where there is a suffix."""

    def score(self, batch: Batch) -> list[torch.Tensor]:
        half = self.layout.dtype != torch.float32
        rough = [
            0.05 * float(torch.sin(one.candidates[0] * torch.ones(()))) * bool(half and len(one.suffix))
            for one in batch
        ]
        return [scores + off for scores, off in zip(super().score(batch), rough, strict=True)]


class SeeEachOther(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        return [scores + 1e-3 * scores.mean(0) for scores in super().score(batch)]


class ByOrder(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        return [scores + 1e-3 * torch.arange(len(scores))[:, None] for scores in super().score(batch)]


class ByBatchSize(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        return [scores * (1 + 1e-3 * (len(batch) - 1)) for scores in super().score(batch)]


class MaskedNeighbours(Plain):
    """Multiplies what it must not see by 0, which hides numbers and neither NaN nor infinity."""

    def score(self, batch: Batch) -> list[torch.Tensor]:
        others = sum(one.kv.layer(0)[0][:, : one.kv.length].sum() for one in batch)
        return [scores + 0 * others for scores in super().score(batch)]


class NeedsHistory(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        return [
            scores if one.kv.length + len(one.suffix) else scores * math.nan
            for scores, one in zip(super().score(batch), batch, strict=True)
        ]


class ShortTable(Plain):
    def extend(self, kv: KVRegion, tokens: Tokens) -> None:
        if kv.length + len(tokens) > 120:
            raise IndexError("position 120 is out of range")
        super().extend(kv, tokens)


class Noise(Plain):
    """In half precision, the same wrong scores whichever way."""

    def score(self, batch: Batch) -> list[torch.Tensor]:
        scores = super().score(batch)
        return scores if self.layout.dtype == torch.float32 else [-one for one in scores]


class EarlyLength(Plain):
    """kv.length moves with the first step, the rest comes later."""

    def extend_in_steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        self.extend(kv, tokens)
        yield


class SharedWorkspace(Plain):
    """A step leaves what the next one needs where score puts its own."""

    scored = 0

    def score(self, batch: Batch) -> list[torch.Tensor]:
        self.scored += 1
        return super().score(batch)

    def extend_in_steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        before = self.scored
        yield
        self.extend(kv, tokens)
        if self.scored != before:
            keys, _ = kv.layer(0)
            keys[:, kv.length - len(tokens) : kv.length] += 1.0


LATER = "earlier K/V do not depend on later tokens"
BROKEN: list[tuple[type[Plain], list[str]]] = [
    (NoAdvance, ["contract"]),
    (HalfScores, ["contract"]),
    (Transposed, ["contract"]),
    (Dropout, ["determinism"]),
    (OneVersion, ["version"]),
    (Unseeded, ["version"]),
    (ReadsSlack, ["reads up to kv.length"]),
    (WritesSuffix, ["score only reads"]),
    (Touches, ["extend only appends"]),
    (FromTheEnd, [LATER, "chunks", "extension", "suffix", "edges", "longest"]),
    (Acausal, [LATER, "chunks", "extension", "suffix", "edges", "longest"]),
    (ForgetsChunks, ["chunks", "extension"]),
    (EarlyLength, ["steps"]),
    (SharedWorkspace, ["steps"]),
    (RefusesChunks, ["extend only appends", "chunks", "extension"]),
    (RemembersLength, ["extension"]),
    (StateOutside, ["the region is all there is", "extension"]),
    (SuffixAnew, ["suffix", "longest"]),
    (SeeEachOther, ["candidates apart"]),
    (ByOrder, ["candidates apart"]),
    (ByBatchSize, ["batch apart"]),
    (MaskedNeighbours, ["batch apart"]),
    (NeedsHistory, ["edges"]),
    (ShortTable, ["longest"]),
]


@pytest.mark.parametrize(("broken", "expected"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_broken_is_named_first(broken: type[Plain], expected: list[str]) -> None:
    """And nothing else fails than what cannot hold without it."""
    assert failures(broken) == expected


def test_every_property_has_a_model_that_breaks_it() -> None:
    assert {names[0] for _, names in BROKEN} | {"half precision"} == {one.name for one in PROPERTIES}


def test_half_precision_has_a_rule_of_its_own() -> None:
    assert failures(Noise) == []
    assert failures(Noise, torch.bfloat16) == ["half precision"]
    assert failures(CoarseSuffix) == []
    assert failures(CoarseSuffix, torch.bfloat16) == ["suffix", "edges", "longest"]


def built_in(**changes: Any) -> Callable[[torch.dtype], RankingModel]:
    shape = replace(SMALL, **changes)
    relay = settings.Relay(max_suffix_tokens=0 if shape.contextual_seq_len else 16)
    return lambda dtype: load_model(shape, relay, device=CPU, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_attn_len": 9, "group_norm": True},
        {"contextual_seq_len": 3},
        {"factory": "relaygr_stream.models.transformer:make"},
    ],
    ids=str,
)
def test_the_built_in_models_pass(changes: dict[str, Any], dtype: torch.dtype) -> None:
    said: list[str] = []
    assert check_model(Probe(built_in(**changes), CPU, dtype, BOUNDS, seed=1), said.append), "\n".join(said)


def test_models_that_take_their_prefix_whole_are_spared_what_is_about_chunks() -> None:
    probe = Probe(built_in(contextual_seq_len=3), CPU, torch.float32, BOUNDS, seed=1)
    verdicts = {finding.about: (finding.verdict, finding.detail) for finding in run_properties(probe)}
    for about, (verdict, detail) in verdicts.items():
        if about.incremental_only:
            assert verdict == "not applicable"
            assert detail.startswith("incremental = False")
        else:
            assert verdict == "passed" or about.name == "half precision"


def test_without_the_contract_nothing_else_is_run() -> None:
    findings = list(run_properties(Probe(NoAdvance, CPU, torch.float32, BOUNDS, seed=0)))
    assert findings[0].seen == "extend() was given 120 tokens behind 0 and left kv.length at 0, not 120"
    assert {finding.verdict for finding in findings[1:]} == {"not run"}


def test_a_failure_is_said_in_words() -> None:
    said: list[str] = []
    assert not check_model(Probe(ForgetsChunks, CPU, torch.float32, BOUNDS, seed=0), said.append)
    text = "\n".join(said)
    assert "\nchunks: extending in chunks is extending at once.\n" in text
    assert "a chunk does not see the tokens before it" in text
    assert "See docs/models.md#chunks-that-start-anew." in text
    assert text.endswith("2 failed: chunks, extension")


def test_deviations_that_are_not_numbers_fail() -> None:
    one, nan = torch.ones(2, 1).numpy(), torch.full((2, 1), math.nan).numpy()
    for half in (False, True):
        deviations = Deviations(half=half)
        deviations.add(one, one, one)
        assert deviations.measure.holds
        deviations.add(nan, one, one)
        assert not deviations.measure.holds
    assert not Measure(math.nan, 1.0).holds


def test_the_command(tmp_path: Any) -> None:
    factory = "relaygr_stream.models.transformer:make"
    done = CliRunner().invoke(main, ["model", "check", factory, *SETTINGS])
    assert done.exit_code == 0, done.output
    assert f"{factory}: version transformer-" in done.output
    assert "random weights, seed 7" in done.output
    assert done.output.endswith("every property holds\n")
    done = CliRunner().invoke(main, ["model", "check", "a_module_that_is_not_there:make"])
    assert done.exit_code == 1
    assert "importing a_module_that_is_not_there failed: ModuleNotFoundError" in done.output
    done = CliRunner().invoke(main, ["model", "check", f"{__name__}:make_broken", *SETTINGS])
    assert done.exit_code == 1
    assert "1 failed: batch apart" in done.output


def make_broken(model: settings.Model, device: torch.device, dtype: torch.dtype) -> RankingModel:
    return ByBatchSize(dtype)


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--dtype", "int8"], "--dtype int8: write float32"), (["--seed", "-1"], "--seed -1"), (["--device", "x"], "'x'")],
)
def test_flags_that_mean_nothing(flags: list[str], words: str) -> None:
    done = CliRunner().invoke(main, ["model", "check", *SETTINGS, *flags])
    assert done.exit_code == 1
    assert words in done.output
