"""Buckets, padding, eviction and falling back, with a recorder that records nothing: the inputs are the padded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import structlog
import torch
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.models.api import ScoreInput
from relaygr_stream.models.kernels import recorded as recorded_module
from relaygr_stream.models.kernels.graphs import (
    MAX_ROWS,
    MAX_TILES,
    MIN_BUCKET,
    RECORD_FROM,
    TRY_AGAIN,
    Graphs,
    Recording,
    bucket_rows,
    bucket_tiles,
)
from relaygr_stream.models.kernels.recorded import RecordedModel, RowEmbedding
from relaygr_stream.models.kernels.tiles import TileField, is_split
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.stu import RankingRows
from tests.unit.models.kernels.models import DEVICE, CountingRecorder, NoPool, fused_model, plain_model, region_of
from tests.unit.models.small_models import deviation, empty_region, held, random_items, random_tokens, small_model

pytestmark = pytest.mark.stack  # Triton's interpreter: half a minute of a core

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _interpreted_kernels_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_module, "MAX_PREFILL_MS", np.inf)


def body(rows: torch.Tensor, tiles: torch.Tensor, split: bool) -> torch.Tensor:
    """Something of all inputs, row by row."""
    return torch.stack([rows.sum(0), rows[0] * tiles.sum() + split], 1).float()


def run(graphs: Graphs, rows: npt.NDArray[np.int64], tiles: npt.NDArray[np.int64]) -> torch.Tensor | None:
    output = graphs.run(rows, tiles, lambda output: [output[: rows.shape[1]]])
    return None if output is None else output[: rows.shape[1]].clone()


def inputs(rows: int, tiles: int, seed: int = 0, parts: int = 2) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    table = random.integers(0, 9, (tiles, len(TileField)))
    table[:, TileField.PARTS] = parts
    return random.integers(0, 9, (4, rows)), table


def live(rows: npt.NDArray[np.int64], tiles: npt.NDArray[np.int64]) -> torch.Tensor:
    return body(torch.from_numpy(rows), torch.from_numpy(tiles), is_split(tiles))


@given(st.integers(0, MAX_ROWS))
def test_buckets_hold_what_they_are_for_and_little_more(count: int) -> None:
    for bucket in (bucket_rows(count), bucket_tiles(count)):
        assert bucket >= max(count, MIN_BUCKET)
        assert bucket_rows(bucket) == bucket or bucket_tiles(bucket) == bucket
    assert bucket_rows(count) <= max(MIN_BUCKET, 1.5 * count)
    assert bucket_tiles(count) <= max(MIN_BUCKET, 2 * count)


def test_a_bucket_is_recorded_when_it_comes_again_and_serves_all_its_sizes() -> None:
    recorder = CountingRecorder(CPU)
    graphs = Graphs("scoring", body, recorder, CPU, 1e-5)
    assert run(graphs, *inputs(20, 5)) is None
    for seed, (rows, tiles) in enumerate([(20, 5), (17, 16), (24, 1), (18, 3)]):
        given_, found = inputs(rows, tiles, seed), run(graphs, *inputs(rows, tiles, seed))
        assert found is not None
        assert torch.equal(found, live(*given_))
    assert (recorder.records, len(graphs)) == (1, 1)
    assert run(graphs, *inputs(25, 5)) is None  # another bucket


def test_tables_of_equal_sizes_with_and_without_cut_rows_have_recordings_of_their_own() -> None:
    recorder = CountingRecorder(CPU)
    graphs = Graphs("scoring", body, recorder, CPU, 1e-5)
    for _ in range(3):
        for parts in (1, 2):
            found = run(graphs, *inputs(20, 5, parts=parts))
            assert found is None or torch.equal(found, live(*inputs(20, 5, parts=parts)))
    assert recorder.records == 2


def test_a_result_without_a_finite_number_is_not_recorded() -> None:
    recorder = CountingRecorder(CPU)
    broken = True

    def sometimes(*given: Any) -> torch.Tensor:
        return body(*given) * (torch.nan if broken else 1)

    graphs = Graphs("scoring", sometimes, recorder, CPU, 1e-5)
    assert [run(graphs, *inputs(20, 5)) for _ in range(3)] == [None] * 3
    assert recorder.records == 0
    broken = False
    run(graphs, *inputs(20, 5))
    found = run(graphs, *inputs(20, 5))
    assert found is not None
    assert torch.equal(found, live(*inputs(20, 5)))


class _Full(CountingRecorder):
    """Has no memory while it is full; says how many recordings there are when it gives memory back."""

    def __init__(self, full: bool) -> None:
        super().__init__(CPU)
        self.full = full
        self.sharing: list[Graphs] = []
        self.left: list[int] = []

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().record(run)

    def free(self) -> None:
        self.left.append(sum(map(len, self.sharing)))


def test_without_memory_all_recordings_that_share_it_are_dropped_and_made_again_later() -> None:
    """What a failed capture allocated in the pool is freed with the last recording there."""
    recorder = _Full(full=False)
    scores, prefills = (Graphs(name, body, recorder, CPU, 1e-5, recorder.sharing) for name in ("scoring", "prefill"))
    for graphs in (scores, prefills):
        assert [run(graphs, *inputs(20, 5)) is None for _ in range(3)] == [True, False, False]
    recorder.full = True
    assert [run(scores, *inputs(40, 5)) for _ in range(2)] == [None, None]
    assert recorder.left == [0]
    recorder.full = False
    for graphs in (scores, prefills):
        assert run(graphs, *inputs(20, 5)) is not None, "it is recorded anew"
    assert scores.on and prefills.on


def test_without_memory_a_recording_is_tried_again_later() -> None:
    recorder = _Full(full=True)
    graphs = Graphs("prefill", body, recorder, CPU, 1e-5)
    assert [run(graphs, *inputs(20, 5)) for _ in range(2)] == [None, None]
    recorder.full = False
    again = [run(graphs, *inputs(20, 5)) for _ in range(TRY_AGAIN + RECORD_FROM)]
    assert again[:-1] == [None] * (TRY_AGAIN + RECORD_FROM - 1)
    assert again[-1] is not None


def test_a_size_that_finds_no_memory_twice_is_left_to_live_calls() -> None:
    """Each try drops all recordings."""
    recorder = _Full(full=True)
    graphs = Graphs("prefill", body, recorder, CPU, 1e-5)
    for _ in range(TRY_AGAIN + 2 * RECORD_FROM):
        assert run(graphs, *inputs(20, 5)) is None
    recorder.full = False
    for _ in range(2 * TRY_AGAIN):
        assert run(graphs, *inputs(20, 5)) is None
    assert graphs.on
    assert [run(graphs, *inputs(40, 5)) is None for _ in range(2)] == [True, False]


def test_the_bucket_not_used_for_longest_goes() -> None:
    recorder = CountingRecorder(CPU)
    graphs = Graphs("scoring", body, recorder, CPU, 1e-5, most=2)
    for rows in (16, 24, 16, 24, 16, 32, 32):  # 24 is the older one when 32 comes again
        run(graphs, *inputs(rows, 1))
    assert (recorder.records, len(graphs)) == (3, 2)
    run(graphs, *inputs(16, 1))
    assert recorder.records == 3
    for _ in range(2):
        run(graphs, *inputs(24, 1))
    assert recorder.records == 4


def test_what_is_too_large_is_left_to_live_launches() -> None:
    recorder = CountingRecorder(CPU)
    graphs = Graphs("scoring", body, recorder, CPU, 1e-5)
    for _ in range(3):
        assert run(graphs, *inputs(MAX_ROWS + 1, 1)) is None
        assert run(graphs, *inputs(1, MAX_TILES + 1)) is None
    assert recorder.records == 0


def test_a_size_whose_replay_takes_too_long_goes_on_live_and_is_not_recorded_again() -> None:
    now = 0.0

    class Slow(CountingRecorder):
        """Replays at 1 ms a row."""

        def record(self, run: Callable[[], torch.Tensor]) -> Recording:
            made = super().record(run)

            def replay() -> None:
                nonlocal now
                now += len(made.output) / 1e3
                made.replay()

            return Recording(made.output, replay)

    recorder = Slow(CPU)
    graphs = Graphs("prefill", body, recorder, CPU, 1e-5, longest_ms=20.0, clock=lambda: now)
    assert [run(graphs, *inputs(16, 5)) is None for _ in range(3)] == [True, False, False]
    assert [run(graphs, *inputs(24, 5)) for _ in range(5)] == [None] * 5
    assert (recorder.records, len(graphs), graphs.on) == (2, 1, True)


class _Fails(NoPool):
    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        raise RuntimeError("operation not permitted when stream is capturing")


class _Deviates(NoPool):
    """Replays what was there when it recorded."""

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        return Recording(run() + 1, lambda: None)


@pytest.mark.parametrize(
    ("recorder", "reason"), [(_Fails(), "RuntimeError: operation not permitted"), (_Deviates(), "deviates by")]
)
def test_a_recording_that_fails_or_deviates_turns_it_off_once(recorder: Any, reason: str) -> None:
    graphs = Graphs("scoring", body, recorder, CPU, 1e-5)
    with structlog.testing.capture_logs() as logged:
        for size in (16, 24):
            for _ in range(3):
                assert run(graphs, *inputs(size, 5)) is None
    assert not graphs.on
    (line,) = logged
    assert line["log_level"] == "warning"
    assert reason in line["reason"]


def test_rows_embed_to_the_same_bits() -> None:
    random = np.random.default_rng(0)
    for dtype in (torch.float32, torch.bfloat16):
        embedding = small_model(oov_rows=3).place(CPU, dtype).embedding
        batch = [
            (random_tokens(random, suffix), prefix, random_items(random, count))
            for suffix, prefix, count in ((3, 5, 4), (0, 60, 2), (7, 0, 1))
        ]
        rows = RowEmbedding(embedding)
        assert torch.equal(rows.embed(torch.from_numpy(rows.rows(batch))), embedding.rankings(batch))


class _Rows:
    """Fused layers that return their input."""

    def table(self, batch: Sequence[RankingRows]) -> npt.NDArray[np.int64]:
        return np.zeros((len(batch), len(TileField)), np.int64)

    def run(self, layers: object, x: torch.Tensor, tiles: torch.Tensor, *, split: bool) -> torch.Tensor:
        return x


@pytest.mark.parametrize("recorder", [CountingRecorder(CPU), _Fails()])
def test_unknown_items_count_once_with_and_without_a_recording(recorder: Any) -> None:
    model = small_model()
    model.stack.fused = _Rows()  # type: ignore[assignment]
    recorded = RecordedModel(model.embedding, model.stack, model.head, recorder)
    none = random_tokens(np.random.default_rng(0), 0)
    ranking, rows = (none, 0, np.array([3, 10**6])), RankingRows(empty_region(model, 1), 0, 2)
    for number in range(1, 4):  # at first there is no recording
        if recorded.logits([ranking], [rows]) is None:
            model.embedding.rankings([ranking])
        assert model.unknown_items == number


@pytest.mark.parametrize("changes", [{}, {"max_attn_len": 6, "group_norm": True}])
def test_a_recorded_model_scores_as_a_live_one(changes: dict[str, Any]) -> None:
    recorder = CountingRecorder()
    recorded, plain = fused_model(recorder=recorder, layers=1, **changes), plain_model(layers=1, **changes)
    random = np.random.default_rng(4)
    outputs = []
    for _ in range(3):
        batch = [
            ScoreInput(region_of(plain, random_tokens(random, length)), random_tokens(random, suffix), items)
            for length, suffix, items in (
                (int(random.integers(0, 30)), int(random.integers(0, 4)), random_items(random, 5)),
                (int(random.integers(0, 30)), 0, random_items(random, int(random.integers(1, 7)))),
            )
        ]
        outputs.append((recorded.score(batch), plain.score(batch)))
    for found, expected in outputs:  # at the end: none was overwritten
        for one, other in zip(found, expected, strict=True):
            assert deviation(one, other) <= 1e-5
    assert recorder.records == 1


def test_a_neighbour_without_finite_scores_leaves_recordings_on() -> None:
    recorder = CountingRecorder()
    recorded, plain = fused_model(recorder=recorder, layers=1), plain_model(layers=1)
    random = np.random.default_rng(5)
    history, items = random_tokens(random, 20), random_items(random, 5)
    broken = region_of(plain, random_tokens(random, 20))
    broken.storage.fill_(torch.nan)
    none = random_tokens(random, 0)
    batch = [ScoreInput(broken, none, items), ScoreInput(region_of(plain, history), none, items)]
    with structlog.testing.capture_logs() as logged:
        for _ in range(3):
            found = recorded.score(batch)
    assert logged == []
    assert recorder.records == 1
    assert deviation(found[1], plain.score(batch[1:])[0]) <= 1e-5


@pytest.mark.parametrize(("layers", "changes"), [(2, {}), (2, {"max_attn_len": 6, "group_norm": True}), (1, {})])
def test_a_recorded_prefill_writes_what_a_live_one_does(layers: int, changes: dict[str, Any]) -> None:
    recorder = CountingRecorder()
    recorded = fused_model(recorder=recorder, layers=layers, **changes)
    plain = plain_model(layers=layers, **changes)
    random = np.random.default_rng(6)
    for first, then in ((0, 20), (9, 24), (17, 17), (3, 0)):  # two buckets: with a prefix, and without tokens
        tokens = random_tokens(random, first + then)
        found, expected = (
            KVRegion.new(model.layout, first + then + 2, torch.nan, DEVICE) for model in (recorded, plain)
        )
        for stop in (first, first + then):
            list(recorded.prefill_in_steps(found, tokens.slice(found.length, stop)))
            plain.prefill(expected, tokens.slice(expected.length, stop))
            assert found.length == expected.length
        assert deviation(held(found), held(expected)) <= 1e-5
        unwritten = [part[:, found.length :] for index in range(found.layout.layers) for part in found.layer(index)]
        assert all(part.isnan().all() for part in unwritten)  # the padding is written nowhere
    assert recorder.records == 2


def test_a_prefill_whose_replay_writes_nothing_goes_on_live() -> None:
    class Still(NoPool):
        def record(self, run: Callable[[], torch.Tensor]) -> Recording:
            return Recording(run(), lambda: None)

    recorded, plain = fused_model(recorder=Still(), layers=1), plain_model(layers=1)
    random = np.random.default_rng(7)
    with structlog.testing.capture_logs() as logged:
        for _ in range(3):
            tokens = random_tokens(random, 20)
            found, expected = (KVRegion.new(model.layout, 20, torch.nan, DEVICE) for model in (recorded, plain))
            for model, region in ((recorded, found), (plain, expected)):
                model.prefill(region, tokens)
            assert deviation(held(found), held(expected)) <= 1e-5
    (line,) = logged
    assert line["of"] == "prefill"
    assert line["reason"].startswith("a replay deviates by")


def test_a_long_prefill_is_live_a_layer_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes to compute counts, attention to a long prefix included."""
    tokens = random_tokens(np.random.default_rng(8), 38)
    weights = 2 * sum(one.numel() for one in plain_model(layers=2).stack.parameters())
    flops = 8 * (weights + 2 * 2 * 2 * (8 + 12) * (20 + 8 / 2))
    monkeypatch.setattr(recorded_module, "PREFILL_FLOPS", dict.fromkeys(recorded_module.PREFILL_FLOPS, flops + 1))
    model = fused_model(layers=2, recorder=CountingRecorder())
    steps = []
    for start in (20, 20, 20, 30, 30):
        region = KVRegion.new(model.layout, 38, device=DEVICE)
        region.length = start
        steps.append(1 + sum(1 for _ in model.prefill_in_steps(region, tokens.slice(start, start + 8))))
    assert steps == [2, 1, 1, 2, 2]  # at first live


def test_what_does_not_fit_is_refused_before_it_is_recorded() -> None:
    model = fused_model(recorder=CountingRecorder())
    tokens = random_tokens(np.random.default_rng(9), 20)
    for _ in range(3):
        region = KVRegion.new(model.layout, 19, device=DEVICE)
        with pytest.raises(ValueError, match="20 tokens behind 0 do not fit into a region of 19"):
            model.prefill(region, tokens)
