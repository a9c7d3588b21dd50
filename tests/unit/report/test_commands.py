"""What a run leaves behind, whole or ended early. The runs are made up."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from relaygr_lab.bench.modes import FULL, RELAY
from relaygr_lab.bench.options import SloOptions
from relaygr_lab.bench.probe import Measured
from relaygr_lab.bench.results import Probe, SloReport
from relaygr_lab.bench.run import Bench
from relaygr_lab.report import commands, slo_charts
from rich.console import Console

from relaygr_stream.cli.main import main
from relaygr_stream.errors import RelayError
from relaygr_stream.settings.schema import Settings
from tests.unit.bench.reports import WORLD, probe

QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts take most of the time, and say nothing here."""
    for name in ("line_chart", "bar_chart"):
        monkeypatch.setattr(slo_charts, name, lambda *_: "")


@pytest.fixture
def options(tmp_path: Path) -> SloOptions:
    return SloOptions(
        preset="toy",
        modes=(FULL, RELAY),
        length=512,
        revisits=(0.0,),
        length_revisits=(),
        samples=100,
        tolerance=1.2,
        repeats=1,
        budget_s=60.0,
        out=tmp_path,
    )


def made_up(monkeypatch: pytest.MonkeyPatch, *probes: Probe, error: BaseException | None = None) -> None:
    """Every run has these probes, in one search of each mode, and ends with the error."""

    async def made(bench: Bench) -> None:
        bench.worlds, bench.about["broker"] = [WORLD], "none"
        for cell in bench.cells:
            cell.begin_search(bench.worlds)
        for one in probes:
            bench.measured.append(Measured(one, [], []))
            if not one.set_aside:
                next(cell for cell in bench.cells if cell.mode.name == one.mode).record(one)
        if error is not None:
            raise error

    monkeypatch.setattr(Bench, "run", made)


def read(file: Path) -> SloReport:
    return msgspec.json.decode(file.read_bytes(), type=SloReport)


@pytest.mark.parametrize(
    ("error", "words"), [(RelayError("a worker ended"), "a worker ended"), (asyncio.CancelledError(), "stopped")]
)
async def test_a_run_that_ends_early_keeps_what_it_measured_and_the_last_report(
    monkeypatch: pytest.MonkeyPatch, options: SloOptions, error: BaseException, words: str
) -> None:
    (options.out / "report.json").write_text("of the last run")
    made_up(monkeypatch, probe(FULL, 10.0, passed=True), error=error)
    with pytest.raises(type(error)):
        await commands.run_slo(options, Settings(), "", QUIET)
    kept = read(options.out / "partial.json")
    assert [one.rate for one in kept.probes] == [10.0]
    assert kept.remarks[0] == f"the run ended early: {words}"
    assert words in (options.out / "partial.html").read_text(encoding="utf-8")
    assert (options.out / "report.json").read_text() == "of the last run"


async def test_a_run_that_ends_before_its_first_probe_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, options: SloOptions
) -> None:
    made_up(monkeypatch, error=RelayError("no broker"))
    with pytest.raises(RelayError, match="no broker"):
        await commands.run_slo(options, Settings(), "", QUIET)
    assert list(options.out.iterdir()) == []


async def test_the_report_is_written_before_it_is_printed(monkeypatch: pytest.MonkeyPatch, options: SloOptions) -> None:
    def closed(*_: object) -> None:
        raise BrokenPipeError

    made_up(monkeypatch, probe(FULL, 10.0, passed=True))
    monkeypatch.setattr(commands, "print_table", closed)
    with pytest.raises(BrokenPipeError):
        await commands.run_slo(options, Settings(), "", QUIET)
    assert len(read(options.out / "report.json").probes) == 1


async def test_hits_are_judged_up_to_the_values_found_and_told_beyond_them(
    monkeypatch: pytest.MonkeyPatch, options: SloOptions
) -> None:
    made_up(
        monkeypatch,
        probe(FULL, 10.0, passed=True),
        probe(RELAY, 20.0, passed=True, admitted=90, admitted_hits=89),
        probe(RELAY, 20.0, passed=False, admitted=90, admitted_hits=60),
        probe(RELAY, 23.0, passed=False, admitted=50, admitted_hits=30),
        probe(RELAY, 20.0, passed=False, admitted=7, admitted_hits=1, set_aside=True),
    )
    await commands.run_slo(replace(options, repeats=2), Settings(), "", QUIET)
    report = read(options.out / "report.json")
    hits = {name: report.hits[name] for name in ("admitted", "hit", "admitted_beyond", "hit_beyond")}
    assert hits == {"admitted": 180, "hit": 149, "admitted_beyond": 50, "hit_beyond": 30}
    assert any(one.found == "149 of 180 (82.8%)" and one.state == "below" for one in report.verdicts)


@pytest.mark.parametrize(("lacking", "check", "code"), [(["hits: 90%"], "1", 1), (["hits: 90%"], "0", 0), ([], "1", 0)])
def test_what_is_below_is_said_and_fails_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacking: list[str], check: str, code: int
) -> None:
    async def run_slo(*_: object) -> list[str]:
        return lacking

    monkeypatch.setattr(commands, "run_slo", run_slo)
    arguments = ["bench", "slo", "--out", str(tmp_path)]
    result = CliRunner().invoke(main, arguments, env={"CHECK": check})
    assert (result.exit_code, "hits: 90%" in result.output) == (code, code == 1), result.output
