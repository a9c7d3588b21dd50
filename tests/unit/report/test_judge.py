"""The judge of `bench paper` on made-up results."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from relaygr_lab.bench.results import Probe, Verdict
from relaygr_lab.paper.plan import MANY, REVISITS, Where, curves
from relaygr_lab.paper.results import Headline, Outcome, points
from relaygr_lab.paper.setup import GRID, HEADLINE, Setup, factor_for
from relaygr_lab.report.judge import judge_paper
from relaygr_lab.report.make import paper_report
from relaygr_lab.report.paper import headline_rows
from relaygr_lab.report.paper_readings import differences, headline, length_at

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
    cores_busy=0.4,
    device_late=0.01,
)


def outcome(mode: str, rate: float | None, oracle: float = 400.0, where: Where = "fleet", **setup: Any) -> Outcome:
    return Outcome(
        setup=Setup(**setup),
        mode=mode,
        where=where,
        repeat=0,
        length=1408,
        factor=6.0,
        rate=rate,
        failed=None if rate is None else 1.1 * rate,
        settled=True,
        oracle=oracle,
        probes=[msgspec.structs.replace(PROBE, mode=mode)] if where == "fleet" else [],
        bus_ms=[3.0, 8.0] if where == "fleet" else [],
    )


def grid(relay: float, lane: float, cache: float = 200.0) -> list[Outcome]:
    found = [outcome("full-lane", lane, share=share) for share in HEADLINE]
    found += [outcome("full-any", 2 * lane, share=share) for share in HEADLINE]
    found += [outcome("cache", cache, share=share) for share in HEADLINE]
    return found + [outcome("relay", relay, share=s, revisit=r) for s in HEADLINE for r in REVISITS]


def lead(outcomes: list[Outcome], baseline: str) -> Headline | None:
    return next((one for one in headline(points(outcomes), 0.5) if one.baseline == baseline), None)


def verdict(outcomes: list[Outcome], words: str) -> Verdict:
    (found,) = [one for one in judge_paper(points(outcomes), outcomes) if words in one.what]
    return found


@pytest.mark.parametrize(("relay", "state"), [(340.0, "reached"), (339.0, "below")])
def test_the_relay_is_judged_against_the_oracle(relay: float, state: str) -> None:
    assert verdict(grid(relay, 50.0), "throughput at revisit 50%").state == state


def test_throughput_is_told_against_full_inference_too_which_one_revisit_ratio_has_measured() -> None:
    found = verdict(grid(360.0, 40.0), "throughput at revisit 90%")
    assert found.found.count("0.90 at ") == 4
    assert found.found.startswith("fleet: 0.90 at 0.25× (9.0 of 10.0 ×)")


def test_the_headline_needs_all_four_lengths() -> None:
    outcomes = grid(300.0, 50.0)
    assert lead(outcomes, "full-lane") == Headline(baseline="full-lane", where="fleet", mean=6.0, least=6.0, most=6.0)
    fewer = [one for one in outcomes if not (one.mode == "full-lane" and one.setup.share == 0.75)]
    assert lead(fewer, "full-lane") is None
    # Another place's value does not fill the gap.
    assert lead([*fewer, outcome("full-lane", 50.0, share=0.75, where="simulated")], "full-lane") is None
    uneven = lead([*fewer, outcome("full-lane", 300.0 / 16, share=0.75)], "full-lane")
    assert uneven is not None
    assert (uneven.mean, uneven.least, uneven.most) == pytest.approx(((6 * 6 * 6 * 16) ** 0.25, 6.0, 16.0))


def test_a_baseline_whose_search_was_broken_off_gives_no_ratio_and_such_a_relay_a_lower_bound() -> None:
    outcomes = grid(360.0, 80.0)
    broken = [msgspec.structs.replace(one, settled=one.mode != "full-lane") for one in outcomes]
    assert verdict(broken, "throughput at revisit 50%").found.startswith("fleet: 0.90 at 0.25×, ")
    assert lead(broken, "full-lane") is None
    low = [bound(one) for one in grid(300.0, 50.0)]
    assert verdict(low, "throughput at revisit 50%").state == "not measured"
    assert verdict(low, "throughput at revisit 50%").found.count("≥ 0.75") == 4
    high = [bound(one) for one in grid(350.0, 50.0)]
    assert verdict(high, "throughput at revisit 50%").state == "reached"
    known = lead(high, "full-lane")
    assert known is not None
    assert known.bound
    report = paper_report(high, curves(quick=True), {"words": {}}, [], 1.0)
    assert any(row[2].startswith("≥ ") for row in headline_rows(report))


def bound(one: Outcome) -> Outcome:
    """The same, where the relay's rate is a lower bound."""
    return msgspec.structs.replace(one, settled=one.mode != "relay", failed=None)


