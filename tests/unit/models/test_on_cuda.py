"""The same scores on a GPU, computed without one wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relaygr_stream.models.api import ScoreInput
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.loading import load_any_checkpoint, save_checkpoint
from relaygr_stream.models.map_items import TableDtype, map_items
from tests.unit.models.small_models import INCREMENTAL, deviation, full_scores, random_items, random_tokens, small_model

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def _sync_debug_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("changes", INCREMENTAL)
def test_scores_are_those_of_the_cpu(changes: dict[str, Any]) -> None:
    random, device = np.random.default_rng(0), torch.device("cuda")
    model, on_cpu = small_model(**changes).place(device, torch.float32), small_model(**changes)
    tokens, candidates = random_tokens(random, 40), random_items(random, 5)
    region = KVRegion.new(model.layout, 45, torch.nan, device)
    model.prefill(region, tokens.slice(0, 13))
    model.prefill(region, tokens.slice(13, 33))
    (scores,) = model.score([ScoreInput(region, tokens.slice(33, 40), candidates)])
    assert scores.device.type == "cuda"
    assert deviation(scores.cpu(), full_scores(on_cpu, tokens, candidates)) <= 1e-5


@pytest.mark.usefixtures("_sync_debug_mode")
def test_nothing_waits_for_the_device() -> None:
    random, device = np.random.default_rng(0), torch.device("cuda")
    model = small_model().place(device, torch.bfloat16)
    region = KVRegion.new(model.layout, 45, device=device)
    torch.cuda.set_sync_debug_mode("error")
    model.prefill(region, random_tokens(random, 33))
    (scores,) = model.score([ScoreInput(region, random_tokens(random, 7), random_items(random, 5))])
    assert scores.shape == (5, 2)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rows_of_a_mapped_table_are_those_in_memory(tmp_path: Path, dtype: TableDtype) -> None:
    """Twice, with fewer slots than rows: of the host, and kept on the device."""
    random, device = np.random.default_rng(0), torch.device("cuda")
    save_checkpoint(small_model(), tmp_path / "plain")
    map_items(tmp_path / "plain", tmp_path / "mapped", dtype, 1 << 10)
    served = load_any_checkpoint(tmp_path / "mapped", hot_bytes=20 * 16 * 4)
    table = served.embedding.table
    assert table is not None
    host = table.rows(np.arange(50))
    served.place(device, torch.float32)
    for _ in range(4):
        ids = random.integers(0, 50, 64)
        found = table.rows(ids)
        assert found.device.type == "cuda" and torch.equal(found.cpu(), host[torch.from_numpy(ids)])
    region = KVRegion.new(served.layout, 45, torch.nan, device)
    served.prefill(region, random_tokens(random, 33))
    (scores,) = served.score([ScoreInput(region, random_tokens(random, 7), random_items(random, 5))])
    assert scores.isfinite().all()
