"""The worked example of a store behind the protocol: a table with a row for each behaviour."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from relaygr_stream import FeatureColumn, FeatureSchema, HistoryMismatch
from relaygr_stream.history.store import open_store
from relaygr_stream.settings.schema import History
from relaygr_stream.worker.histories import Histories, HistoryMetrics

SETTINGS = History(store="examples.history_store.sql:make", max_retries=0, timeout_ms=5000.0)
SCHEMA = FeatureSchema([FeatureColumn(name="dwell_s", of="behaviour", dtype="float32")])


def insert(path: Path, start: int, stop: int) -> None:
    with sqlite3.connect(path) as db:
        db.execute(
            "CREATE TABLE IF NOT EXISTS behaviours (user_id TEXT, position INT, item INT, action INT, time_ms INT,"
            " dwell_s REAL, PRIMARY KEY (user_id, position))"
        )
        rows = [("shop/ann", at, 100 + at, at % 3, 1000 * at, at / 2) for at in range(start, stop)]
        db.executemany("INSERT INTO behaviours VALUES (?, ?, ?, ?, ?, ?)", rows)
    db.close()


async def test_a_worker_reads_it_and_then_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "histories.db"
    monkeypatch.setenv("HISTORIES_DB", str(path))
    insert(path, 0, 100)
    store, registry = open_store(SETTINGS), CollectorRegistry()
    histories = Histories(store, SETTINGS, HistoryMetrics(registry))
    first = await store.reference("ann", "shop")
    assert first is not None
    found = await histories.find("ann", "shop", first, monotonic() + 20)
    SCHEMA.check("behaviour", len(found), found.table)
    assert found.arrays()[0].tolist() == list(range(100, 200))
    assert np.frombuffer(found.table["dwell_s:float32"], "<f4")[3] == 1.5
    insert(path, 100, 110)
    grown = await store.reference("ann", "shop")
    assert grown is not None
    assert len(await histories.find("ann", "shop", grown, monotonic() + 20)) == 110
    assert registry.get_sample_value("relaygr_history_behaviours_total") == 110
    with sqlite3.connect(path) as db:
        db.execute("UPDATE behaviours SET item = 7 WHERE position = 3")
    db.close()
    wrong = Histories(store, SETTINGS, HistoryMetrics(CollectorRegistry()))
    with pytest.raises(HistoryMismatch):
        await wrong.find("ann", "shop", grown, monotonic() + 20)
    assert await store.reference("nobody", "shop") is None
    for start, stop in ((0, 0), (5, 0), (110, 120)):
        assert len(await store.read("ann", "shop", 1, start, stop)) == 0
