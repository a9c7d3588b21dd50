"""`relaygr bench dlrmv3` over the real pipeline and LoadGen, of a toy size: it measures nothing, but all of it runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec
import pytest
from relaygr_lab.bench.modes import CACHE, FULL, RELAY
from relaygr_lab.dlrmv3 import loadgen, plan, sut
from relaygr_lab.dlrmv3.assemble import run_dlrmv3
from relaygr_lab.dlrmv3.model import Shape
from relaygr_lab.dlrmv3.options import Options
from relaygr_lab.dlrmv3.report import Report
from relaygr_lab.dlrmv3.sut import SUMMARY
from relaygr_lab.dlrmv3.workload import Workload
from relaygr_lab.simulate.costs import KV, DeviceCosts
from rich.console import Console

from relaygr_stream.settings.schema import Kafka, Relay, Settings
from relaygr_stream.settings.worker import Model
from tests.e2e.fleet import TEST_SETTINGS
from tests.unit.dlrmv3.test_loadgen import needs_loadgen

pytestmark = [pytest.mark.stack, pytest.mark.usefixtures("_few_queries")]

#: The fewest queries by which LoadGen judges a P90: a tenth of those of a P99, which it judges in tests/unit/dlrmv3.
QUERIES: Final = 44
TOY: Final = Workload(users=24, candidates=16, scale=0.02)


@pytest.fixture
def _few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (loadgen, plan, sut):
        monkeypatch.setattr(module, "QUANTILE", 0.9)


async def test_a_toy_run_has_loadgens_verdict_on_every_mode(embedded_settings: Kafka, tmp_path: Path) -> None:
    needs_loadgen()
    settings: Settings = msgspec.structs.replace(
        TEST_SETTINGS,
        kafka=embedded_settings,
        relay=Relay(slo_ms=60_000.0, life_window_ms=60_000, max_prefix_tokens=512, max_suffix_tokens=16),
        model=Model(),
    )
    options = Options(
        workload=TOY,
        shape=Shape(layers=1, dim=32),
        modes=(FULL, CACHE, RELAY),
        engine=True,
        broker=None,
        queries=QUERIES,
        least_queries=QUERIES,
        budget_s=1e4,
        most_runs=1,
        out=tmp_path / "out",
    )
    console = Console(width=160, record=True, quiet=True)
    assert await run_dlrmv3(options, settings, "relaygr bench dlrmv3", console) == [], "a bound is not kept"
    report = msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes(), type=Report)
    runs = {run.mode: run for run in report.runs}
    assert set(runs) == {"full", "cache", "relay", "engine"}
    for mode, run in runs.items():
        summary = (tmp_path / "out" / run.folder / SUMMARY).read_text(encoding="utf-8")
        assert run.valid
        assert "Result is : VALID" in summary
        assert "Scenario : Server" in summary
        assert sum(run.outcomes.values()) == QUERIES
        assert run.hits == 0 if mode == "full" else run.hits > 0.5, (mode, run.outcomes)
    assert runs["relay"].heads_ms is not None
    assert runs["cache"].heads_ms is None
    assert report.kv_user_bytes > 0
    assert report.quotient >= 1
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".bench")]


async def test_an_emulated_device_is_measured_in_dilated_time(embedded_settings: Kafka, tmp_path: Path) -> None:
    """Its costs allow hundreds of queries a second, so time is dilated; what is reported is not."""
    needs_loadgen()
    settings: Settings = msgspec.structs.replace(
        TEST_SETTINGS,
        kafka=embedded_settings,
        relay=Relay(slo_ms=20_000.0, life_window_ms=60_000, max_prefix_tokens=512, max_suffix_tokens=16),
        model=Model(),
    )
    costs = DeviceCosts(
        source="made up", kv=KV(1, 2, 16, 16, "float32"), prefill_ms=(1.0, 0.01, 0.0), score_ms=(4.0, 0.0, 0.0),
        reload_bytes_per_s=1e10, spill_bytes_per_s=1e10,
    )  # fmt: skip
    options = Options(
        workload=TOY, shape=Shape(layers=2, dim=32), modes=(RELAY,), engine=False, broker=None,
        queries=QUERIES, least_queries=QUERIES, budget_s=1e4, most_runs=1, out=tmp_path / "out", emulated=costs,
    )  # fmt: skip
    await run_dlrmv3(options, settings, "relaygr bench dlrmv3", Console(width=160, quiet=True))
    report = msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes(), type=Report)
    (run,) = report.runs
    assert run.valid
    summary = (tmp_path / "out" / run.folder / SUMMARY).read_text(encoding="utf-8")
    dilated = re.search(r"^target_qps : ([\d.]+)", summary, re.M)
    assert dilated is not None
    assert run.qps >= 2 * float(dilated[1]), "LoadGen measured in dilated time"
    assert run.p99_ms < report.slo_ms == 20_000.0
    assert "time dilated by" in report.conditions["machine"]
    assert report.reused_ms == pytest.approx(10.0, rel=0.1), "twice the layers of the cost file"
