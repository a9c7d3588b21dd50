"""A replayed log: each request holds exactly what was known at its time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from relaygr_stream.errors import ConfigError, InputError
from relaygr_stream.workload.items import WorkItem
from relaygr_stream.workload.logs import InteractionLog, read_log
from relaygr_stream.workload.replay import Replay, ReplayOptions, window_start
from tests.unit.workload.logs_for_tests import ITEMS, interactions, movielens_rows, write_udata


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> InteractionLog:
    return read_log(write_udata(tmp_path_factory.mktemp("logs") / "u.data", movielens_rows()))


def candidates(item: WorkItem) -> list[int]:
    return [int(value) for value in np.frombuffer(item.request.candidates, np.uint32)]


def test_each_request_is_what_the_log_says(log: InteractionLog) -> None:
    """Found again from the log by plain means: the user's history, the next item, the popularity so far."""
    by_user: dict[str, list[tuple[int, int, int]]] = {}
    for row in interactions(log):
        by_user.setdefault(row.user, []).append((row.time_ms, row.item, row.action))
    everything = sorted((row.time_ms, log.users.index(row.user), row.item) for row in interactions(log))
    items = list(Replay(log, ReplayOptions(requests=150, candidates=30)))
    assert len(items) == 150
    for item in items:
        assert item.target is not None
        history = by_user[item.event.user_id]
        n = len(item.request.prefix) + len(item.request.suffix)
        assert len(item.request.suffix) == 8
        assert n >= 16
        seen_items = [*item.request.prefix.arrays()[0].tolist(), *item.request.suffix.arrays()[0].tolist()]
        seen_actions = [*item.request.prefix.arrays()[1].tolist(), *item.request.suffix.arrays()[1].tolist()]
        seen_times = [*item.request.prefix.arrays()[2].tolist(), *item.request.suffix.arrays()[2].tolist()]
        assert list(zip(seen_times, seen_items, seen_actions, strict=True)) == history[:n]
        ids = candidates(item)
        assert len(ids) == len(set(ids)) == 30 == item.event.candidates
        assert ids[item.target] == history[n][1]
        assert not set(ids[: item.target] + ids[item.target + 1 :]) & {behaviour[1] for behaviour in history[: n + 1]}
        assert item.event.prefix == item.request.prefix
        assert item.popularity is not None
        at = history[n][0]
        earlier = [row[2] for row in everything if row[0] < at]
        until = [row[2] for row in everything if row[0] <= at]
        for place, candidate in enumerate(ids):  # within a second the order is the log's; between, it is exact
            assert earlier.count(candidate) <= item.popularity[place] <= until.count(candidate)


def test_all_takes_the_latest_interactions_in_the_order_of_time(log: InteractionLog) -> None:
    items = list(Replay(log, ReplayOptions(requests=200)))
    assert [item.at for item in items] == sorted(item.at for item in items)
    everything = list(Replay(log, ReplayOptions(requests=10**6)))
    assert len(everything) == 100 * (30 - 16)
    tail = [(item.event.user_id, len(item.event.prefix)) for item in everything[-200:]]
    assert [(item.event.user_id, len(item.event.prefix)) for item in items] == tail


def test_a_users_later_prefix_extends_the_earlier_one(log: InteractionLog) -> None:
    before: dict[str, WorkItem] = {}
    returns = 0
    for item in Replay(log, ReplayOptions(requests=10**6)):
        if (last := before.get(item.event.user_id)) is not None:
            returns += 1
            assert item.event.prefix.slice(0, len(last.event.prefix)) == last.event.prefix
            assert len(item.event.prefix) > len(last.event.prefix)
        before[item.event.user_id] = item
    assert returns > 0


def test_last_gives_one_request_a_user_its_last(log: InteractionLog) -> None:
    items = list(Replay(log, ReplayOptions(requests=10**6, which="last")))
    assert len({item.event.user_id for item in items}) == len(items) == 100
    assert {len(item.event.prefix) + len(item.request.suffix) for item in items} == {29}


def test_speed_scales_the_logs_time_and_rate_ignores_it(log: InteractionLog) -> None:
    real = [item.at for item in Replay(log, ReplayOptions(requests=300, speed=1))]
    fast = [item.at for item in Replay(log, ReplayOptions(requests=300, speed=1000))]
    assert real[0] == 0
    assert real[-1] > 1000
    assert fast == pytest.approx([at / 1000 for at in real])
    even = [item.at for item in Replay(log, ReplayOptions(requests=1000, rate=50))]
    assert np.diff(even).mean() == pytest.approx(1 / 50, rel=0.15)


def test_the_same_seed_gives_the_same_requests(log: InteractionLog) -> None:
    replay = Replay(log, ReplayOptions(requests=40))
    assert [item.request for item in replay] == [item.request for item in replay]
    other = Replay(log, ReplayOptions(requests=40, seed=9))
    assert [item.request for item in replay] != [item.request for item in other]


def test_the_true_item_may_stand_anywhere(log: InteractionLog) -> None:
    places = [item.target for item in Replay(log, ReplayOptions(requests=1000, candidates=10))]
    assert {places.count(place) > 50 for place in range(10)} == {True}


def test_long_histories_are_windowed_in_jumps(log: InteractionLog) -> None:
    starts: dict[str, set[int]] = {}
    for item in Replay(log, ReplayOptions(requests=10**6, max_prefix=10, suffix=2, min_history=3)):
        assert 1 <= len(item.event.prefix) <= 10
        starts.setdefault(item.event.user_id, set()).add(int(item.event.prefix.arrays()[2][0]))
    assert all(len(seen) <= 6 for seen in starts.values())  # 27 prefixes of a user begin at most at 0, 5, 10, 15, 20


@pytest.mark.parametrize(
    ("length", "most", "start"), [(0, 8, 0), (8, 8, 0), (9, 8, 4), (12, 8, 4), (13, 8, 8), (3, 1, 2)]
)
def test_window_start(length: int, most: int, start: int) -> None:
    assert window_start(length, most) == start


def test_fewer_items_than_candidates(log: InteractionLog) -> None:
    item = next(iter(Replay(log, ReplayOptions(requests=1, candidates=1000))))
    n = len(item.request.prefix) + len(item.request.suffix)
    assert len(candidates(item)) <= ITEMS - n


def test_too_short_histories_and_a_single_item_are_refused(log: InteractionLog, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no user has more than 30 behaviours \(the longest history has 30\)"):
        Replay(log, ReplayOptions(min_history=30))
    single = read_log(write_udata(tmp_path / "u.data", [[1, 7, 3, time] for time in range(30)]))
    with pytest.raises(InputError, match="one item"):
        Replay(single, ReplayOptions())


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_history = 8 must exceed suffix = 8"):
        ReplayOptions(min_history=8)
    for wrong in ({"speed": 0.0}, {"rate": -1.0}, {"requests": 0}, {"candidates": 1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            dataclasses.replace(ReplayOptions(), **wrong)
