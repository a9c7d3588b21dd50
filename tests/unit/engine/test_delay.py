"""How long a slice keeps the device from rankings: by what chunks cost, within a share of the SLO, or as it is set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from relaygr_lab.bench.lengths import costs_named
from relaygr_lab.simulate.fleet import Fleet
from relaygr_lab.simulate.scenario import Scenario

from relaygr_stream.engine.build import DELAY_SLO_SHARE
from relaygr_stream.engine.clients import SLACK_SLICES
from relaygr_stream.engine.commands import Query
from relaygr_stream.engine.executor import FIXED_SHARE, LEAST_DELAY_MS, SLICE_SHARE, Executor
from relaygr_stream.settings.load import load_settings
from relaygr_stream.workload.traffic import Traffic
from tests.unit.engine.worlds import LIMITS, toy_model, world

MOST_MS = 10.0


def learnt(fixed_ms: float, token_ms: float = 0.02) -> Executor:
    """An executor whose chunks have this fixed time."""
    executor = Executor(toy_model(), torch.device("cpu"))
    for _ in range(20):
        for tokens in (32, 64, 128, 256):
            executor.costs.prefilled(0, tokens, fixed_ms + token_ms * tokens)
    return executor


@pytest.mark.parametrize("fixed_ms", [0.05, 0.1])
def test_the_fixed_time_of_a_chunk_is_a_small_share_of_it(fixed_ms: float) -> None:
    chunk_ms = SLICE_SHARE * learnt(fixed_ms).delay_ms(MOST_MS)
    assert fixed_ms / chunk_ms == pytest.approx(FIXED_SHARE, rel=0.1)


@pytest.mark.parametrize(("fixed_ms", "delay_ms"), [(0.0, LEAST_DELAY_MS), (5.0, MOST_MS), (1e6, MOST_MS)])
def test_a_delay_stays_within_its_bounds(fixed_ms: float, delay_ms: float) -> None:
    assert learnt(fixed_ms).delay_ms(MOST_MS) == pytest.approx(delay_ms, rel=0.05)


def test_a_bound_below_the_least_is_kept() -> None:
    assert learnt(5.0).delay_ms(0.3) == 0.3


@pytest.mark.parametrize("by_costs", [True, False])
def test_the_core_follows_its_costs_unless_the_delay_is_set(by_costs: bool) -> None:
    with world(limits=replace(LIMITS, max_ranking_delay_ms=MOST_MS, delay_by_costs=by_costs)) as w:
        scheduler = w.scheduler
        for fixed_ms in (0.1, 0.2):
            costs = learnt(fixed_ms).costs
            scheduler._executor.costs = costs
            w.handle(Query())
            delay_ms = scheduler._executor.delay_ms(MOST_MS) if by_costs else MOST_MS
            assert scheduler.delay_ms == delay_ms
            assert scheduler._jobs.bound_ms == scheduler.rankings.max_delay_ms == delay_ms
            assert scheduler.admission.clients.slack_ms == SLACK_SLICES * delay_ms


@pytest.mark.parametrize(
    ("costs", "flags", "low", "high"),
    [
        ("cpu", {}, 5.0, 10.0),  # a fixed time of 0.3 ms in two steps
        ("npu", {}, 1.0, 2.5),  # of 0.9 in 24
        ("h100", {}, 4.0, 7.0),  # of 2.8 in 24
        ("h100", {"relay.slo_ms": "20"}, 4.0, 4.0),  # the SLO bounds it
        ("npu", {"worker.max_ranking_delay_ms": "7"}, 7.0, 7.0),
    ],
)
def test_each_device_gets_slices_of_its_own(costs: str, flags: dict[str, Any], low: float, high: float) -> None:
    given = {"relay.max_prefix_tokens": "8192", "worker.hbm_bytes": "32GiB", "worker.dram_bytes": "0", **flags}
    settings = load_settings([], given).settings
    traffic = Traffic(rate=20.0, length=2048.0, max_prefix=8192, candidates=32)
    scene = Scenario(
        settings=settings, costs=costs_named(costs), traffic=traffic, workers=1, sample=1, seconds=2.0, warm_s=0.5
    )  # fmt: skip
    fleet = Fleet(scene, scene.groups[0])
    fleet.run()
    (worker,) = fleet.workers
    assert low - 1e-9 <= worker.scheduler.delay_ms <= high + 1e-9
    assert worker.scheduler.delay_ms <= max(DELAY_SLO_SHARE * settings.relay.slo_ms, high)
