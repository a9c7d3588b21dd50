"""The checker: it passes what is exact, and of a model that is not, names the property that was broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as replaced
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from examples.models.retention import Retention
from relaygr_stream import settings
from relaygr_stream.errors import ModelError
from relaygr_stream.models.api import RankingModel
from relaygr_stream.models.check import properties, run
from relaygr_stream.models.check.probe import Probe, RequestBounds
from relaygr_stream.models.check.registry import PROPERTIES
from relaygr_stream.models.check.run import check_model, probe_for, run_properties
from relaygr_stream.models.loading import load_model
from tests.unit.models.broken_families import (
    COLUMNS,
    EarlyLength,
    EarlyState,
    Featured,
    IgnoresColumn,
    KeepsUser,
    LeaksCross,
    LeaksIntoState,
    OldState,
    OneWorkspace,
    RecurrentFeatured,
    SharedWorkspace,
    StepsRaise,
    WritesState,
)
from tests.unit.models.broken_models import (
    CPU,
    Acausal,
    ByBatchSize,
    ByOrder,
    CoarseSuffix,
    Dropout,
    EmptySegment,
    FixedCutSeesCandidates,
    ForgetsChunks,
    FromTheEnd,
    HalfScores,
    KnownItemsOnly,
    MadeOnce,
    MapsCandidatesInPlace,
    MapsInPlace,
    MaskedNeighbours,
    NeedsHistory,
    NoAdvance,
    Noise,
    OneVersion,
    OwnBuffer,
    Plain,
    ReadsSlack,
    RefusesChunks,
    RemembersLength,
    SeeEachOther,
    ShortPrefix,
    ShortSuffix,
    ShortTable,
    StateOutside,
    SuffixAnew,
    Touches,
    Transposed,
    UnknownElsewhere,
    Unseeded,
    WritesSuffix,
)

BOUNDS = RequestBounds(prefix=120, suffix=16, candidates=20, items=50, max_stale=9)
#: Enough for every model that is broken: what is exact, and is served, is checked with longer prefixes.
SHORTER = replaced(BOUNDS, prefix=12)
SMALL = settings.Model(layers=2, dim=16, heads=2, dqk=8, dv=12, vocab=50, max_positions=200, scale_tokens=64)


def failures(make: Callable[[torch.dtype], Any], dtype: torch.dtype = torch.float32) -> list[str]:
    probe = Probe(make, CPU, dtype, SHORTER, seed=0)
    return [finding.about.name for finding in run_properties(probe) if finding.verdict == "FAILED"]


LATER = "earlier K/V do not depend on later tokens"
BROKEN: list[tuple[Callable[[torch.dtype], RankingModel], list[str]]] = [
    (KeepsUser, ["user features changed"]),
    (LeaksCross, ["cross features stay out", "user features changed", "determinism"]),
    (LeaksIntoState, ["cross features stay out"]),
    (IgnoresColumn, ["features are read"]),
    (NoAdvance, ["contract"]),
    (HalfScores, ["contract"]),
    (Transposed, ["contract"]),
    (Dropout, ["determinism"]),
    (OneVersion, ["version"]),
    (Unseeded, ["version"]),
    (MadeOnce, ["version"]),
    (ReadsSlack, ["reads up to kv.length", "edges"]),
    (WritesSuffix, ["score only reads"]),
    (Touches, ["prefill only appends"]),
    (FromTheEnd, [LATER, "chunks", "extension", "suffix", "edges", "unknown items", "longest"]),
    (Acausal, [LATER, "chunks", "extension", "suffix", "edges", "longest"]),
    (ForgetsChunks, ["chunks", "extension"]),
    (EarlyLength, ["steps"]),
    (SharedWorkspace, ["steps"]),
    (OneWorkspace, ["steps"]),
    (StepsRaise, ["steps"]),
    (RefusesChunks, ["prefill only appends", "chunks", "extension"]),
    (RemembersLength, ["extension"]),
    (StateOutside, ["the region is all there is", "extension"]),
    (SuffixAnew, ["suffix", "unknown items", "longest"]),
    (SeeEachOther, ["candidates apart"]),
    (FixedCutSeesCandidates, ["candidates apart"]),
    (ByOrder, ["candidates apart"]),
    (ByBatchSize, ["batch apart"]),
    (EmptySegment, ["batch apart"]),
    (MaskedNeighbours, ["batch apart"]),
    (NeedsHistory, ["edges", "batch apart"]),
    (KnownItemsOnly, ["unknown items"]),
    (UnknownElsewhere, ["unknown items"]),
    (MapsInPlace, ["unknown items"]),
    (MapsCandidatesInPlace, ["unknown items"]),
    (ShortTable, ["longest"]),
    (ShortSuffix, ["longest"]),
]


@pytest.fixture(autouse=True)
def none_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test before this one has made a model of which there is one in a process."""
    monkeypatch.setattr(MadeOnce, "made", False)


