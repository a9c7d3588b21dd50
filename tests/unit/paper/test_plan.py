"""What a run measures, and that a run that was broken off goes on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from relaygr_lab.averages import stretched
from relaygr_lab.bench.cells import Cell
from relaygr_lab.bench.dilation import DILATED, Fleet, dilated
from relaygr_lab.bench.lengths import costs_named
from relaygr_lab.bench.modes import FLEET_MODES, RELAY, apply_mode, grouped
from relaygr_lab.bench.options import TIMEOUT_SLOS
from relaygr_lab.emulate.process import FACTORY
from relaygr_lab.paper import simulated
from relaygr_lab.paper.measured import ended
from relaygr_lab.paper.plan import REGIMES, curves, steps
from relaygr_lab.paper.results import COMPLETE_FILES, RUN_FILES, Outcome, Record, points
from relaygr_lab.paper.setup import GRID, HEADLINE, MOST_RATE, Ground, Setup, factor_for
from relaygr_lab.simulate.scenario import Group, Scenario

from relaygr_stream.bus.loads import LaneLoads, level_of
from relaygr_stream.engine.budgets import BusyShare
from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.load import load_settings
from relaygr_stream.settings.schema import Settings
from tests.unit.bench.reports import WORLD, probe
from tests.unit.report.test_judge import outcome


@pytest.mark.parametrize("name", ["npu", "h100", "cpu"])
def test_lengths_follow_from_the_cost_file_alone(name: str) -> None:
    costs = costs_named(name)
    lengths = [Setup(share=share).length(costs, 50.0) for share in GRID]
    unit = lengths[HEADLINE.index(1.0)]
    assert costs.full_ms(unit, 40) <= 20.0 < costs.full_ms(unit + 32, 40)
    assert [length / unit for length in lengths] == pytest.approx(list(GRID), rel=0.05)


@pytest.mark.parametrize("oracle", [1.0, 359.0, 60.0, 61.0, 5000.0])
def test_a_search_may_send_a_quarter_more_than_the_oracle_carries(oracle: float) -> None:
    factor = factor_for(oracle)
    assert 1.25 * oracle / factor <= MOST_RATE
    assert factor == 1 or 1.25 * oracle / (factor - 1) > MOST_RATE
    assert factor_for(oracle, load=1.1) == factor
    assert 3 * oracle / factor_for(oracle, load=3.0) <= MOST_RATE


def test_every_setup_is_run_once_in_each_place_with_all_its_modes() -> None:
    planned = curves(quick=False)
    every = list(steps(planned))
    assert len({(step.setup, step.where) for step in every}) == len(every)
    wanted = {(s.setup, s.where, mode.name) for curve in planned for s in curve.steps for mode in s.modes}
    assert wanted == {(step.setup, step.where, mode.name) for step in every for mode in step.modes}
    assert {mode.name for mode in FLEET_MODES} == {name for _, where, name in wanted if where == "fleet"}
    assert set(REGIMES.values()) <= {step.setup for step in every if step.where == "simulated"}


def test_what_is_measured_is_simulated_too() -> None:
    every = list(steps(curves(quick=False)))
    places = {where: {(s.setup, mode.name) for s in every if s.where == where for mode in s.modes}
              for where in ("fleet", "simulated")}  # fmt: skip
    assert places["fleet"] <= places["simulated"]


def test_quick_measures_the_headline() -> None:
    measured = [step for step in steps(curves(quick=True)) if step.where == "fleet" and not step.setup.load]
    assert sorted(step.setup.share for step in measured) == sorted(HEADLINE)
    for step in measured:
        assert {"relay", "full-any", "full-lane"} == {mode.name for mode in step.modes}


@pytest.mark.parametrize("timeout", [1.0, TIMEOUT_SLOS])
def test_a_simulated_ranking_has_the_timeout_of_its_setup(monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
    seen: list[Scenario] = []

    def run_group(scenario: Scenario, group: Group, within_ms: float) -> None:
        del group, within_ms
        seen.append(scenario)
        raise InterruptedError

    monkeypatch.setattr(simulated, "run_group", run_group)
    settings, costs = load_settings(["fleet"], {}).settings, costs_named("npu")
    blank = msgspec.structs.replace(outcome("relay", None), setup=Setup(load=0.5, timeout=timeout))
    with pytest.raises(InterruptedError):
        simulated.Simulation(blank, RELAY, Ground(costs, settings), 7, 340.0).run()
    assert seen[0].settings.client.timeout_ms == timeout * 6 * settings.relay.slo_ms


def test_a_setup_says_what_is_unusual_of_it() -> None:
    assert Setup().words == "1 × length, revisit 50%"
    assert Setup(share=2, hot=0.3, layers=0.5, timeout=1.0, load=0.8).words == (
        "2 × length, revisit 50%, 30% on one lane, 0.5 × layers, timeouts of 1 SLO, load 80%"
    )
    assert Setup().at(workers=2.0) == Setup(workers=2)


def test_anchors_keep_the_engines_own_settings_and_run_on_one_worker() -> None:
    of = {curve.name: {(step.setup.real, step.setup.workers) for step in curve.steps} for curve in curves(quick=False)}
    assert of.pop("anchors") == {(True, 1)}
    assert not any(real for some in of.values() for real, _ in some)
    settings = load_settings(["slo-quick"], {}).settings
    assert Setup(real=True).settings(settings) == settings != Setup().settings(settings)
    assert Setup(real=True).words == "1 × length, revisit 50%, the real engine"


def test_scaled_costs_follow_the_arithmetic_of_layers_and_width() -> None:
    costs = costs_named("npu")
    assert costs.scaled(1.0, 1.0) == costs
    twice = costs.scaled(2.0, 1.0)
    assert twice.full_ms(1408, 40) == pytest.approx(2 * costs.full_ms(1408, 40))
    assert twice.kv.layout().bytes_per_token == 2 * costs.kv.layout().bytes_per_token
    wide = costs.scaled(1.0, 2.0)
    assert wide.kv.layout().bytes_per_token == 2 * costs.kv.layout().bytes_per_token
    assert 2 < wide.full_ms(1408, 40) / costs.full_ms(1408, 40) < 4


def test_baselines_share_the_relays_processes() -> None:
    groups = dict(grouped(FLEET_MODES, Settings()))
    shared = next(modes for modes in groups.values() if any(mode.name == "relay" for mode in modes))
    assert {mode.name for mode in shared} == {"full-lane", "full-any", "cache", "relay", "relay-anywhere"}
    assert apply_mode(FLEET_MODES[0], Settings()) == Settings()


def test_times_of_serving_are_dilated_and_times_of_the_bus_are_not(tmp_path: Path) -> None:
    settings = Settings()
    slower = dilated(settings, 6.0)
    for section, names in DILATED.items():
        for name in names:
            assert getattr(getattr(slower, section), name) == 6.0 * getattr(getattr(settings, section), name)
    assert slower.kafka == settings.kafka
    assert slower.client.silence_ms == settings.client.silence_ms
    fleet = Fleet(costs_named("npu"), 6.0)
    made = fleet.settings(settings, tmp_path)
    assert made.model.factory == FACTORY
    assert costs_named(made.model.checkpoint) == costs_named("npu").dilated(6.0)
    again = load_settings([], {"relay.slo_ms": str(made.relay.slo_ms)}).settings
    assert again.relay.slo_ms == 300.0
    full = fleet.cost_model.full_ms(1408, 40)
    assert full == pytest.approx(6.0 * costs_named("npu").full_ms(1408, 40))


def test_the_times_over_which_is_averaged_are_dilated_for_the_run_alone() -> None:
    def found() -> tuple[float, dict[int, int], int]:
        lanes, share = LaneLoads(), BusyShare().update(500.0, 1.0)
        for at in range(0, 66, 6):
            lanes.note({0: 40 * at}, float(at))
        return share, lanes.levels, level_of(1.0)

    before = found()
    with stretched(10.0):
        assert found() == (before[0] / 10, {}, level_of(1.0))
        assert level_of(1.0) > before[2]
    assert found() == before
    assert before[0] == 0.5
    assert before[1]


def test_a_run_that_was_broken_off_goes_on_and_a_complete_one_begins_anew(tmp_path: Path) -> None:
    record = Record(tmp_path, {"seed": 1})
    record.add(outcome("relay", 10.0))
    with (tmp_path / RUN_FILES[0]).open("ab") as file:
        file.write(b'{"setup":{"sha')  # killed while it wrote
    again = Record(tmp_path, {"seed": 1})
    assert again.outcomes == record.outcomes
    assert again.find(Setup(), "relay", "fleet", 0) is not None
    assert again.find(Setup(), "relay", "fleet", 1) is None
    assert again.find(Setup(), "relay", "simulated") is None
    again.add(outcome("cache", 10.0))
    assert [one.mode for one in Record(tmp_path, {"seed": 1}).outcomes] == ["relay", "cache"]
    with pytest.raises(ConfigError, match="run of other conditions"):
        Record(tmp_path, {"seed": 2})
    again.finish()
    assert Record(tmp_path, {"seed": 2}).outcomes == []


def test_a_complete_run_can_be_reported_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to report"):
        Record(tmp_path, {"seed": 1}, only_read=True)
    record = Record(tmp_path, {"seed": 1})
    record.add(outcome("relay", 10.0))
    record.engine_costs.write_text("measured")
    record.finish()
    assert not Record(tmp_path, {"seed": 1}).engine_costs.exists(), "the next run measures the engine anew"
    for _ in range(2):
        again = Record(tmp_path, {"seed": 1}, only_read=True)
        assert again.outcomes == record.outcomes
        assert again.engine_costs.read_text() == "measured"
        again.finish()
    with pytest.raises(ConfigError, match="run of other conditions"):
        Record(tmp_path, {"seed": 2}, only_read=True)


def test_a_line_that_cannot_be_read_costs_its_own_outcome_alone(tmp_path: Path) -> None:
    record = Record(tmp_path, {"seed": 1})
    for mode in ("relay", "cache", "full-any"):
        record.add(outcome(mode, 10.0))
    file = tmp_path / RUN_FILES[0]
    first, *others = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first[:40] + b"\xff" + first[41:] + b"".join(others))
    damaged = file.read_bytes()
    for only_read in (True, False):
        again = Record(tmp_path, {"seed": 1}, only_read=only_read)
        assert ([one.mode for one in again.outcomes], again.unreadable) == (["cache", "full-any"], 1)
        assert file.read_bytes() == damaged, "reading changes nothing"


@pytest.mark.parametrize("only_read", [True, False])
def test_outcomes_of_another_release_are_refused_and_kept(tmp_path: Path, only_read: bool) -> None:
    record = Record(tmp_path, {"seed": 1})
    record.add(outcome("relay", 10.0))
    if only_read:
        record.finish()
    file = tmp_path / (COMPLETE_FILES if only_read else RUN_FILES)[0]
    other = file.read_bytes().replace(b'"settled"', b'"ended"')
    file.write_bytes(other)
    with pytest.raises(ConfigError, match=r"line 1, is of another release .*settled"):
        Record(tmp_path, {"seed": 1}, only_read=only_read)
    assert file.read_bytes() == other


def test_a_run_of_other_conditions_leaves_a_complete_one_readable(tmp_path: Path) -> None:
    record = Record(tmp_path, {"seed": 1})
    record.add(outcome("relay", 10.0))
    record.finish()
    mistaken = Record(tmp_path, {"seed": 2})
    assert Record(tmp_path, {"seed": 1}, only_read=True).outcomes == record.outcomes
    mistaken.add(outcome("relay", 20.0))
    with pytest.raises(ConfigError, match=f"remove {RUN_FILES[0]}"):
        Record(tmp_path, {"seed": 1}, only_read=True)
    (tmp_path / RUN_FILES[0]).unlink()
    assert Record(tmp_path, {"seed": 1}, only_read=True).outcomes == record.outcomes


def repeated(*rates: float | None) -> list[Outcome]:
    return [msgspec.structs.replace(outcome("relay", rate), repeat=number) for number, rate in enumerate(rates)]


def test_a_repeat_in_which_no_rate_passed_counts_as_zero() -> None:
    for rates, value, interval in (
        ((100.0, None, None), None, (0.0, 100.0)),
        ((100.0, None, 90.0), 90.0, (0.0, 100.0)),
        ((None, None), None, None),
    ):
        (point,) = points(repeated(*rates))
        assert (point.value, point.interval, point.settled) == (value, interval, True)
    (point,) = points([msgspec.structs.replace(one, settled=one.rate is not None) for one in repeated(100.0, None)])
    assert (point.value, point.settled) == (50.0, False), "of two lower bounds, 100 and 0"


def test_points_join_the_repeats() -> None:
    made = msgspec.structs.replace(outcome("relay", 12.0), repeat=1)
    (point,) = points([outcome("relay", 10.0), made])
    assert (point.value, point.interval) == (11.0, (10.0, 12.0))
    (single,) = points([made])
    assert single.interval == pytest.approx((12.0, 13.2))


def test_a_search_that_time_broke_off_is_no_whole_one() -> None:
    """It counted as known in every later run, and its lower bound as the value."""
    cell = Cell("rate", RELAY, 0.5, 512, 1.1, start=100.0)
    cell.begin_search([WORLD])
    assert not ended(cell)
    cell.record(probe(RELAY, 100.0, passed=True))
    assert not ended(cell)
    cell.record(probe(RELAY, 110.0, passed=False))
    assert ended(cell)
