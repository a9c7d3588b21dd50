from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from relaygr_lab.bench.cells import Cell
from relaygr_lab.bench.modes import FULL, RELAY, Mode
from relaygr_lab.bench.results import DEVICE_WORK, STAGES, SloReport, Spread
from relaygr_lab.report import slo_charts, slo_readings
from relaygr_lab.report.judge import below, judge_slo
from relaygr_lab.report.slo import ratio_text, value_text
from relaygr_lab.report.slo_charts import given_text

from tests.unit.bench.reports import BUS, WORLD, cell, length_cell, probe, repeated, report

SLOW_BUS = BUS | {"both": Spread(5.0, 12.0), "in": Spread(2.0, 8.0)}


def test_ratios_are_to_what_full_inference_reached() -> None:
    rate, length = slo_readings.ratios(
        [cell(FULL, 10.0, 11.5), cell(RELAY, 30.0, 34.0), length_cell(10.0, 1536, 1760)], [WORLD]
    )
    assert (rate.value, length.value) == (3.0, 3.0)
    assert rate.work == pytest.approx(1.0)
    assert rate.bound == pytest.approx(1e3 / WORLD.cost(512, 0.0).full / 10.0)


def test_the_bound_is_the_device_at_its_best() -> None:
    slow = replace(WORLD, costs=msgspec.structs.replace(WORLD.costs, c1=3 * WORLD.costs.c1))
    cells = [cell(FULL, 10.0, 11.5), cell(RELAY, 30.0, 34.0)]
    (alone,), (beside,) = slo_readings.ratios(cells, [WORLD]), slo_readings.ratios(cells, [WORLD, slow])
    assert beside.bound == alone.bound > slo_readings.ratios(cells, [slow])[0].bound


def test_the_queue_is_one_that_a_bit_more_would_overflow_by_middling_costs() -> None:
    slow = replace(WORLD, costs=msgspec.structs.replace(WORLD.costs, c1=3 * WORLD.costs.c1))
    quick = replace(WORLD, costs=msgspec.structs.replace(WORLD.costs, c1=WORLD.costs.c1 / 3))
    cells = [cell(FULL, 10.0, 11.5), cell(RELAY, 30.0, 34.0, revisit=0.5), length_cell(10.0, 1536, 1760)]
    for one, mixed in zip(
        slo_readings.ratios(cells, [WORLD]), slo_readings.ratios(cells, [quick, WORLD, slow]), strict=True
    ):
        assert mixed.queue == one.queue
        assert 1.0 < one.queue < one.bound


@pytest.mark.parametrize(("slowest", "said"), [("queued", "waits for each other"), ("inbound", "waits beside it")])
def test_an_idle_device_is_no_excuse_for_its_queue(slowest: str, said: str) -> None:
    stages = {name: 5.0 + 30 * (name == slowest) for name in STAGES}
    idle = probe(RELAY, 3.0, passed=False, slow_stages=stages, device_ms_per_s=dict.fromkeys(DEVICE_WORK, 100.0))
    [line] = [line for line in slo_readings.explain(idle) if "busy only 30%" in line]
    assert said in line


def test_without_a_baseline_there_is_no_ratio_and_that_is_said() -> None:
    nothing = Cell("rate", FULL, 0.0, 512, 1.2)
    assert slo_readings.ratios([nothing, cell(RELAY, 30.0, 34.0)], [WORLD]) == []
    [line] = below(report([nothing, cell(RELAY, 30.0, 34.0)]).verdicts)
    assert "no rate kept the SLO" in line


def test_what_is_reached_is_told_beside_what_is_possible_with_stage_and_bounds() -> None:
    [line] = below(report([cell(FULL, 20.0, 23.0), cell(RELAY, 30.0, 34.0)]).verdicts)
    assert "1.50 of the 2.67 that a queue of Poisson arrivals" in line
    assert "capacity arithmetic allows" in line
    assert "waits for the device 35 ms" in line
    assert "did not admit 10% (over_load)" in line
    assert "100% of the slowest came while theirs was being computed" in line
    assert "busy 90%" in line