def test_the_relay_is_ahead_of_an_ablation_wherever_that_part_can_gain() -> None:
    behind = [*grid(300.0, 50.0), outcome("relay-hbm", 250.0)]
    assert verdict(behind, "relay ÷ relay-hbm").state == "reached"
    alike = [*grid(300.0, 50.0), outcome("relay-hbm", 310.0), outcome("relay-undelegated", 300.0)]
    assert verdict(alike, "relay ÷ relay-hbm").state == "reached", (
        "all prefix KV are in HBM, within a search's tolerance"
    )
    assert verdict(alike, "relay ÷ relay-undelegated").state == "below"
    many = [outcome("relay", 300.0, known=MANY), outcome("relay-hbm", 300.0, known=MANY)]
    assert verdict(many, "relay ÷ relay-hbm").state == "below"
    ahead = [*grid(300.0, 50.0), outcome("relay-hbm", 330.0)]
    assert verdict(ahead, "relay ÷ relay-hbm").state == "below"
    assert verdict(ahead, "relay ÷ relay-whole").state == "not measured"
    assert verdict([bound(one) for one in ahead], "relay ÷ relay-hbm").state == "not measured"
    neither = [outcome("relay", None, share=4.0), outcome("relay-hbm", None, share=4.0)]
    assert verdict(neither, "relay ÷ relay-hbm").state == "not measured"
    alone = [outcome("relay", 20.0, share=4.0), outcome("relay-hbm", None, share=4.0)]
    assert verdict(alone, "relay ÷ relay-hbm").state == "reached"


def test_length_at_a_rate_lies_between_the_lengths_that_carry_more_and_less() -> None:
    outcomes = [outcome("relay", 1600.0 / share**2, 3200.0 / share**2, share=share) for share in GRID]
    known = points(outcomes)
    for rate in (1600.0, 900.0, 401.0, 101.0):
        assert length_at(known, "relay", 0.5, "fleet", rate, oracle=False) == pytest.approx((1600.0 / rate) ** 0.5)
    for rate in (3200.0, 900.0, 201.0):
        assert length_at(known, "relay", 0.5, "fleet", rate, oracle=True) == pytest.approx((3200.0 / rate) ** 0.5)
    assert length_at(known, "relay", 0.5, "fleet", 1e6, oracle=False) == 0.0
    assert length_at(known, "relay", 0.5, "fleet", 99.0, oracle=False) == float("inf")
    assert length_at(known, "relay", 0.5, "simulated", 99.0, oracle=False) == 0.0


@pytest.mark.parametrize(("times", "state"), [(15.0, "reached"), (14.0, "below")])
def test_length_is_judged_against_the_oracles(times: float, state: str) -> None:
    """Lengths are as the roots of the rates: 15 of 20 times the rate is 0.87 of the length, 14 is 0.84."""
    lane = [outcome("full-lane", 50.0 / share**2, share=share) for share in HEADLINE]
    relay = [outcome("relay", times * 50.0 / share**2, 1000.0 / share**2, share=share) for share in GRID]
    assert verdict([*lane, *relay], "length at revisit 50%").state == state
    bounds = verdict([*lane, *map(bound, relay)], "length at revisit 50%")
    assert bounds.state == ("reached" if state == "reached" else "not measured")
    assert bounds.found.startswith("fleet: ≥ ")
    far = [outcome("full-lane", 1.0, share=share) for share in HEADLINE]
    assert verdict([*far, *relay], "length at revisit 50%").state == "not measured", "both beyond the grid"


@pytest.mark.parametrize(
    ("measured", "state"), [(114.0, "reached"), (87.0, "reached"), (116.0, "below"), (84.0, "below")]
)
def test_simulation_and_fleet_are_compared_value_by_value(measured: float, state: str) -> None:
    both = [outcome("relay", measured), outcome("relay", 100.0, where="simulated")]
    ((mode, setup, what, fleet, simulated, difference),) = differences(points(both))
    assert (mode, setup, what, fleet, simulated) == ("relay", Setup(), "rate", measured, 100.0)
    assert difference == pytest.approx(measured / 100 - 1)
    assert verdict(both, "simulation and fleet").state == state


