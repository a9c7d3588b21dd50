"""The judge of `bench paper` on made-up results."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from relaygr_stream.lab.bench.results import Probe
from relaygr_stream.lab.paper.judge import headline, judge
from relaygr_stream.lab.paper.plan import HEADLINE, REVISITS, Setup, curves
from relaygr_stream.lab.paper.report import as_json, make_report, page, render
from relaygr_stream.lab.paper.results import Outcome, PaperReport, Verdict, points

PROBE = Probe(
    mode="relay",
    revisit=0.5,
    length=1408,
    rate=50.0,
    repeat=0,
    started_s=0.0,
    seconds=5.0,
    requests=100,
    bad=0,
    cut_short=False,
    p50=100.0,
    p99=250.0,
    stages={},
    stage_means={},
    slow_stages={},
    slow_outcomes={},
    errors={},
    outcomes={"hbm": 95, "dram": 2, "joined": 2, "full": 1},
    announced=100,
    admitted=99,
    admitted_hits=99,
    decisions={},
    others_cores=0.0,
    device_ms_per_s={},
)


def outcome(mode: str, rate: float | None, oracle: float = 400.0, **setup: Any) -> Outcome:
    return Outcome(
        setup=Setup(**setup),
        mode=mode,
        repeat=0,
        length=1408,
        factor=6.0,
        rate=rate,
        failed=None if rate is None else 1.2 * rate,
        settled=True,
        oracle=oracle,
        probes=[msgspec.structs.replace(PROBE, mode=mode)],
        bus_ms=[3.0, 8.0],
    )


def grid(relay: float, lane: float, cache: float = 200.0) -> list[Outcome]:
    found = [outcome("full-lane", lane, share=share) for share in HEADLINE]
    found += [outcome("full-any", 2 * lane, share=share) for share in HEADLINE]
    found += [outcome("cache", cache, share=share) for share in HEADLINE]
    return found + [outcome("relay", relay, share=s, revisit=r) for s in HEADLINE for r in REVISITS]


def verdict(outcomes: list[Outcome], words: str) -> Verdict:
    (found,) = [one for one in judge(points(outcomes), outcomes) if words in one.target]
    return found


@pytest.mark.parametrize(("relay", "state"), [(340.0, "met"), (339.0, "missed")])
def test_the_relay_is_judged_against_the_oracle(relay: float, state: str) -> None:
    assert verdict(grid(relay, 50.0), "oracle's throughput at revisit 50%").state == state


@pytest.mark.parametrize(
    ("relay", "lane", "state"), [(360.0, 80.0, "met"), (350.0, 80.0, "missed"), (350.0, 100.0, "not allowed")]
)
def test_a_ratio_is_missed_only_where_the_oracle_allows_it(relay: float, lane: float, state: str) -> None:
    assert verdict(grid(relay, lane), "4.5 × full-lane at revisit 50%").state == state


def test_full_inference_of_one_revisit_ratio_serves_all() -> None:
    assert verdict(grid(360.0, 40.0), "8 × full-lane at revisit 90%").state == "met"


def test_the_headline_needs_all_four_lengths() -> None:
    outcomes = grid(300.0, 50.0)
    assert headline(points(outcomes), 0.5)["full-lane"] == pytest.approx([6.0, 6.0, 6.0])
    fewer = [one for one in outcomes if not (one.mode == "full-lane" and one.setup.share == 0.75)]
    assert "full-lane" not in headline(points(fewer), 0.5)
    uneven = [*fewer, outcome("full-lane", 300.0 / 16, share=0.75)]
    assert headline(points(uneven), 0.5)["full-lane"] == pytest.approx([(6 * 6 * 6 * 16) ** 0.25, 6.0, 16.0])


def test_a_baseline_whose_search_was_broken_off_gives_no_ratio_and_such_a_relay_a_lower_bound() -> None:
    outcomes = grid(360.0, 80.0)
    broken = [msgspec.structs.replace(one, settled=one.mode != "full-lane") for one in outcomes]
    assert verdict(broken, "4.5 × full-lane at revisit 50%").state == "not measured"
    assert "full-lane" not in headline(points(broken), 0.5)
    low = [msgspec.structs.replace(one, settled=one.mode != "relay") for one in grid(300.0, 50.0)]
    assert verdict(low, "oracle's throughput at revisit 50%").state == "not measured"
    high = [msgspec.structs.replace(one, settled=one.mode != "relay") for one in grid(350.0, 50.0)]
    assert verdict(high, "oracle's throughput at revisit 50%").state == "met"


def test_an_ablation_that_is_ahead_is_a_miss() -> None:
    behind = [*grid(300.0, 50.0), outcome("relay-hbm", 250.0)]
    assert verdict(behind, "ahead of relay-hbm").state == "met"
    ahead = [*grid(300.0, 50.0), outcome("relay-hbm", 310.0)]
    assert verdict(ahead, "ahead of relay-hbm").state == "missed"
    assert verdict(ahead, "ahead of relay-whole").state == "not measured"


def test_hits_and_bus_are_judged() -> None:
    outcomes = grid(340.0, 50.0)
    assert verdict(outcomes, "hits over all announced").state == "met"
    assert verdict(outcomes, "the bus").state == "met"
    worse = msgspec.structs.replace(PROBE, outcomes={"hbm": 90, "full": 10}, admitted_hits=95)
    bad = [msgspec.structs.replace(one, probes=[worse], bus_ms=[3.0, 12.0]) for one in outcomes]
    for words in ("hits over all announced", "hits over all admitted", "the bus"):
        assert verdict(bad, words).state == "missed"
    slow = [msgspec.structs.replace(one, factor=60.0) for one in bad]
    assert verdict(slow, "the bus").state == "not measured"


def test_nothing_measured_is_no_miss() -> None:
    assert {one.state for one in judge([], [])} == {"not measured"}


def test_a_report_can_be_read_again_and_its_page_stands_alone() -> None:
    outcomes = [*grid(300.0, 50.0), outcome("full-lane", None, 0.0, share=4.0), outcome("relay", 20.0, share=4.0)]
    planned = curves(quick=False)
    report = make_report(outcomes, planned, {"words": {"machine": "made <up>"}}, ["a setup: no time"], 1.0)
    again = msgspec.json.decode(as_json(report), type=PaperReport)
    assert again.headline == report.headline
    assert not report.complete
    text = page(report, planned)
    assert "made &lt;up&gt;" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "<script" not in text
    assert render(report) is not None


def test_where_the_relay_gains_nothing_the_report_says_so() -> None:
    report = make_report([*grid(100.0, 100.0)], curves(quick=True), {"words": {}}, [], 1.0)
    assert any("no gain: full-any carried 200/s and relay 100/s" in remark for remark in report.remarks)
