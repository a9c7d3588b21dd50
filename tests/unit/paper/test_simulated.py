"""A simulated value of `bench paper`: the same setup as the fleet's, in the same dilated time."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import msgspec
import pytest
from relaygr_lab.bench.lengths import costs_named
from relaygr_lab.bench.modes import ABLATIONS, CACHE, FULL_ANY, FULL_LANE, RELAY, Mode
from relaygr_lab.bench.options import TIMEOUT_SLOS
from relaygr_lab.bench.oracle import largest_rate
from relaygr_lab.bench.progress import Progress
from relaygr_lab.paper import simulated
from relaygr_lab.paper.plan import PaperOptions, curves
from relaygr_lab.paper.results import RUN_FILES, Outcome, Record, points
from relaygr_lab.paper.run import Paper
from relaygr_lab.paper.setup import Ground, Setup, factor_for
from relaygr_lab.paper.simulated import Simulation
from relaygr_lab.simulate.run import TooLateError
from relaygr_lab.simulate.story import Story

from relaygr_stream.settings.load import load_settings
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.printable import SafeConsole
from tests.unit.report.test_judge import outcome

pytestmark = pytest.mark.stack

COSTS = costs_named("npu")
SLO_MS = 50.0
LRU, HBM = (next(mode for mode in ABLATIONS if mode.name == name) for name in ("relay-lru", "relay-hbm"))


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "REQUESTS", 150)
    monkeypatch.setattr(simulated, "WARM_UP", 50)
    monkeypatch.setattr(simulated, "TOLERANCE", 1.3)


def simulation(mode: Mode, **setup: float) -> Simulation:
    made = Setup().at(**setup)
    oracle, most = (largest_rate(one, made.costs(COSTS), made.shape(COSTS, SLO_MS)) for one in (mode, RELAY))
    ground, factor = Ground(COSTS, load_settings(["fleet"], {}).settings), factor_for(most)
    blank = msgspec.structs.replace(
        outcome(mode.name, None, oracle, "simulated", **setup), length=made.length(COSTS, SLO_MS), factor=factor,
        setup=made, probes=[], bus_ms=[],
    )  # fmt: skip
    return Simulation(blank, mode, ground, 7, most)


def run(mode: Mode, **setup: float) -> Outcome:
    return simulation(mode, **setup).run()


def test_the_relay_carries_the_most_and_lane_owners_without_it_the_least() -> None:
    lane, anyone, cache, relay = (run(mode) for mode in (FULL_LANE, FULL_ANY, CACHE, RELAY))
    assert lane.rate is not None
    assert relay.rate is not None
    assert all(lane.rate < (one.rate or 0.0) < relay.rate for one in (anyone, cache))
    for one in (lane, anyone, cache, relay):
        assert one.settled
        assert one.rate is not None
        assert one.rate <= 1.3 * one.oracle
        assert one.where == "simulated"
    assert relay.announced == relay.requests
    assert not lane.announced


@pytest.mark.parametrize("mode", [RELAY, FULL_LANE], ids=lambda mode: mode.name)
def test_a_simulation_ends_early_if_and_only_if_its_rate_does_not_pass(mode: Mode) -> None:
    """Below, near and beyond the largest rate."""
    made, ended = simulation(mode), set()
    for share in (0.5, 0.8, 0.9, 1.0, 1.3, 2.0):
        whole = made._simulate(share * made.blank.oracle)
        try:
            same = made._simulate(share * made.blank.oracle, within_ms=made._slo_ms)
        except TooLateError:
            ended.add(True)
            assert not made._holds(whole)
        else:
            ended.add(False)
            assert made._holds(whole)
            assert same.latency_ms.tolist() == whole.latency_ms.tolist()
    assert ended == {True, False}


def test_a_further_seed_searches_from_what_the_first_one_found() -> None:
    first, rates = run(RELAY), []

    class Counted(Simulation):
        def _simulate(self, rate: float, within_ms: float = math.inf) -> Story:
            rates.append(rate)
            return super()._simulate(rate, within_ms)

    assert first.rate is not None
    again = Counted(**{**vars(simulation(RELAY)), "other": first.rate}).run()
    assert rates[0] == first.rate == again.rate, "the same seed finds the same"
    assert len(rates) == 2


def test_where_no_rate_passes_nothing_is_told_of_those_that_failed() -> None:
    none = run(FULL_LANE, share=4.0)
    assert (none.rate, none.settled, none.p99_ms, none.requests) == (None, True, None, 0)


def simulate_nothing(folder: Path, engine: Settings) -> tuple[Paper, Record]:
    """A run of the anchors and of lengths without any time."""
    options = PaperOptions(
        quick=False, costs="npu", broker="embedded", samples=1, stages=1, tolerance=1.1, least_s=1.0, repeats=1,
        seeds=1, budget_s=0.0, seed=7, out=folder, only="simulated",
    )  # fmt: skip
    planned = tuple(curve for curve in curves(quick=False) if curve.name in ("length", "anchors"))
    emulated, record = load_settings(["fleet"], {}).settings, Record(folder, {})
    with Progress(SafeConsole(quiet=True)) as progress:
        paper = Paper(options, Ground(COSTS, emulated), engine, planned, record, progress)
        asyncio.run(paper.run())
    return paper, record


def test_the_real_engine_is_measured_once_a_run(tmp_path: Path) -> None:
    texts, found = [], []
    (tmp_path / RUN_FILES[2]).write_text("of a run that ended before its first outcome")
    for _ in range(2):
        paper, record = simulate_nothing(tmp_path, load_settings(["slo-quick"], {}).settings)
        record.add(outcome("relay", 1.0))
        texts.append(record.engine_costs.read_text())
        found.append(paper.oracle(Setup(real=True, workers=1), RELAY))
        assert paper.factor(Setup(real=True)) == 1
    assert texts[0] == texts[1]
    assert "measured: cpu" in texts[0]
    assert found[0] == found[1] != paper.oracle(Setup(workers=1), RELAY)


def test_an_engine_that_cannot_be_measured_costs_its_anchors_alone(tmp_path: Path) -> None:
    paper, record = simulate_nothing(tmp_path, load_settings(["slo-quick"], {"model.checkpoint": "nowhere"}).settings)
    assert [line for line in paper.left_out if line.startswith("the real engine: ") and "nowhere" in line]
    assert any("no time was left" in line for line in paper.left_out), "the others would be simulated"
    assert not record.engine_costs.exists()


def test_a_given_rate_is_looked_at_once_whatever_becomes_of_it() -> None:
    low, high = (run(FULL_ANY, load=load) for load in (0.1, 1.0))
    assert low.rate == low.given
    assert high.rate is None, "full inference does not carry what the relay does"
    assert low.p99_ms is not None
    assert low.p99_ms < SLO_MS < (high.p99_ms or 0.0)


def test_a_ranking_without_scores_counts_with_its_timeout_as_in_a_probe() -> None:
    late = run(FULL_LANE, load=1.2, long=0.5, share=2.0)
    assert [late.p99_ms, late.p99_short, late.p99_long] == [TIMEOUT_SLOS * SLO_MS] * 3
    assert msgspec.json.decode(msgspec.json.encode(late), type=Outcome) == late, "no infinity, which JSON has not"


#: Modes that first visits show; the tiers' show in what returns find.
BY_FIRST_VISITS = ("relay-anywhere", "relay-undelegated", "relay-whole")


def test_modes_change_what_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "REQUESTS", 100)
    relay = run(RELAY, load=1.0, revisit=0.0)
    others = {mode.name: run(mode, load=1.0, revisit=0.0) for mode in ABLATIONS if mode.name in BY_FIRST_VISITS}
    assert others["relay-anywhere"].p99_ms != relay.p99_ms
    assert relay.decisions.get("delegated", 0) > 0
    assert set(others["relay-undelegated"].decisions) == {"admitted"}
    assert others["relay-whole"].p99_ms != relay.p99_ms


def test_without_dram_fewer_returns_find_their_prefix_kv() -> None:
    found = {gib: run(RELAY, known=400, hbm_gib=4, dram_gib=gib, load=0.4) for gib in (0, 16)}
    none, some = (points([found[gib]])[0] for gib in (0, 16))
    assert none.from_dram == [0.0]
    assert some.from_dram[0] > 0.1
    assert some.reused[0] > none.reused[0] + 0.1


def test_modes_of_the_tiers_change_what_returns_find() -> None:
    tiers = {"known": 400, "hbm_gib": 4, "dram_gib": 8, "zipf": 1.1, "load": 0.4}
    relay, lru, hbm = (points([run(mode, **tiers)])[0] for mode in (RELAY, LRU, HBM))
    assert hbm.from_dram == [0.0] < relay.from_dram
    assert lru.reused != relay.reused
    assert lru.tiers.keys() == {"hbm", "dram"}
    assert hbm.tiers["dram"] == 0.0
    assert 0 < relay.tiers["dram"] <= 4 * 8
    assert relay.decisions
    assert 0 < relay.busy < 1
