"""What the bench of lanes by load says of a fleet, from statuses and from what users saw."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from change_lanes import LANES, SPEEDS, WINDOW_S, LaneWatch, Seen, report
from relaygr_lab.rollouts import Sample
from relaygr_lab.verdicts import NotValid

from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import LaneStatus
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import lane_of
from tests.statuses import worker_status


def states(owners: Mapping[str, range], busy: float = 0.5) -> list[Record]:
    """Records of workers with these lanes."""
    found = []
    for name, lanes in owners.items():
        owned = [LaneStatus(lane=lane, budget_bytes=1, pinned_bytes=0, pre_infer_offset=0) for lane in lanes]
        status = worker_status(name, owned, busy_share=busy)
        found.append(Record("s", 0, 0, 0, name.encode(), encode(status), ()))
    return found


def test_a_lane_moves_when_another_worker_states_it_and_loads_are_over_fair_shares() -> None:
    first, second, fast = SPEEDS
    watch = LaneWatch()
    watch.take(states({first: range(16), second: range(16, 32), fast: range(32, LANES)}))
    assert not watch.moves
    watch.take(states({first: range(1, 16), fast: range(32, LANES)}))  # lane 0 has nobody for a moment
    assert not watch.moves
    watch.take(states({second: range(16, 32), fast: range(LANES)[0:1]}))
    assert [lane for _, lane in watch.moves] == [0]
    samples = [Sample(n * 0.01, hit=True, latency_ms=float(n % 100), user=n) for n in range(4000)]
    seen = watch.seen(samples, WINDOW_S)
    loads = {name: sum(watch.owners[lane_of(f"user-{n}", LANES)] == name for n in range(4000)) for name in SPEEDS}
    assert seen.largest == pytest.approx(max(4 * loads[name] / (4000 * speed) for name, speed in SPEEDS.items()))
    assert (seen.lanes[first], seen.lanes[second], seen.lanes[fast]) == (15, 16, 33)
    assert (seen.rankings, seen.lost, seen.hits) == (4000, 0, 1.0)
    assert seen.of_largest in loads.values()


GOOD = Seen(dict.fromkeys(SPEEDS, 21), 1.4, dict.fromkeys(SPEEDS, 0.5), 0.9, 20.0, 100.0, 1000, 0, 350)


@pytest.mark.parametrize(
    ("measured", "moved", "lost", "broken"),
    [
        (replace(GOOD, largest=1.1), [1, 2], 0, []),
        (replace(GOOD, largest=1.1), [1, 2], 3, ["3 rankings lost"]),
        (replace(GOOD, largest=1.5, of_largest=375), [1], 0, ["largest load by load 1.07 × that by number"]),
        (replace(GOOD, largest=1.1, p99_ms=101.0), [1], 0, ["P99 101 ms"]),
        (replace(GOOD, largest=1.1), [1, 2, 1], 0, ["1 moved more than once"]),
    ],
)
def test_bounds_not_kept(measured: Seen, moved: list[int], lost: int, broken: list[str]) -> None:
    found = report(GOOD, measured, moved, lost, 1000)
    assert len(found) == len(broken)
    assert all(part in line for part, line in zip(broken, found, strict=True))


def test_few_rankings_do_not_tell() -> None:
    few = replace(GOOD, rankings=100, of_largest=35)
    with pytest.raises(NotValid, match=r"0\.93 × .* too few rankings to tell 0\.85 from 1"):
        report(few, replace(few, largest=1.3), [1], 0, 1000)


def test_without_statuses_nothing_is_busy() -> None:
    assert LaneWatch().busy(0.0, math.inf) == dict.fromkeys(SPEEDS, 0.0)