def test_a_machine_that_stood_still_is_named() -> None:
    [why] = [
        line for line in slo_readings.explain(probe(RELAY, 3.0, passed=False, stalled_ms=180.0)) if "still" in line
    ]
    assert why == "the machine stood still: a process that only slept woke 180 ms late"
    assert not [
        line for line in slo_readings.explain(probe(RELAY, 3.0, passed=False, stalled_ms=9.0)) if "still" in line
    ]


def test_each_repeat_searches_lengths_at_the_rate_that_full_inference_carries_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slo_charts, "line_chart", lambda *_: "")
    full = Cell("rate", FULL, 0.0, 512, 1.2)
    longer = Cell("length", RELAY, 0.5, None, 1.2)
    for rate, length in ((20.0, 640), (8.0, 2048), (10.0, 1536)):
        full.begin_search([WORLD])
        full.record(probe(FULL, rate, passed=True))
        longer.at = rate
        longer.begin_search([WORLD])
        longer.record(probe(RELAY, rate, passed=True, length=length, revisit=0.5))
    ratio = slo_readings.ratios([full, longer], [WORLD])[0]
    assert (ratio.low, ratio.value, ratio.high) == (640 / 512, 1536 / 512, 2048 / 512)
    assert ratio.bound == longer.bound(WORLD, 10.0) / 512
    one = slo_readings.found(longer, [WORLD])
    assert given_text(one, "/s") == "10.0/s (8.0…20.0)"
    assert one.requests == 300
    charts = {title: words for title, words, _ in slo_charts.p99(report([full, longer]))}
    assert charts["Against length"] == "10.0 requests/s (8.0…20.0), 50% returning users"


def test_a_ratio_beyond_its_bound_is_called_a_defect() -> None:
    cells = [cell(FULL, 10.0, 11.5), cell(RELAY, 200.0, 230.0)]
    assert any("is a defect of this bench" in line for line in below(report(cells).verdicts))


def test_where_all_is_reached_nothing_is_below() -> None:
    assert {one.state for one in report([cell(FULL, 10.0, 11.5), cell(RELAY, 50.0, 56.0)]).verdicts} == {"reached"}


@pytest.mark.parametrize(
    ("bus", "hits", "words"),
    [
        (SLOW_BUS, (100, 100), "P99: 12.0 ms"),
        (SLOW_BUS, (100, 100), "8.0 ms from publish to the worker's read, 4.0 ms back"),
        (SLOW_BUS, (100, 100), "waking its threads alone takes 3.0 ms"),
        (BUS, (100, 98), "98 of 100 (98.0%)"),
    ],
)
def test_bus_and_hits_are_judged(bus: dict[str, Spread], hits: tuple[int, int], words: str) -> None:
    [line] = below(judge_slo([], [], bus, dict(zip(("admitted", "hit"), hits, strict=True))))
    assert words in line


@pytest.mark.parametrize(("busy", "said"), [(0.9, True), (0.3, False), (None, False)])
def test_cores_that_everyone_waits_for_are_named(busy: float | None, said: bool) -> None:
    lines = list(slo_readings.explain(probe(RELAY, 3.0, passed=False, cores_busy=busy)))
    assert any("cores were busy 90%" in line for line in lines) is said


def test_a_relay_that_passed_nowhere_is_below() -> None:
    failing = Cell("rate", RELAY, 0.0, 512, 1.2)
    failing.begin_search([WORLD])
    failing.record(probe(RELAY, 3.0, passed=False))
    lines = below(report([cell(FULL, 10.0, 11.5), failing]).verdicts)
    assert any("no value found" in line for line in lines)