def test_rates_that_could_not_differ_are_not_counted_as_alike() -> None:
    simulated = outcome("relay", 100.0, where="simulated")
    capped = bound(outcome("relay", 100.0))
    coarse = msgspec.structs.replace(outcome("relay", 100.0), failed=125.0)
    for one in (capped, coarse):
        assert differences(points([one, simulated])) == []
        found = verdict([one, simulated], "simulation and fleet")
        assert (found.state, found.found) == ("not measured", "1 more are lower bounds or known less exactly")
    nothing = outcome("relay", None)
    assert verdict([nothing, simulated], "simulation and fleet").state == "below"
    assert verdict([nothing, outcome("relay", None, where="simulated")], "simulation and fleet").state == "not measured"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rate": 70.0}, "60 requests/s"),
        ({"cores_busy": 0.6}, "half of the cores"),
        ({"device_late": 0.06}, "late"),
    ],
)
def test_a_probe_beyond_its_bounds_is_told_unless_it_was_set_aside(changed: dict[str, float], words: str) -> None:
    bound = {"60 requests/s": "no probe beyond 60", "late": "no device more", "half of the cores": "half of the"}[words]
    outcomes = grid(340.0, 50.0)
    assert verdict(outcomes, bound).state == "reached"
    probe = msgspec.structs.replace(PROBE, **changed)
    assert verdict([msgspec.structs.replace(outcomes[0], probes=[probe])], bound).state == "below"
    aside = msgspec.structs.replace(probe, set_aside=True)
    assert verdict([msgspec.structs.replace(outcomes[0], probes=[PROBE, aside])], bound).state == "reached"


def test_the_real_engine_is_judged_by_no_bound() -> None:
    fleet = [*grid(300.0, 50.0), outcome("relay", 300.0, where="simulated")]
    probe = msgspec.structs.replace(PROBE, rate=90.0, cores_busy=0.9, outcomes={"full": 100}, admitted_hits=0)
    real = msgspec.structs.replace(outcome("relay", 500.0, real=True), probes=[probe], bus_ms=[20.0, 40.0])
    anchor = [real, outcome("relay", 100.0, where="simulated", real=True)]
    assert judge_paper(points(fleet + anchor), fleet + anchor) == judge_paper(points(fleet), fleet)
    assert [row[1].real for row in differences(points(fleet + anchor))] == [False, True], "but compared"


def test_delegation_is_judged_at_high_and_at_low_load() -> None:
    def looked(mode: str, load: float, ms: float) -> Outcome:
        made = outcome(mode, 10.0, where="simulated", revisit=0.0, load=load)
        return msgspec.structs.replace(made, given=10.0, p99_ms=ms)

    without = [looked("relay-undelegated", 0.8, 100.0), looked("relay-undelegated", 0.1, 10.0)]
    assert (
        verdict([*without, looked("relay", 0.8, 69.0), looked("relay", 0.1, 10.0)], "with delegation").state
        == "reached"
    )
    assert (
        verdict([*without, looked("relay", 0.8, 71.0), looked("relay", 0.1, 10.0)], "with delegation").state == "below"
    )
    assert (
        verdict([*without, looked("relay", 0.8, 50.0), looked("relay", 0.1, 11.0)], "with delegation").state == "below"
    )
    assert verdict([*without, looked("relay", 0.8, 50.0)], "with delegation").state == "not measured", (
        "half of the claim"
    )


def test_hits_and_bus_are_judged() -> None:
    outcomes = grid(340.0, 50.0)
    assert verdict(outcomes, "hits over all announced").state == "reached"
    assert verdict(outcomes, "the bus").state == "reached"
    worse = msgspec.structs.replace(PROBE, outcomes={"hbm": 90, "full": 10}, admitted_hits=95)
    bad = [msgspec.structs.replace(one, probes=[worse], bus_ms=[3.0, 12.0]) for one in outcomes]
    for words in ("hits over all announced", "hits over all admitted", "the bus"):
        assert verdict(bad, words).state == "below"
    unready = [
        msgspec.structs.replace(one, probes=[msgspec.structs.replace(PROBE, admitted_hits=90)]) for one in outcomes
    ]
    states = [verdict(unready, f"hits over all {of}").state for of in ("announced", "admitted")]
    assert states == ["reached", "below"], "each of its own"
    failing = msgspec.structs.replace(PROBE, rate=80.0, bad=50, outcomes={"hbm": 50, "full": 50}, admitted_hits=50)
    more = [msgspec.structs.replace(one, probes=[*one.probes, failing]) for one in outcomes]
    told = verdict(more, "hits over all announced")
    assert (told.state, told.found.split("; ")[1]) == ("reached", "50.0% of 1,200 beyond it")
    given = msgspec.structs.replace(outcomes[-1], rate=None, given=480.0, probes=[failing])
    assert verdict([given], "hits over all announced").state == "below", "at a given load a failing probe counts"


