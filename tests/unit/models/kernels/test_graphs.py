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
from relaygr_stream.models.kernels.graphs import (
    MAX_ROWS,
    MAX_TILES,
    MIN_BUCKET,
    RecordedScores,
    Recording,
    RowEmbedding,
    ScoreGraphs,
    bucket_rows,
    bucket_tiles,
)
from relaygr_stream.models.kernels.tiles import Field
from relaygr_stream.models.stu import RankingRows
from tests.unit.models.kernels.models import CountingRecorder, fused_model, plain_model, region_of
from tests.unit.models.small_models import deviation, empty_region, random_items, random_tokens, small_model

CPU = torch.device("cpu")


def body(rows: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """Something of both inputs, row by row."""
    return torch.stack([rows.sum(0), rows[0] * tiles.sum()], 1).float()


def inputs(rows: int, tiles: int, seed: int = 0) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    return random.integers(0, 9, (4, rows)), random.integers(0, 9, (tiles, len(Field)))


def live(rows: npt.NDArray[np.int64], tiles: npt.NDArray[np.int64]) -> torch.Tensor:
    return body(torch.from_numpy(rows), torch.from_numpy(tiles))


@given(st.integers(0, MAX_ROWS))
def test_buckets_hold_what_they_are_for_and_little_more(count: int) -> None:
    for bucket in (bucket_rows(count), bucket_tiles(count)):
        assert bucket >= max(count, MIN_BUCKET)
        assert bucket_rows(bucket) == bucket or bucket_tiles(bucket) == bucket
    assert bucket_rows(count) <= max(MIN_BUCKET, 1.5 * count)
    assert bucket_tiles(count) <= max(MIN_BUCKET, 2 * count)


def test_a_bucket_is_recorded_when_it_comes_again_and_serves_all_its_sizes() -> None:
    recorder = CountingRecorder(CPU)
    graphs = ScoreGraphs(body, recorder, CPU, 1e-5)
    assert graphs.score(*inputs(20, 5)) is None
    for seed, (rows, tiles) in enumerate([(20, 5), (17, 16), (24, 1), (18, 3)]):
        given_, found = inputs(rows, tiles, seed), graphs.score(*inputs(rows, tiles, seed))
        assert found is not None
        assert torch.equal(found, live(*given_))
    assert (recorder.records, len(graphs)) == (1, 1)
    assert graphs.score(*inputs(25, 5)) is None  # another bucket


def test_an_output_is_not_what_the_next_replay_writes() -> None:
    graphs = ScoreGraphs(body, CountingRecorder(CPU), CPU, 1e-5)
    graphs.score(*inputs(20, 5))
    first = graphs.score(*inputs(20, 5, 1))
    assert first is not None
    kept = first.clone()
    graphs.score(*inputs(20, 5, 2))
    assert torch.equal(first, kept)


def test_the_bucket_not_used_for_longest_goes() -> None:
    recorder = CountingRecorder(CPU)
    graphs = ScoreGraphs(body, recorder, CPU, 1e-5, most=2)
    for rows in (16, 24, 16, 24, 16, 32, 32):  # 24 is the older one when 32 comes again
        graphs.score(*inputs(rows, 1))
    assert (recorder.records, len(graphs)) == (3, 2)
    graphs.score(*inputs(16, 1))
    assert recorder.records == 3
    graphs.score(*inputs(24, 1))
    assert recorder.records == 4


def test_what_is_too_large_is_left_to_live_launches() -> None:
    recorder = CountingRecorder(CPU)
    graphs = ScoreGraphs(body, recorder, CPU, 1e-5)
    for _ in range(3):
        assert graphs.score(*inputs(MAX_ROWS + 1, 1)) is None
        assert graphs.score(*inputs(1, MAX_TILES + 1)) is None
    assert recorder.records == 0


class _Fails:
    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        raise RuntimeError("operation not permitted when stream is capturing")


class _Deviates:
    """Replays what was there when it recorded."""

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        return Recording(run() + 1, lambda: None)


@pytest.mark.parametrize(
    ("recorder", "reason"), [(_Fails(), "RuntimeError: operation not permitted"), (_Deviates(), "deviates by")]
)
def test_a_recording_that_fails_or_deviates_turns_it_off_once(recorder: Any, reason: str) -> None:
    graphs = ScoreGraphs(body, recorder, CPU, 1e-5)
    with structlog.testing.capture_logs() as logged:
        for size in (16, 24):
            for _ in range(3):
                assert graphs.score(*inputs(size, 5)) is None
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
        return np.zeros((len(batch), len(Field)), np.int64)

    def run(self, layers: object, x: torch.Tensor, tiles: torch.Tensor, *, split: bool) -> torch.Tensor:
        return x


@pytest.mark.parametrize("recorder", [CountingRecorder(CPU), _Fails()])
def test_unknown_items_count_once_with_and_without_a_recording(recorder: Any) -> None:
    model = small_model()
    model.stack.fused = _Rows()  # type: ignore[assignment]
    recorded = RecordedScores(model.embedding, model.stack, model.head, recorder)
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
