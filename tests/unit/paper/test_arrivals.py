"""`bench paper --arrivals FILE`: the log's times and users reach oracle, simulation, fleet and report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from relaygr_lab.bench import oracle
from relaygr_lab.bench.lengths import costs_named
from relaygr_lab.bench.modes import CACHE, FULL_ANY, RELAY
from relaygr_lab.bench.oracle import largest_rate
from relaygr_lab.bench.progress import Progress
from relaygr_lab.paper import measured
from relaygr_lab.paper.plan import PaperOptions, curves, logged_setups, steps
from relaygr_lab.paper.results import Record
from relaygr_lab.paper.run import Paper
from relaygr_lab.paper.setup import Ground
from relaygr_lab.report import commands

from relaygr_stream.cli.main import main
from relaygr_stream.settings.load import load_settings
from relaygr_stream.telemetry.printable import SafeConsole
from relaygr_stream.workload.arrivals import read_arrivals
from tests.unit.report.test_judge import outcome

FILE = Path(__file__).parent / "bursts.csv"  # 20 bursts of 12 arrivals
LOG = read_arrivals(FILE)
POISSON, LOGGED = logged_setups(LOG)
COSTS = costs_named("npu")
SETTINGS = load_settings(["fleet"], {}).settings


def paper(tmp_path: Path) -> Paper:
    options = PaperOptions(
        quick=True, costs="npu", broker="embedded", samples=100, stages=1, tolerance=1.1, least_s=8.0, repeats=1,
        seeds=1, budget_s=60.0, seed=7, out=tmp_path, arrivals=LOG,
    )  # fmt: skip
    planned = curves(quick=True, arrivals=LOG)
    return Paper(options, Ground(COSTS, SETTINGS), SETTINGS, planned, Record(tmp_path, {}), Progress(SafeConsole()))


def test_the_log_says_who_returns() -> None:
    assert LOG.users is not None
    assert LOG.returning.mean() == pytest.approx(LOG.returns)
    assert (POISSON.arrivals, LOGGED.arrivals) == ("", "bursts.csv")
    assert POISSON.revisit == LOGGED.revisit == round(LOG.returns, 2)
    some = LOG.first(50)
    assert some.users is not None
    assert (len(some.times), len(some.users)) == (50, 50)
    assert some.gaps[1:].mean() == pytest.approx(1.0), "the first arrivals are a log with a rate of their own"
    assert some.returning.mean() == pytest.approx(some.returns)
    late = replace(LOG, users=LOG.users[::-1].copy()).first(50)
    assert late.returning.mean() == pytest.approx(late.returns), "users are counted, not their numbers"
    nobody = replace(LOG, users=None)
    assert logged_setups(nobody)[0].revisit == 0.5
    with pytest.raises(ValueError, match="no users"):
        _ = nobody.returning


def test_only_with_a_log_there_is_a_curve_of_it_in_both_places() -> None:
    for quick in (True, False):
        assert all(not step.setup.arrivals for step in steps(curves(quick)))
        logged = [step for step in steps(curves(quick, LOG)) if step.setup.arrivals]
        assert [step.where for step in logged] == ["simulated", "fleet"]


def test_without_a_head_start_bursts_carry_less_than_poisson_arrivals() -> None:
    shape = LOGGED.shape(COSTS, 50.0)
    for mode in (FULL_ANY, CACHE):
        assert 0 < largest_rate(mode, COSTS, shape, log=LOG) < 0.8 * largest_rate(mode, COSTS, shape)


def test_simulations_and_oracle_of_that_setup_have_the_log_and_others_have_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "REQUESTS", 1000)
    run = paper(tmp_path)
    logged, poisson = (run._simulation(0, setup, RELAY) for setup in (LOGGED, POISSON))
    assert logged is not None
    assert poisson is not None
    assert (logged.log, poisson.log) == (LOG, None)
    oracle_rate = logged.blank.oracle
    assert oracle_rate == largest_rate(RELAY, COSTS, LOGGED.shape(COSTS, 50.0), log=LOG) != poisson.blank.oracle
    story = logged._simulate(0.5 * oracle_rate)
    # Played once, a fifth of it before the judged time: the judged arrivals are the log's, in its own gaps.
    assert len(story.at) == pytest.approx(0.8 * len(LOG.times), abs=24)  # a burst or two straddle the beginning
    gaps = np.diff(np.sort(story.at))
    assert gaps.std() / gaps.mean() > 1.4, "Poisson gaps spread by 1"


async def test_a_fleet_plays_the_log_and_searches_no_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Bench:
        def __init__(self, options: Any, *_: object) -> None:
            asked.append(options)
            raise InterruptedError

    monkeypatch.setattr(measured, "Bench", Bench)
    run = paper(tmp_path)
    for setup in (LOGGED, POISSON.at(timeout=1.0)):
        blank, ground = msgspec.structs.replace(outcome("relay", None), setup=setup), Ground(COSTS, SETTINGS)
        with pytest.raises(InterruptedError):
            await measured.measure(
                [blank], [RELAY], run.options, ground, {"relay": 100.0}, 60.0, run.progress, whole=False
            )
    assert [options.arrivals for options in asked] == [LOG, None]
    assert [options.timeout_slos for options in asked] == [8.0, 1.0]
    assert asked[0].rate_cells() == [(RELAY, LOG.returns)]
    assert asked[0].length_cells() == []


def test_the_command_takes_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[PaperOptions] = []

    async def run_paper(options: PaperOptions, *_: object) -> list[str]:
        seen.append(options)
        return []

    monkeypatch.setattr(commands, "run_paper", run_paper)
    arguments = ["bench", "paper", "--quick", "--out", str(tmp_path), "--arrivals", str(FILE)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert seen[0].arrivals is not None
    assert len(seen[0].arrivals.times) == len(LOG.times)
