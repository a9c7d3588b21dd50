from __future__ import annotations

from dataclasses import replace

import pytest
from relaygr_lab.demo.report import DemoResult, render_table, unjudged, verdict
from rich.console import Console

from relaygr_stream.telemetry.printable import render_plain
from relaygr_stream.wire.messages import Outcome
from relaygr_stream.workload.metrics import Quality

COUNTS: dict[Outcome, int] = {"hbm": 800, "dram": 150, "joined": 20, "full": 30}
GOOD = DemoResult(
    relay_ms=[float(ms) for ms in range(1, 1001)],
    outcomes=[outcome for outcome, count in COUNTS.items() for _ in range(count)],
    full_ms=[4.0 * ms for ms in range(1, 1001)],
    requests=1000,
    announced=1000,
    answered=1000,
    admitted=1000,
    admitted_hits=970,
    audits=10,
    audit_deviation=2e-7,
    compared=1000,
    deviation=3e-7,
    model="HSTU, random weights (seed 7)",
    broker="embedded",
    device="cpu",
    wall_s=60.0,
    processes={"worker-1": 0, "worker-2": 0, "trigger": 0},
)


def test_a_run_that_kept_its_promises_has_no_faults() -> None:
    assert verdict(GOOD) == []
    assert verdict(replace(GOOD, audit_deviation=1e-5, deviation=1e-5, admitted_hits=950)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"answered": 998, "errors": {"DeadlineExceeded": 2}}, "2 of 1000 requests got no scores (2 DeadlineExceeded)"),
        ({"answered": 999}, "1 of 1000 requests got no scores (without an error)"),
        ({"requests": 0, "answered": 0}, "no request was sent"),
        ({"audits": 0}, "no worker audited a score; raise worker.audit_share or run longer"),
        ({"audit_deviation": 1.1e-5}, "an audited score deviates from full inference by 1.1e-05 (limit 1e-05)"),
        ({"audit_deviation": float("nan")}, "an audited score deviates from full inference by nan (limit 1e-05)"),
        ({"deviation": 0.5}, "a relayed score deviates from full inference by 0.5 (limit 1e-05)"),
        ({"compared": 0}, "no request was scored both ways by the client, so nothing was compared"),
        ({"admitted": 0, "admitted_hits": 0}, "the trigger admitted no request"),
        (
            {"admitted_hits": 949},
            "949 of 1000 admitted requests (94.9%) were answered from a prefix hit; at least 95% should be",
        ),
        ({"processes": {"worker-1": -9, "worker-2": 0}}, "worker-1 ended with exit code -9"),
        ({"processes": {"worker-1": None}}, "worker-1 did not stop on SIGTERM"),
    ],
)
def test_each_fault_is_named(changes: dict[str, object], said: str) -> None:
    result = replace(GOOD, **changes)  # type: ignore[arg-type]
    assert verdict(result) == [said]
    assert said in " ".join(render_plain(render_table(result)).split())


def short(announced: int, hits: int, **changes: object) -> DemoResult:
    """A run of few requests, all admitted, so many of them hits; 5 % of the hits are audited."""
    few: dict[str, object] = {
        "requests": 3 * announced, "answered": 3 * announced, "announced": announced, "admitted": announced,
        "admitted_hits": hits, "compared": announced, "audit_share": 0.05, "audits": 0,
        "outcomes": ["hbm"] * hits + ["full"] * (announced - hits), "admissions": {"admitted": announced},
    }  # fmt: skip
    return replace(GOOD, **(few | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (short(24, 24), ["audited"]),  # 29 % of such runs have none
        (short(5, 4), ["audited", "80.0%"]),
        (short(60, 56), ["audited", "93.3%"]),
        (short(1, 0), ["audited", "0.0%"]),
        (short(24, 19, admitted=0, admitted_hits=0, admissions={"delegated": 24}, audits=1), ["admitted no request"]),
        (short(1, 0, admitted=0, admitted_hits=0, admissions={"": 1}, audits=1), ["admitted no request"]),
        (short(300, 0, admitted=300, admitted_hits=300, audit_share=0.0), ["audited"]),  # no hits, or none to audit
    ],
)
def test_what_few_requests_cannot_tell_is_said_and_no_fault(result: DemoResult, said: list[str]) -> None:
    assert verdict(result) == []
    assert len(found := unjudged(result)) == len(said)
    assert all(text in one for one, text in zip(found, said, strict=True))
    text = " ".join(render_plain(render_table(result)).split())
    assert "✓ every request answered" in text
    assert f"not judged, too few requests: {found[0]}" in text


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (short(90, 90), "no worker audited a score"),  # 1 % of such runs have none
        (short(24, 19, audits=1), "19 of 24 admitted requests"),
        (short(2, 0, audits=1), "0 of 2 admitted requests"),
        (short(24, 0, admitted=0, admitted_hits=0, admissions={"": 24}, audits=1), "the trigger admitted no request"),
        (short(24, 24, audits=1, answered=71), "1 of 72 requests got no scores"),
        (short(24, 24, audits=1, deviation=1e-4), "a relayed score deviates"),
    ],
)
def test_what_no_good_run_shows_is_a_fault_of_a_short_one_too(result: DemoResult, said: str) -> None:
    assert len(verdict(result)) == 1
    assert said in verdict(result)[0]