@pytest.mark.parametrize(
    ("broken", "expected"),
    [each for each in BROKEN if len(each[1]) == 1],  # the others: below, with all that they break
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_broken_is_named_first(broken: Callable[[torch.dtype], RankingModel], expected: list[str]) -> None:
    probe = Probe(broken, CPU, torch.float32, SHORTER, seed=0)
    found = run_properties(probe)
    assert next(each.about.name for each in found if each.verdict == "FAILED") == expected[0]


@pytest.mark.parametrize(
    ("broken", "expected"),
    [pytest.param(*each, marks=[pytest.mark.stack] * (len(each[1]) == 1)) for each in BROKEN],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_nothing_else_fails_than_what_cannot_hold_without_it(
    broken: Callable[[torch.dtype], RankingModel], expected: list[str]
) -> None:
    assert failures(broken) == expected


def test_every_property_has_a_model_that_breaks_it() -> None:
    assert {names[0] for _, names in BROKEN} | {"half precision"} == {one.name for one in PROPERTIES}


def test_half_precision_has_a_rule_of_its_own() -> None:
    assert failures(Noise) == []
    assert failures(Noise, torch.bfloat16) == ["half precision"]
    assert failures(CoarseSuffix) == []
    assert failures(CoarseSuffix, torch.bfloat16) == ["suffix", "edges", "unknown items", "longest"]


@pytest.mark.parametrize("exact", [OwnBuffer, RecurrentFeatured], ids=lambda kind: kind.__name__)
def test_unusual_models_that_are_exact_pass(exact: Callable[[torch.dtype], RankingModel]) -> None:
    assert failures(exact) == []


def test_a_model_with_positions_for_a_short_prefix_alone_passes() -> None:
    """20 tokens and a suffix of 16: no property may ask for more than the settings allow."""
    said: list[str] = []
    bounds = replaced(BOUNDS, prefix=20, max_stale=0)
    assert check_model(Probe(ShortPrefix, CPU, torch.float32, bounds, seed=0), said.append), "\n".join(said)


@pytest.mark.parametrize(("dtype", "seed"), [(torch.bfloat16, 36), (torch.float16, 12)], ids=str)
def test_two_histories_of_unknown_items_may_share_roundings(dtype: torch.dtype, seed: int) -> None:
    """With these seeds torch's operators come to 1.4 times and 1.6 times full inference's own deviation."""

    def make(wanted: torch.dtype) -> RankingModel:
        return load_model(SMALL, settings.Relay(), device=CPU, dtype=wanted, kernels="torch")

    assert properties.unknown_items(Probe(make, CPU, dtype, BOUNDS, seed)).holds


def test_the_check_runs_on_the_kernels_that_the_worker_would(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.dtype, str]] = []

    def load(*_: Any, dtype: torch.dtype, kernels: str = "auto", **__: Any) -> RankingModel:
        asked.append((dtype, kernels))
        if kernels == "amx" and dtype == torch.float32:
            raise ModelError("these kernels have no float32")
        return Plain(dtype)

    monkeypatch.setattr(run, "load_model", load)
    worker = settings.Worker(kernels="amx")
    probe_for(settings.Settings(worker=worker), CPU, torch.bfloat16, 0)
    # The float32 reference falls back; the type under check does not.
    assert asked == [(torch.bfloat16, "amx"), (torch.float32, "amx"), (torch.float32, "auto")]
    with pytest.raises(ModelError, match="these kernels have no float32"):
        probe_for(settings.Settings(worker=worker), CPU, torch.float32, 0)


def built_in(**changes: Any) -> Callable[[torch.dtype], RankingModel]:
    shape = replace(SMALL, **changes)
    relay = settings.Relay(max_suffix_tokens=0 if shape.contextual_seq_len else 16)
    return lambda dtype: load_model(shape, relay, device=CPU, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_attn_len": 9, "group_norm": True, "oov_rows": 3},
        {"contextual_seq_len": 3},
        {"factory": "relaygr_stream.models.transformer:make"},
        {"factory": "examples.models.retention:make"},
        {"factory": "examples.models.contextual:make"},
    ],
    ids=str,
)
@pytest.mark.stack
def test_the_models_of_this_repository_pass(changes: dict[str, Any], dtype: torch.dtype) -> None:
    said: list[str] = []
    assert check_model(Probe(built_in(**changes), CPU, dtype, BOUNDS, seed=1), said.append), "\n".join(said)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, torch.float32),
        ({}, torch.bfloat16),
        ({"contextual_seq_len": 1}, torch.float32),
        ({"features": [one for one in COLUMNS if one.of == "cross"], "max_attn_len": 9}, torch.float32),
        ({"features": [one for one in COLUMNS if one.of == "behaviour"], "group_norm": True}, torch.bfloat16),
        ({"features": [one for one in COLUMNS if one.of == "user"]}, torch.float32),
    ],
    ids=["all", "all, bfloat16", "contextual user", "cross", "behaviours, bfloat16", "user"],
)
@pytest.mark.stack
def test_the_built_in_model_with_features_passes(changes: dict[str, Any], dtype: torch.dtype) -> None:
    bounds = replaced(BOUNDS, suffix=0) if "contextual_seq_len" in changes else BOUNDS
    said: list[str] = []
    probe = Probe(lambda wanted: Featured(wanted, **changes), CPU, dtype, bounds, seed=1)
    assert check_model(probe, said.append), "\n".join(said)


