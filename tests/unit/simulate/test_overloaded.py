"""An overloaded fleet: what the report says of it stays within its bounds, and its end is the end of lateness."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from relaygr_lab.simulate.report import summary
from relaygr_lab.simulate.run import run_group
from relaygr_lab.simulate.story import cut_share, late_share

from relaygr_stream.settings.worker import Worker
from relaygr_stream.workload.arrivals import ArrivalLog
from relaygr_stream.workload.items import StageDelay
from tests.unit.simulate.scenes import fleet_of, scenario

#: A fleet of one worker.
ONE: dict[str, Any] = {"workers": 1, "sample": 1}


def test_a_device_is_busy_at_most_all_the_time_and_pins_stay_within_their_share() -> None:
    """Work after the measured time once counted as in it, and what waiting rankings hold as pinned by signals."""
    scene = scenario(rate=300.0, seconds=1.0, traffic={"return_s": 0.5}, **ONE)
    story = run_group(scene, scene.groups[0])
    assert 0.95 < story.busy.max() <= 1.0
    worker = scene.settings.worker
    assert 0 < story.pinned_bytes.max() <= worker.pinned_share * worker.hbm_bytes
    assert story.held_bytes.max() > worker.pinned_share * worker.hbm_bytes
    assert story.held_bytes.max() <= worker.hbm_bytes
    found = summary(scene, story)
    assert (found["pinned_bytes_most"], found["held_bytes_most"]) == (story.pinned_bytes.max(), story.held_bytes.max())


def test_when_the_load_falls_back_rankings_are_in_time_again_within_two_slos() -> None:
    """Callers wait for a second: a queue of theirs would be with the next ones for as long. 400 requests/s for a
    second and a half, four times what is carried, then 30."""
    ends_s, calm_s = 2.5, 1.5
    rng = np.random.default_rng(5)
    times = np.concatenate([_times(rng, 30, 0.0, 1.0), _times(rng, 400, 1.0, ends_s), _times(rng, 30, ends_s, 5.0)])
    log = ArrivalLog("a burst", times, None)
    rate = (len(times) - 1) / (times[-1] - times[0])
    traffic = {"arrivals": log, "delay": StageDelay(80.0, 0.0), "revisit": 0.5}
    scene = scenario(rate=rate, seconds=4.0, warm_s=1.0, traffic=traffic, **ONE)
    fleet = fleet_of(scene)
    fleet.run()
    slo_ms = scene.settings.relay.slo_ms
    asked = sorted(fleet.requests, key=lambda each: each.rank_at)
    begins = asked[0].rank_at
    ends = begins + ends_s - float(times[0])

    def late(since: float, until: float) -> tuple[int, int]:
        some = [each for each in asked if since <= each.rank_at < until]
        return sum(each.status != "ok" or each.latency_s > slo_ms / 1e3 for each in some), len(some)

    missed, of = late(ends - 1.0, ends)
    assert missed > 0.5 * of, "no overload: no test"
    missed, of = late(ends + 2 * slo_ms / 1e3, ends + calm_s)
    assert of > 30 and missed == 0


def test_by_default_what_would_be_refused_is_cut_to_its_newest_behaviours_and_counted_apart() -> None:
    """Most of it, at little cost in whole answers."""
    whole, cut = {}, {}
    for size in (0, Worker().truncate_to):
        scene = scenario({"worker.truncate_to": str(size)}, rate=233.0, seconds=1.5, traffic={"revisit": 0.3}, **ONE)
        story, slo_ms = run_group(scene, scene.groups[0]), scene.settings.relay.slo_ms
        whole[size], cut[size] = 1.0 - late_share(story, slo_ms).value, cut_share(story, slo_ms)
        found = summary(scene, story)
        assert found["goodput"] == pytest.approx(233.0 * whole[size])
        assert found["goodput_cut"] == pytest.approx(233.0 * cut[size])
    (refusing, size), (none, much) = whole, cut.values()
    assert none == 0.0 and much > 0.3
    assert whole[size] > 0.6 * whole[refusing] and whole[size] + much > 1.5 * whole[refusing]


def test_below_overload_nothing_is_cut() -> None:
    scene = scenario({"worker.truncate_to": str(Worker().truncate_to)}, rate=60.0, seconds=3.0)
    assert cut_share(run_group(scene, scene.groups[0]), scene.settings.relay.slo_ms) == 0.0


def _times(rng: np.random.Generator, rate: float, begins: float, ends: float) -> npt.NDArray[np.float64]:
    """Poisson arrivals."""
    return np.sort(rng.uniform(begins, ends, rng.poisson(rate * (ends - begins))))