def test_the_table_has_quantiles_and_their_ratio() -> None:
    cells = [line.replace("│", " ").split() for line in render_plain(render_table(GOOD)).splitlines()]
    assert ["P50", "500.0", "2,000.0", "4.00×"] in cells
    assert ["P99.9", "999.0", "3,996.0", "4.00×"] in cells
    assert ["dram", "150", "15.0%", "in", "DRAM,", "reloaded"] in cells
    assert ["prefix", "hits", "970", "97.0%", "of", "those", "admitted"] in cells
    assert "✓ every request answered, relayed scores equal full inference" in render_plain(render_table(GOOD))


def test_hits_are_stated_of_the_admitted_and_of_all_announced_by_what_they_were() -> None:
    some = replace(GOOD, admitted=500, admitted_hits=480, admitted_found={"hbm": 400, "dram": 75, "joined": 5})
    text = " ".join(render_plain(render_table(some)).replace("│", " ").split())
    assert "prefix hits 480 96.0% of those admitted: 400 ready, 75 reloaded, 5 joined" in text
    assert "announced hits 970 97.0% of all announced: 800 ready, 150 reloaded, 20 joined" in text


def test_what_the_trigger_decided_of_rankings_is_one_row() -> None:
    some = replace(GOOD, admissions={"over_load": 100, "admitted": 899, "": 1})
    text = " ".join(render_plain(render_table(some)).replace("│", " ").split())
    assert "admission admitted 899, over_load 100, unknown 1 admitted" in text


def test_hit_rates_stand_beside_chance() -> None:
    ranked = replace(GOOD, quality={"relay": Quality(0.75, 0.4), "chance": Quality(0.1, 0.045)})
    cells = [line.replace("│", " ").split() for line in render_plain(render_table(ranked)).splitlines()]
    assert ["relay", "75.0%", "0.400"] in cells
    assert ["chance", "10.0%", "0.045"] in cells
    assert "ranked by" not in render_plain(render_table(GOOD))


def test_a_quantile_that_the_sample_cannot_tell_is_left_out() -> None:
    few = replace(GOOD, relay_ms=[1.0] * 99, full_ms=[2.0] * 99, outcomes=["hbm"] * 99)
    text = render_plain(render_table(few))
    assert "P90" in text
    assert "P99" not in text


def test_a_run_with_nothing_in_it_can_still_be_told() -> None:
    nothing = replace(
        GOOD,
        relay_ms=[],
        full_ms=[],
        outcomes=[],
        requests=0,
        announced=0,
        answered=0,
        admitted=0,
        admitted_hits=0,
        compared=0,
    )
    assert "no request was sent" in render_plain(render_table(nothing))


def test_the_text_has_no_colour_codes_and_fits_its_width() -> None:
    text = render_plain(render_table(GOOD), 80)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_terminal_gets_the_same_table() -> None:
    console = Console(width=100, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(render_table(GOOD))
    assert "4.00×" in captured.get()
