"""What a run's costs allow, and what its report concludes."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from relaygr_lab.bench.modes import CACHE, FULL, RELAY
from relaygr_lab.dlrmv3.loadgen import Load
from relaygr_lab.dlrmv3.oracle import Work
from relaygr_lab.dlrmv3.report import ENGINE, NOTE, Found, Reached, Report, Run, render
from relaygr_lab.dlrmv3.workload import Visit, Workload
from rich.console import Console

from relaygr_stream.wire.messages import CostModel

COSTS = CostModel(c0=1.0, c1=0.002, c2=3e-7, c3=1e-6, c4=0.001)
WORKLOAD = Workload(users=200)
TEST = Load(1.0, 700, 80.0, seed=1)
VISITS = WORKLOAD.requests[1][:700]
WHY = "at 3/s 5 of 40 queries took over 80 ms"
HEADS = np.random.default_rng(0).uniform(0.02, 0.15, 700)


def test_work_is_that_of_the_cost_model() -> None:
    work = Work.of(COSTS, [Visit(0, 95, 1000, 1000), Visit(0, 96, 1100, 100)], 50)
    assert (work.prefix + work.hit)[0] == pytest.approx(COSTS.full_ms(1000, 50))
    assert (work.prefix + work.hit)[1] == pytest.approx(COSTS.full_ms(1100, 50))
    assert work.new[0] == pytest.approx(work.prefix[0])  # a first visit
    assert work.new[1] == pytest.approx(work.prefix[1] - work.prefix[0])
    assert work.quotient == pytest.approx(work.full_ms / work.reused_ms)
    assert work.quotient > 1


def test_a_queue_carries_more_with_prefix_kv_and_most_where_it_works_ahead() -> None:
    work = Work.of(COSTS, VISITS, 2048)
    full, cache, relay = (work.largest_rate(mode.name, TEST, HEADS) for mode in (FULL, CACHE, RELAY))
    assert 0 < full < cache < relay <= 1e3 / work.reused_ms
    assert work.largest_rate(ENGINE, TEST, HEADS) == cache
    assert full < 1e3 / work.full_ms


def test_without_a_head_start_the_relay_is_a_queue_of_the_nearest_deadline() -> None:
    work = Work.of(COSTS, VISITS, 2048)
    none = work.largest_rate(RELAY.name, TEST, np.zeros(700))
    assert none == pytest.approx(work.largest_rate(CACHE.name, TEST, HEADS), rel=0.02)


def test_nothing_is_valid_where_a_request_alone_takes_longer() -> None:
    work = Work.of(CostModel(c0=81.0, c1=0.0, c2=0.0, c3=0.0), VISITS, 2048)
    assert work.largest_rate(FULL.name, TEST, HEADS) == 0


def run(mode: str, qps: float) -> Run:
    return Run(
        mode=mode, qps=qps, queries=700, valid=True, p99_ms=70.0, outcomes={"hbm": 690, "full": 10}, errors={}, late=0,
        off_ms=(0.1, 1.0), heads_ms=(20.0, 85.0) if mode == RELAY.name else None, folder=f"{mode}-{qps:g}",
    )  # fmt: skip


def report(quotient: float = 3.0, settled: bool = True, **qps: float | None) -> Report:
    found = [
        Found(
            mode=mode,
            best=run(mode, rate) if rate else None,
            settled=settled,
            oracle_qps=60.0,
            why=None if rate else WHY,
        )
        for mode, rate in qps.items()
    ]
    return Report(
        conditions={"broker": "embedded"}, reductions={"users": "200 of 5,000"}, slo_ms=80.0, runs=[], found=found,
        costs={}, full_ms=30.0, reused_ms=10.0, quotient=quotient, kv_user_bytes=2.5 * (1 << 20), wall_s=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("made", "broken"),
    [
        (report(full=10.0, cache=26.0, relay=52.0), []),
        (report(full=10.0, cache=25.0, relay=52.0), ["cache ÷ full: 2.50 of 3.00"]),
        (report(full=10.0, cache=26.0, relay=50.0), ["relay, queries/s: 50.00 of 60.00"]),
        (report(full=10.0, cache=25.0, relay=50.0, settled=False), []),
        (report(full=None, cache=25.0), ["full: no rate was VALID: at 3/s 5 of 40"]),
        (report(full=10.0, engine=1.0), []),
    ],
)
def test_bounds_are_shares_of_what_the_run_allows(made: Report, broken: list[str]) -> None:
    found = made.broken()
    assert len(found) == len(broken)
    assert all(line.startswith(start) for line, start in zip(found, broken, strict=True))


@pytest.mark.parametrize(
    ("reached", "exact", "settled", "kept"),
    [
        (2.6, True, True, True),
        (2.6, True, False, True),  # at least that
        (2.6, False, True, None),  # at most that
        (2.5, True, True, False),
        (2.5, False, True, False),
        (2.5, True, False, None),
        (2.5, False, False, None),
    ],
)
def test_a_bound_is_judged_only_where_it_decides(reached: float, exact: bool, settled: bool, kept: bool | None) -> None:
    one = Reached("cache ÷ full", reached, 3.0, "costs", exact, settled)
    assert one.kept is kept


def test_the_table_says_what_it_is_and_what_was_reduced() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(report(full=10.0, cache=26.0, relay=52.0, engine=None)))
    text = console.export_text()
    assert NOTE[:50] in text
    for shown in (
        "2.60×",
        "98.6%",
        "85 ms",
        "none",
        "users: 200 of 5,000",
        "2.5 MiB",
        "3.00 times less",
        "2.60 of 3.00",
        "0.87",
    ):
        assert shown in text, shown
    assert math.isclose(run("full", 1.0).hits, 690 / 700)