def test_a_repeat_in_which_nothing_passed_counts_as_zero() -> None:
    relay = repeated(RELAY, 72.0, None, None)
    made = report([repeated(FULL, 20.0, 20.0, 20.0), relay])
    assert relay.settled
    assert [(one.value, one.low, one.high) for one in made.ratios] == [(None, 0.0, 3.6)]
    assert [value_text(one) for one in made.found] == ["20.0/s (20.0…20.0)", "none (0.0…72.0)"]
    assert ratio_text(made.ratios[0]) == "– (0.00…3.60)"
    assert any("no value found of the 2.67" in line for line in below(made.verdicts))
    made = report([repeated(FULL, 20.0, None, None), relay])
    assert made.ratios == []
    assert any("no rate kept the SLO" in line for line in below(made.verdicts))
    [ratio] = slo_readings.ratios([repeated(FULL, 20.0, 20.0, None), repeated(RELAY, 40.0, 40.0, 40.0)], [WORLD])
    assert ratio_text(ratio) == "2.00 (2.00…)", "a repeat of full inference carried nothing"


def test_a_search_without_a_probe_is_no_repeat() -> None:
    one = cell(RELAY, 30.0, 34.0)
    one.begin_search([WORLD])
    assert (one.values, one.settled) == ([30.0], False)


@pytest.mark.parametrize(
    ("relay", "unsettled", "text", "state"),
    [
        (50.0, [], "5.00", "reached"),
        (15.0, [], "1.50", "below"),
        (50.0, [FULL], "≤ 5.00", "not measured"),
        (15.0, [FULL], "≤ 1.50", "below"),
        (50.0, [RELAY], "≥ 5.00", "reached"),
        (15.0, [RELAY], "≥ 1.50", "not measured"),
        (50.0, [FULL, RELAY], "? 5.00", "not measured"),
    ],
)
def test_a_bound_is_judged_only_where_it_tells(relay: float, unsettled: list[Mode], text: str, state: str) -> None:
    cells = [cell(FULL, 10.0, 11.5), cell(RELAY, relay, 1.1 * relay)]
    for one in cells:
        if one.mode in unsettled:
            one.searches[0].failed = None
    made = report(cells)
    [ratio] = made.ratios
    [verdict] = [one for one in made.verdicts if one.what.startswith("throughput of relay at revisit 0%")]
    assert (ratio_text(ratio), verdict.state) == (text, state)
    assert bool(below(made.verdicts)) is (state == "below")
    assert verdict.found.startswith(f"{text} of the 5.33 ")
    names = ", ".join(mode.name for mode in (RELAY, FULL) if mode in unsettled)
    assert (f"not known, unsettled: {names}" in verdict.found) is (state == "not measured")


def test_a_length_found_at_full_inferences_rate_is_bounded_by_it() -> None:
    full = cell(FULL, 10.0, 11.5)
    full.searches[0].failed = None
    [ratio] = slo_readings.ratios([full, length_cell(10.0, 1536, 1760)], [WORLD])
    assert ratio.mark == "≤ "


def test_what_failed_at_the_value_found_or_below_it_in_another_repeat_counts() -> None:
    one = repeated(RELAY, 10.0, 8.0, 12.0)
    one.record(probe(RELAY, 10.0, passed=False, bad=40, repeat=2))
    found = slo_readings.found(one, [WORLD])
    assert (found.value, found.requests, found.bad) == (10.0, 400, 40)
    assert [(each.rate, each.passed) for each in slo_readings.up_to_found(one)] == [
        (10.0, True), (8.0, True), (1.1 * 8.0, False), (10.0, False)
    ]  # fmt: skip
    assert slo_readings.up_to_found(repeated(RELAY, None)) == []


def test_the_report_survives_its_json() -> None:
    made = report()
    assert msgspec.json.decode(msgspec.json.encode(made), type=SloReport) == made


def test_pooled_requests_give_the_interval() -> None:
    one = slo_readings.found(cell(FULL, 10.0, 11.5), [WORLD])
    assert (one.requests, one.bad) == (100, 0)
    assert one.bad_share[1] == pytest.approx(0.0362, abs=1e-3)
    assert one.settled
