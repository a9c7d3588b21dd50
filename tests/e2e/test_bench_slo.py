"""`relaygr bench slo` over the real pipeline, of a toy size: it measures nothing, but all of it runs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from relaygr_lab.bench.modes import CACHE, FULL, RELAY
from relaygr_lab.bench.options import SloOptions
from relaygr_lab.bench.results import SloReport
from relaygr_lab.report.commands import run_slo
from rich.console import Console

from relaygr_stream.settings.schema import Kafka, Settings
from tests.e2e.fleet import TEST_SETTINGS


@pytest.mark.stack
async def test_a_toy_run_measures_every_mode_and_writes_its_reports(embedded_settings: Kafka, tmp_path: Path) -> None:
    settings: Settings = msgspec.structs.replace(
        TEST_SETTINGS, kafka=embedded_settings, relay=msgspec.structs.replace(TEST_SETTINGS.relay, slo_ms=2000.0)
    )
    options = SloOptions(
        preset="toy",
        modes=(FULL, CACHE, RELAY),
        length=96,
        rate=5.0,
        revisits=(0.9,),
        users=10,
        known=16,
        samples=10,
        least_s=0.5,
        warm_up_s=0.2,
        settle_s=0.5,
        tolerance=3.0,
        repeats=1,
        budget_s=180.0,  # what a busy machine may need before the first probe; the searches end by themselves
        candidates=20,
        suffix=4,
        out=tmp_path / "out",
    )
    console = Console(width=160, record=True, quiet=True)
    await run_slo(options, settings, "relaygr bench slo", console)
    report = msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes(), type=SloReport)
    assert {probe.mode for probe in report.probes} == {"full", "cache", "relay"}
    assert all(probe.requests >= 10 or probe.cut_short for probe in report.probes)
    relayed = [probe for probe in report.probes if probe.mode == "relay" and probe.passed]
    assert relayed, "no probe of the relay passed an SLO of two seconds"
    assert sum(probe.admitted for probe in relayed) > 0
    for probe in report.probes:
        if probe.mode == "full":
            assert set(probe.outcomes) <= {"full"}
            assert probe.announced == probe.admitted == 0
        if probe.mode == "cache":
            assert probe.admitted == 0
    answered = next(probe for probe in report.probes if probe.mode == "full" and probe.passed)
    assert answered.stage_means["device"] > 0
    assert answered.stage_means["outbound"] > 0
    assert report.memory
    assert sum(report.costs.values()) > 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "a P99 of" in page.split("</h1>")[0]
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".bench")]