@pytest.mark.parametrize("make", [built_in(), Featured], ids=["ids", "features"])
@pytest.mark.stack
def test_the_built_in_model_passes_in_float16(make: Callable[[torch.dtype], RankingModel]) -> None:
    said: list[str] = []
    assert check_model(Probe(make, CPU, torch.float16, BOUNDS, seed=1), said.append), "\n".join(said)


def test_models_that_take_their_prefix_whole_are_spared_what_is_about_chunks() -> None:
    probe = Probe(built_in(contextual_seq_len=3), CPU, torch.float32, SHORTER, seed=1)
    verdicts = {finding.about: (finding.verdict, finding.detail) for finding in run_properties(probe)}
    for about, (verdict, detail) in verdicts.items():
        if about.incremental_only:
            assert verdict == "not applicable"
            assert detail.startswith("incremental = False")
        else:
            spared = about.name == "half precision" or "features" in about.name
            assert verdict == ("not applicable" if spared else "passed"), about.name


@pytest.mark.parametrize(
    ("family", "spared"),
    [
        ("retention", {"prefill only appends", LATER}),
        ("contextual", {"prefill only appends", LATER, "chunks", "extension", "suffix"}),
    ],
)
def test_what_means_nothing_for_a_family_is_not_judged(family: str, spared: set[str]) -> None:
    probe = Probe(built_in(factory=f"examples.models.{family}:make"), CPU, torch.float32, SHORTER, seed=1)
    found = {finding.about.name for finding in run_properties(probe) if finding.verdict == "not applicable"}
    assert {name for name in found if "features" not in name} - {"half precision", "steps"} == spared


@pytest.mark.parametrize(
    ("broken", "expected"),
    [(OldState, ["reads up to kv.length", "edges"]), (WritesState, ["score only reads"]), (EarlyState, ["steps"])],
)
def test_a_broken_state_is_named(broken: type[Retention], expected: list[str]) -> None:
    assert failures(broken)[: len(expected)] == expected


def test_without_the_contract_nothing_else_is_run() -> None:
    findings = list(run_properties(Probe(NoAdvance, CPU, torch.float32, BOUNDS, seed=0)))
    assert findings[0].seen == "prefill() was given 120 tokens behind 0 and left kv.length at 0, not 120"
    assert {finding.verdict for finding in findings[1:]} == {"not run"}


def test_a_failure_is_said_in_words() -> None:
    said: list[str] = []
    assert not check_model(Probe(ForgetsChunks, CPU, torch.float32, SHORTER, seed=0), said.append)
    text = "\n".join(said)
    assert "\nchunks: prefill in chunks is prefill at once.\n" in text
    assert "a chunk does not see the tokens before it" in text
    assert "See docs/explanation/exactness.md#chunks-that-start-anew." in text
    assert text.endswith("2 failed: chunks, extension")


def test_a_type_that_a_factory_refuses_is_none() -> None:
    def make(dtype: torch.dtype) -> RankingModel:
        if dtype == torch.float16:
            raise ModelError("this model has no float16")
        return Plain(dtype)

    assert failures(make) == []