def test_a_bus_so_slow_that_the_relay_stays_below_the_oracle_is_judged() -> None:
    """The oracle's 197 requests/s become 39 dilated ones."""
    slow, fast = (
        msgspec.structs.replace(outcome("relay", rate, 197.0), factor=float(factor_for(197.0)), bus_ms=[5.0, p99])
        for rate, p99 in ((160.0, 12.0), (190.0, 8.0))
    )
    found = verdict([slow], "the bus")
    assert (found.state, found.found) == ("below", "fleet: 12.0 to 12.0 ms in 1 searches at up to 32 requests/s")
    failed = msgspec.structs.replace(slow, rate=None)
    assert verdict([failed], "the bus").state == "not measured"
    assert verdict([msgspec.structs.replace(failed, given=160.0)], "the bus").state == "below", "at a given load"
    assert verdict([slow, fast], "the bus").state == "below"
    low = msgspec.structs.replace(slow, rate=80.0)
    assert verdict([low, fast], "the bus").state == "reached", "far from the highest rate"


def test_a_p99_of_requests_without_scores_counts() -> None:
    """Of two seeds one is without scores at its P99, which is then the timeout, 8 SLOs."""
    seeds = {"relay": (40.0, 400.0), "relay-undelegated": (80.0, 80.0)}
    outcomes = [
        msgspec.structs.replace(
            outcome(mode, 10.0, where="simulated", revisit=0.0, load=load), given=10.0, p99_ms=ms, repeat=repeat
        )
        for mode, every in seeds.items()
        for load in (0.1, 0.8)
        for repeat, ms in enumerate(every)
    ]
    found = verdict(outcomes, "with delegation")
    assert (found.state, found.found.split(" at ")[0]) == ("below", "simulated: 220.0 against 80.0 ms")


def at_load(load: float, within: float, where: Where = "simulated", mode: str = "relay") -> Outcome:
    made = outcome(mode, None, where=where, load=load, timeout=20.0)
    return msgspec.structs.replace(made, given=400.0 * load, within=within)


def test_goodput_beyond_the_largest_rate_is_judged_by_that_rate() -> None:
    """Where less is sent than that, by what is sent; beside a lower bound of the largest rate nothing is."""
    carried = [outcome("relay", 380.0, where=where) for where in ("fleet", "simulated")]
    kept = [
        at_load(1.0, 0.9),
        at_load(2.0, 0.48),
        at_load(3.0, 0.3),
        at_load(0.5, 0.1),
        at_load(2.0, 0.1, mode="cache"),
    ]
    found = verdict([*carried, *kept], "goodput")
    words = "simulated: 0.95 at 1 × load, 1.01 at 2 × load, 0.95 at 3 × load"
    assert (found.state, found.found) == ("reached", words)
    found = verdict([*carried, *kept, at_load(3.0, 0.2, "fleet")], "goodput")
    assert (found.state, found.found) == ("below", f"fleet: 0.63 at 3 × load; {words}")
    bound = msgspec.structs.replace(carried[1], settled=False)
    assert verdict([bound, *kept], "goodput").state == "not measured"


def test_hits_at_the_loads_of_goodput_are_told_and_not_judged() -> None:
    few = [msgspec.structs.replace(PROBE, rate=200.0, outcomes={"hbm": 40}, admitted_hits=40)]
    high = msgspec.structs.replace(at_load(3.0, 0.3, "fleet"), probes=few)
    found = verdict([outcome("relay", 380.0), high], "hits over all announced")
    assert (found.state, found.found) == (
        "reached",
        "fleet: 99.0% of 100 up to the rate carried; 40.0% of 100 beyond it",
    )


def test_nothing_measured_is_no_miss() -> None:
    assert {one.state for one in judge_paper([], [])} == {"not measured"}
