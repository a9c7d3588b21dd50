"""A population's users live on from probe to probe, at whatever rate the probes ask for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from relaygr_lab.bench import populations
from relaygr_lab.bench.modes import CACHE, FULL, FULL_ANY, FULL_LANE, RELAY
from relaygr_lab.bench.options import SloOptions
from relaygr_lab.bench.populations import Hot, Population, Populations

from relaygr_stream.settings.load import load_settings
from relaygr_stream.wire.topic_files import lane_of
from relaygr_stream.workload.arrivals import ArrivalLog, read_arrivals
from relaygr_stream.workload.generator import GeneratorOptions
from relaygr_stream.workload.items import StageDelay, WorkItem
from relaygr_stream.workload.traffic import Mix
from tests.unit.bench.reports import WORLD
from tests.unit.workload.test_arrivals import prompts

#: Few users, who return for a short while before the first probe.
ASKED = SloOptions(
    preset="quick", length=64, samples=100, tolerance=1.2, repeats=1, budget_s=60.0, known=5, settle_s=0.2
)  # fmt: skip


def options(length: float, revisit: float, **given: object) -> GeneratorOptions:
    shape = {
        "length": length, "revisit": revisit, "users": 200_000, "zipf": 0.0, "sigma": 0.0, "items": 5000, "suffix": 4,
        "candidates": 20, "max_prefix": 400, "delay": StageDelay(100.0, 0.1), "seed": 3, "known": 30 if revisit else 0,
        **given,
    }  # fmt: skip
    return GeneratorOptions(**shape)  # type: ignore[arg-type]


def test_requests_come_at_poisson_times_of_the_asked_rate() -> None:
    items = Population("p", options(64, 0.0)).take(50.0, count=600)
    gaps = np.diff([0.0, *(item.at for item in items)])
    assert abs(gaps.mean() * 50 - 1) < 0.1
    assert abs(gaps.std() / gaps.mean() - 1) < 0.1  # exponential: as wide as it is long


def test_takes_as_many_as_are_to_be_judged() -> None:
    items = Population("p", options(64, 0.0)).take(20.0, count=100, since=2.0)
    assert sum(item.at >= 2.0 for item in items) == 100
    assert Population("p", options(64, 0.0)).take(20.0, count=5, until=10.0)[-1].at > 9.0


def test_users_live_on_from_probe_to_probe_and_return_with_grown_histories() -> None:
    population = Population("p", options(64, 0.8))
    strangers = population.take(50.0, count=30)
    assert len({item.event.user_id for item in strangers}) == 30
    assert {len(item.event.prefix) for item in strangers} == {64}
    known = {item.event.user_id: item.event.prefix for item in strangers}
    later = population.take(20.0, count=600)
    returning = [item.event.user_id in known for item in later[:50]]
    assert np.mean(returning) > 0.5
    seen = set(known)
    came_back = []
    for item in later:
        user = item.event.user_id
        came_back.append(user in seen)
        if user in known:
            assert len(item.event.prefix) > len(known[user])
            assert item.event.prefix.slice(0, len(known[user])) == known[user]
        known[user] = item.event.prefix
        seen.add(user)
    assert np.mean(came_back) == pytest.approx(0.8, abs=0.06)


def test_a_request_that_was_not_sent_comes_first_next_time() -> None:
    one, other = Population("p", options(64, 0.5)), Population("p", options(64, 0.5))
    in_turns = [item.request.request_id for _ in range(5) for item in one.take(50.0, count=10)]
    assert in_turns == [item.request.request_id for item in other.take(20.0, count=50)]


def test_two_populations_share_no_user_and_no_request() -> None:
    one = Population("a", options(64, 0.5)).take(50.0, count=100)
    other = Population("b", options(64, 0.5)).take(50.0, count=100)
    for name in ("user_id", "request_id"):
        assert not {getattr(i.event, name) for i in one} & {getattr(i.event, name) for i in other}
    assert all(item.event.user_id == item.request.user_id for item in one)
    ids = [item.request.request_id for item in one]
    assert len(set(ids)) == len(ids)


def test_a_log_gives_gaps_and_users_at_any_rate(tmp_path: Path) -> None:
    log = read_arrivals(prompts(tmp_path / "trace.jsonl", 200))
    population = Population("p", options(64, 0.0, arrivals=log))
    assert population.revisit == log.returns
    items = [*population.take(10.0, count=120), *population.take(40.0, count=80)]
    users = [item.event.user_id for item in items]
    assert log.users is not None
    assert [users.index(user) for user in users] == [log.users.tolist().index(user) for user in log.users]
    at = np.array([item.at for item in items])
    for part, rate in ((slice(0, 120), 10.0), (slice(120, 200), 40.0)):
        assert np.diff(at[part]) * rate == pytest.approx(log.gaps[part][1:], abs=1e-9)


@pytest.mark.parametrize("workers", [1, 2])
async def test_on_several_workers_cache_has_users_of_its_own_who_are_not_announced(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    announced: list[bool] = []

    async def drive(client: object, items: list[WorkItem], *, announce: bool, timeout: float) -> None:
        del client, items, timeout
        announced.append(announce)

    monkeypatch.setattr(populations, "drive", drive)
    asked = replace(ASKED, workers=workers)
    pipeline = SimpleNamespace(name="p", client=None, settings=load_settings([], {}).settings)
    made = Populations(asked, cast(Any, pipeline), 7, lambda line: None)
    relay, cache = [await made.get(64, 0.5, mode, WORLD) for mode in (RELAY, CACHE)]
    assert (relay is cache) is (workers == 1)
    assert relay.name != cache.name or workers == 1
    assert announced == [True, True, *([False, False] if workers > 1 else [])]
    assert await made.get(64, 0.5, FULL, WORLD) is await made.get(64, 0.0, RELAY, WORLD)


async def test_with_a_logs_users_each_mode_that_announces_nothing_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full inference leaves nothing for returns: those of `cache` behind it were misses."""

    async def drive(*anything: object, **more: object) -> None:
        """Nothing is sent."""

    monkeypatch.setattr(populations, "drive", drive)
    log = ArrivalLog("log", np.arange(400.0), np.arange(400) % 40)
    asked = replace(ASKED, workers=4, arrivals=log)
    pipeline = SimpleNamespace(name="p", client=None, settings=load_settings([], {}).settings)
    made = Populations(asked, cast(Any, pipeline), 7, lambda line: None)
    of = [await made.get(64, 0.5, mode, WORLD) for mode in (RELAY, CACHE, FULL_LANE, FULL_ANY)]
    assert len({each.name for each in of}) == 4


def test_short_and_long_users_are_told_apart() -> None:
    population = Population("p", options(256, 0.0, users=10**9, mix=Mix(0.75, 32.0)))
    assert population.two_kinds
    items = population.take(50.0, count=400)
    assert {(len(item.event.prefix), item.long) for item in items} == {(256, True), (32, False)}
    assert np.mean([item.long for item in items]) == pytest.approx(0.25, abs=0.07)


def test_a_share_of_the_users_is_on_the_hot_lane_from_visit_to_visit() -> None:
    items = Population("p", options(64, 0.5), Hot(0.3, 8)).take(50.0, count=600)
    assert all(item.event.user_id == item.request.user_id for item in items)
    users = {item.event.user_id for item in items}
    assert len(users) < 0.7 * len(items), "who returns has the same name"
    on_first = np.mean([lane_of(user, 8) == 0 for user in users])
    assert on_first == pytest.approx(0.3 + 0.7 / 8, abs=0.06)
