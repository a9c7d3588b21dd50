"""The report of `bench paper` on made-up results: tables, charts, page."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from relaygr_lab.bench.modes import FLEET_MODES
from relaygr_lab.bench.results import Memory
from relaygr_lab.drawing import can_draw
from relaygr_lab.paper.measured import tiers_during
from relaygr_lab.paper.plan import Curve, Where, curves
from relaygr_lab.paper.results import Outcome, PaperReport
from relaygr_lab.report.blocks import Rows, page, render
from relaygr_lab.report.make import paper_report
from relaygr_lab.report.paper import (
    blocks,
    curve_rows,
    kinds_rows,
    modes_rows,
    parts_rows,
    table_rows,
)
from relaygr_lab.report.paper_charts import drawings

from relaygr_stream.telemetry.printable import render_plain
from relaygr_stream.workload.arrivals import ArrivalLog
from tests.unit.report.test_judge import PROBE, at_load, grid, outcome

#: Where, P99 in ms, and the share within the SLO.
PLACES_AT_80: list[tuple[Where, float, float]] = [("fleet", 18.6, 0.985), ("simulated", 7.4, 1.0)]


def page_of(report: PaperReport, planned: Sequence[Curve]) -> str:
    return page("relaygr bench paper", blocks(report, planned))


@pytest.mark.stack  # draws all charts
def test_a_report_can_be_read_again_and_its_page_stands_alone() -> None:
    outcomes = [*grid(300.0, 50.0), outcome("full-lane", None, 0.0, share=4.0), outcome("relay", 20.0, share=4.0)]
    planned = curves(quick=False)
    report = paper_report(outcomes, planned, {"words": {"machine": "made <up>"}}, ["a setup: no time"], 1.0)
    again = msgspec.json.decode(msgspec.json.encode(report), type=PaperReport)
    assert again.headline == report.headline
    assert not report.complete
    text = page_of(report, planned)
    assert "made &lt;up&gt;" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "<script" not in text
    shown = render_plain(render(blocks(report, curves(quick=False))), 200)
    assert "of what is possible" in shown and "· a setup: no time" in shown


def test_a_curve_has_a_chart_for_each_revisit_ratio() -> None:
    (curve,) = [one for one in curves(quick=False) if one.name == "length"]
    outcomes = [
        outcome("relay", 100.0 * revisit + share, where="simulated", share=share, revisit=revisit)
        for revisit in (0.0, 0.5)
        for share in (0.25, 1.0)
    ]
    report = paper_report(outcomes, (curve,), {"words": {}}, [], 1.0)
    drawn = {title: series[0].points for title, series, *_ in drawings(curve, report.curves["length"])}
    assert list(drawn)[:2] == [f"{curve.words}, {share}% returning" for share in (0, 50)]
    assert [(dot.x, dot.y) for dot in drawn[f"{curve.words}, 50% returning"]] == [(0.25, 50.25), (1.0, 51.0)]


def test_tables_show_fleet_and_simulation_beside_each_other() -> None:
    outcomes = [outcome("relay", 110.0), outcome("relay", 100.0, where="simulated"), outcome("cache", None)]
    outcomes += [outcome(mode, 50.0, where="simulated") for mode in ("relay-hbm", "relay-lru", "relay-whole")]
    report = paper_report(outcomes, curves(quick=True), {"words": {}}, [], 1.0)
    cache, relay = table_rows(report)
    assert cache[4] == "none"
    assert relay[4:8] == ("110", "110…121", "100", "+10%")
    assert relay[-1] == "3.0 / 8.0", "the bus, in real milliseconds"
    ((regime, oracle, full, *ablations),) = parts_rows(report)
    assert (regime, oracle, full) == ("usual (simulated)", "400", "100")
    assert ablations == ["", "", "50 (2.00×)", "50 (2.00×)", "50 (2.00×)"]


def test_the_real_engine_has_a_table_of_its_own() -> None:
    anchor = [outcome("relay", 30.0, real=True), outcome("relay", 25.0, where="simulated", real=True)]
    report = paper_report([*anchor, outcome("cache", 50.0)], curves(quick=False), {"words": {}}, [], 1.0)
    assert [row[0] for row in table_rows(report)] == ["cache"]
    ((mode, words, *_, differs, _, _, _),) = table_rows(report, real=True)
    assert (mode, words, differs) == ("relay", "1 × length, revisit 50%, the real engine", "+20%")
    assert "The real engine of this machine" in page_of(report, ())


def test_a_simulated_lower_bound_is_marked_and_compared_with_nothing() -> None:
    simulated = outcome("relay", 100.0, where="simulated")
    for found, shown in (
        (msgspec.structs.replace(simulated, settled=False), ("≥ 100", "")),
        (msgspec.structs.replace(simulated, settled=False, rate=None), ("< 110", "")),
        (msgspec.structs.replace(simulated, rate=None), ("< 110", "")),
        (msgspec.structs.replace(simulated, rate=None, failed=None), ("none", "")),
    ):
        report = paper_report([outcome("relay", 110.0), found], curves(quick=True), {"words": {}}, [], 1.0)
        assert [row[6:8] for row in table_rows(report)] == [shown]


@pytest.mark.skipif(not can_draw(), reason="needs matplotlib")
def test_a_range_from_zero_can_be_drawn() -> None:
    planned = curves(quick=True)
    seeds = [outcome("relay", rate, where="simulated") for rate in (100.0, None, 110.0)]
    report = paper_report(seeds, planned, {"words": {}}, [], 1.0)
    assert report.curves["length"][0][5:8] == [100.0, 0.0, 110.0]
    assert "<svg" in page_of(report, planned)


def test_outcomes_of_two_versions_of_the_code_are_told() -> None:
    mixed = [outcome("relay", 10.0), msgspec.structs.replace(outcome("cache", 10.0), code="another")]
    for outcomes, told in ((mixed, True), (mixed[:1], False)):
        report = paper_report(outcomes, curves(quick=True), {"words": {}}, [], 1.0)
        assert any("2 versions of the code" in remark for remark in report.remarks) is told


def test_a_value_beyond_the_oracle_is_told() -> None:
    report = paper_report([outcome("relay", 500.0, 400.0)], curves(quick=True), {"words": {}}, [], 1.0)
    assert any("beyond the oracle: relay (fleet) 500 of 400/s" in remark for remark in report.remarks)


def test_each_mode_tells_its_hits_decisions_and_use_of_devices_and_memory() -> None:
    def looked(mode: str, load: float) -> Outcome:
        made = outcome(mode, None, where="simulated", load=load)
        announced = 200 if mode.startswith("relay") else 0
        return msgspec.structs.replace(
            made, given=100.0, p99_ms=80.0, within=0.875, busy=0.75, announced=announced,
            tiers={"hbm": 31.5, "dram": 120.0}, outcomes={"hbm": 150, "dram": 20, "joined": 10, "full": 20},
            decisions={"over_load": 50, "admitted": 150} if announced else {},
        )  # fmt: skip

    outcomes = [looked(mode.name, load) for load in (0.8, 1.25) for mode in FLEET_MODES]
    outcomes += [msgspec.structs.replace(one, repeat=1, busy=0.85) for one in outcomes]
    report = paper_report(outcomes, curves(quick=False), {"words": {}}, [], 1.0)
    rows = modes_rows(report)
    assert [(row[0], row[1]) for row in rows] == [(mode.name, load) for load in ("80%", "125%") for mode in FLEET_MODES]
    relay = next(row for row in rows if row[0] == "relay")
    assert relay[2:] == (
        "simulated", "87.5%", "80.0", "90.0%: 75% ready, 10% reloaded, 5% joined", "admitted 75%, over_load 25%", "80%",
        "32", "120",
    )  # fmt: skip
    assert next(row for row in rows if row[0] == "full-any")[5:7] == ("", "")
    for text in (page_of(report, ()), render_plain(render(blocks(report, ())), 300)):
        assert "75% ready" in text
    again = msgspec.json.decode(msgspec.json.encode(report), type=PaperReport)
    assert again.points[0].tiers == {"hbm": 31.5, "dram": 120.0}


def test_memory_is_that_of_a_modes_own_probe() -> None:
    memory = [Memory(at, "relay-0", hbm << 30, 0, 4 << 30) for at, hbm in ((1.0, 9), (11.0, 2), (14.0, 3), (16.0, 9))]
    probe = msgspec.structs.replace(PROBE, started_s=10.0, seconds=5.0)
    assert tiers_during(probe, memory) == {"hbm": 3.0, "dram": 4.0}
    assert tiers_during(msgspec.structs.replace(probe, started_s=50.0), memory) == {}


def test_p99s_of_short_and_long_users_are_told_apart() -> None:
    made = msgspec.structs.replace(outcome("relay", 100.0, long=0.1), p99_short=12.0, p99_long=48.0)
    report = paper_report([made, outcome("relay", 50.0)], curves(quick=False), {"words": {}}, [], 1.0)
    assert [row[3:] for row in kinds_rows(report)] == [("100", "12.0", "48.0")]


def test_a_logs_arrivals_stand_beside_poisson_ones_in_a_table_alone() -> None:
    (curve,) = [
        one
        for one in curves(quick=True, arrivals=ArrivalLog("log.csv", np.arange(9.0), None))
        if one.name == "arrivals"
    ]
    both = [outcome("relay", 80.0, arrivals="log.csv"), outcome("relay", 100.0)]
    report = paper_report(both, (curve,), {"words": {}}, [], 1.0)
    heads, rows = curve_rows(curve, report.points)
    assert [(row[0].endswith("arrivals of log.csv"), row[heads.index("relay, measured")]) for row in rows] == [
        (False, "100"), (True, "80")
    ]  # fmt: skip
    assert "Arrivals of a log" in render_plain(render(blocks(report, (curve,))), 200)


def test_what_fleet_and_simulation_show_at_a_given_load_stands_in_one_row() -> None:
    (curve,) = [one for one in curves(quick=False) if one.name == "load"]
    both = [
        msgspec.structs.replace(outcome("relay", 10.0, where=where, load=0.8), given=10.0, p99_ms=ms, within=within)
        for where, ms, within in PLACES_AT_80
    ]
    report = paper_report([*both, outcome("relay", 110.0)], (curve,), {"words": {}}, [], 1.0)
    heads, (row,) = curve_rows(curve, report.points)
    assert [row[heads.index(head)] for head in ("relay, measured", "relay")] == ["18.6 (98%)", "7.4 (100%)"]


def test_a_curve_has_a_table_of_what_it_shows_simulated_and_measured() -> None:
    (curve,) = [one for one in curves(quick=False) if one.name == "workers"]
    some = [outcome("relay", 70.0, where="simulated", workers=1), outcome("relay", 71.0, workers=1),
            outcome("full-any", None, where="simulated", workers=2)]  # fmt: skip
    report = paper_report(some, (curve,), {"words": {}}, [], 1.0)
    heads, rows = curve_rows(curve, report.points)
    assert heads == ("", "full-any", "relay", "relay, measured")
    assert [row[1:] for row in rows] == [("", "70", "71"), ("none", "", "")]
    assert any("<td>71</td>" in block.html() for block in blocks(report, (curve,)) if isinstance(block, Rows))


def test_goodput_is_drawn_beside_what_the_oracle_could_serve_of_the_load() -> None:
    (curve,) = [one for one in curves(quick=True) if one.name == "goodput"]
    some = [at_load(1.0, 0.95), at_load(3.0, 0.3), at_load(1.0, 0.2, mode="cache"), at_load(2.0, 0.5, "fleet")]
    report = paper_report(some, (curve,), {"words": {}}, [], 1.0)
    ((_, series, _, y, _),) = drawings(curve, report.curves["goodput"])
    drawn = {one.name: [(dot.x, dot.y) for dot in one.points] for one in series}
    assert drawn["relay"] == [(1.0, 380.0), (3.0, pytest.approx(360.0))]
    assert drawn["relay, oracle"] == [(1.0, 400.0), (3.0, 400.0), (2.0, 400.0)]
    assert (drawn["cache"], drawn["relay, measured"]) == ([(1.0, 80.0)], [(2.0, 400.0)])
    assert y.words == "scores within the SLO, 1/s"
    heads, rows = curve_rows(curve, report.points)
    assert heads == ("", "full-lane", "full-any", "cache", "relay", "relay, measured")
    assert rows[0][3:] == ("80 of 400", "380 of 400", "")


def test_nothing_in_dram_is_drawn_as_zero() -> None:
    (curve,) = [one for one in curves(quick=False) if one.name == "dram_gib"]
    signals = {"signals": 100, "signal_hbm": 20, "signal_dram": 0, "signal_extended": 0, "signal_computed": 80}
    setups = [step.setup for step in curve.steps]
    found = [msgspec.structs.replace(outcome("relay", 10.0, where="simulated"), setup=setup, signals=signals)
             for setup in setups[:2]]  # fmt: skip
    report = paper_report(found, (curve,), {"words": {}}, [], 1.0)
    ((_, series, *_),) = drawings(curve, report.curves[curve.name])
    of_dram = next(one for one in series if one.name == "relay, of DRAM")
    assert [(dot.x, dot.y) for dot in of_dram.points] == [(0, 0.0), (8, 0.0)]


def test_lengths_are_drawn_against_rates_too_and_regimes_without_an_order_are_not() -> None:
    planned = curves(quick=True)
    outcomes = [outcome("relay", 100.0 / share, where="simulated", share=share) for share in (0.5, 1.0)]
    report = paper_report(outcomes, planned, {"words": {}}, [], 1.0)
    drawn = {
        title: (series, x) for curve in planned for title, series, x, *_ in drawings(curve, report.curves[curve.name])
    }
    assert list(drawn) == [
        "Throughput within the SLO against length, 50% returning",
        "Length against throughput within the SLO, 50% returning",
    ]
    series, axis = drawn["Length against throughput within the SLO, 50% returning"]
    assert [(dot.x, dot.y) for dot in series[0].points] == [(200.0, 0.5), (100.0, 1.0)]
    assert axis.words.startswith("requests/s")
