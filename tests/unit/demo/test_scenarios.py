"""A day of scenarios on real processes: its requests in dilated time, what is counted, and its picture."""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from relaygr_lab.demo.scenarios import draw
from relaygr_lab.demo.timeline import by_time
from relaygr_lab.emulate.process import damping_at
from relaygr_lab.rollouts import Sample
from relaygr_lab.tides.days import EVEN, after_moves, followed, turns
from relaygr_lab.tides.fleet import Moved, TidalFleet
from relaygr_lab.tides.load import DayLoad, PatientClient, served, why_missed
from relaygr_lab.tides.traffic import FEED, day_of, rates_of, requests_of
from relaygr_lab.verdicts import NotValid

from relaygr_stream.ops.planner.plan import DAY
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.wire.messages import Outcome
from relaygr_stream.wire.planner_status import Move
from relaygr_stream.workload.driver import Result
from tests.unit.client_peers import request, responder_on
from tests.waiting import until

NAN = math.nan
#: A day of 100 s, times ten times as long as a device's, on two devices.
TIDAL = day_of(rates_of(1.0, 2), 2, 10.0, FEED, tide=True, return_s=0.5)
FACTOR = 10.0
TOLD_S = 0.2


@pytest.fixture(autouse=True)
def _cache_here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path_factory.getbasetemp() / "matplotlib"))


def test_what_is_refused_is_not_lost_and_neither_is_within_the_slo() -> None:
    samples = [
        Sample(1.0, hit=True, latency_ms=10.0),
        Sample(2.0, hit=False, latency_ms=30.0),
        Sample(3.0, hit=False, latency_ms=NAN, refused=True),
        Sample(4.0, hit=False, latency_ms=NAN),
        Sample(5.0, hit=True, latency_ms=10.0),  # outside
    ]
    told = served(samples, 20.0, (1.0, 4.0), (4.0, 5.0))
    assert told == (4, 0.25, 0.5, 1, 2)
    assert [each.lost for each in samples] == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("error", "detail", "lost"),
    [
        (None, "", False),
        ("Overloaded", "it cannot be done in time", False),
        ("DeadlineExceeded", "the deadline passed after 190 ms on the worker", False),
        ("DeadlineExceeded", "sent 300 ms late, after its timeout", False),
        ("DeadlineExceeded", "not sent within 200 ms: this process is behind", False),
        ("BrokerUnavailable", "broker 1 has acknowledged nothing for 2.4 s", False),
        ("DeadlineExceeded", "no answer within 200 ms", True),
        ("WorkerFailed", "a defect", True),
    ],
)
def test_what_no_worker_answered_though_it_was_sent_is_lost_and_named_at_once(
    error: str | None, detail: str, lost: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    load = DayLoad(TIDAL, FACTOR, pooled=False)
    item = next(requests_of(TIDAL.surfaces[0], 100.0, FACTOR, 7, "feed"))
    outcome: Outcome | None = None if error else "hbm"
    load._on_result("feed")(Result(item, outcome, error, detail, 1.0, None, None))
    assert (load.samples["feed"][0].lost, load.samples["feed"][0].hit) == (lost, error is None)
    named = [each for each in capsys.readouterr().out.splitlines() if item.request.request_id in each]
    assert bool(named) == bool(load.unanswered) == lost


async def test_the_days_client_still_takes_an_answer_that_comes_after_the_time_that_workers_are_told(
    embedded_settings: Kafka,
) -> None:
    settings = Settings(kafka=embedded_settings)
    async with responder_on(embedded_settings) as peer, PatientClient(settings=settings) as client:
        peer.hold = True
        ranking = asyncio.create_task(client.rank(request(), timeout=TOLD_S))
        await until(lambda: len(peer.held) == 1)
        assert peer.held[0][1].timeout_ms == pytest.approx(TOLD_S * 1e3)
        await asyncio.sleep(TOLD_S)
        peer.release()
        assert (await ranking).latency_s > TOLD_S


def test_requests_come_in_dilated_time_with_opposite_tides_and_users_of_their_own() -> None:
    feed, search = (list(requests_of(each, 100.0, FACTOR, 7, each.scenario.name)) for each in TIDAL.surfaces)
    for requests, rising in ((feed, True), (search, False)):
        assert all(a.at <= b.at for a, b in pairwise(requests))
        assert (sum(each.at < 50 for each in requests) > len(requests) / 2) == rising
    assert len(feed) == pytest.approx(130, rel=0.4), "13 a second for ten seconds of a device"
    assert {each.event.scenario for each in feed} == {each.request.scenario for each in feed} == {"feed"}
    assert all(each.event.user_id == each.request.user_id for each in feed)
    assert not {each.event.user_id for each in feed} & {each.event.user_id for each in search}
    assert feed[0].event.rank_in_ms == 1500.0


def test_one_pool_has_no_scenarios_and_groups_have_theirs_in_dilated_time(tmp_path: Path) -> None:
    pool = TidalFleet("mixed", Settings(), tmp_path, TIDAL, FACTOR, None)
    assert not pool.settings.scenarios
    assert (pool.settings.relay.slo_ms, pool.settings.worker.max_ranking_delay_ms) == (500.0, 40.0)
    groups = TidalFleet("moving", Settings(kafka=Kafka(prefix="x.")), tmp_path, TIDAL, FACTOR, {"feed": 1, "search": 1})
    assert [(each.name, each.slo_ms, each.lead_ms) for each in groups.settings.scenarios] == [
        ("feed", 500.0, 1500.0),
        ("search", 200.0, 1500.0),
    ]
    assert groups.settings.kafka.prefix == "x.moving."


def test_hits_after_a_move_are_multiples_of_those_before_until_the_next_one() -> None:
    load = DayLoad(TIDAL, FACTOR, pooled=False)
    load.start_s = -load.begins_s
    missed = {"feed": range(1, 300, 2), "search": range(100, 110)}
    for name, samples in load.samples.items():
        samples += [Sample(float(at), hit=at not in missed[name], latency_ms=1.0) for at in range(300)]
    load.misses = [(float(at), why_missed("full", "")) for at in missed["search"]]
    moves = [Moved(at_s, 10.0, "w", "feed", "search") for at_s in (100.0, 120.0)]
    before, after = after_moves(moves, load, 300.0)
    assert {name: each.hits for name, each in before.items()} == {"feed": 0.5, "search": 1.0}
    assert [each.rankings for each in after.since] == [20, 100], "the last one's are those of 60 s"
    assert after.since[0].ratio == after.since[1].ratio == after.together.ratio == 1.0
    assert after.meanwhile.ratio == pytest.approx((1.0 + 190 / 200) / 2)
    assert after.since[0].error > 1.5 * after.since[1].error > 1.5 * after.together.error > 0
    assert after.misses_meanwhile == {"its worker read no signal of it": 10}
    assert not after.misses


@pytest.mark.parametrize(
    ("before_ms", "after_ms", "says"),
    [
        (NAN, 1.0, "hits of feed before the first move is nan"),
        (1.0, NAN, "rankings of feed with scores behind a move is 0"),
    ],
)
def test_hits_without_scores_before_or_after_a_move_are_not_valid(before_ms: float, after_ms: float, says: str) -> None:
    load = DayLoad(TIDAL, FACTOR, pooled=False)
    load.start_s = -load.begins_s
    for samples in load.samples.values():
        samples += [Sample(float(at), hit=True, latency_ms=before_ms) for at in range(100)]
        samples += [Sample(float(at), hit=True, latency_ms=after_ms) for at in range(100, 160)]
    with pytest.raises(NotValid, match=says):
        after_moves([Moved(100.0, 10.0, "w", "feed", "search")], load, 160.0)


def test_no_hit_before_the_first_move_is_not_valid() -> None:
    load = DayLoad(TIDAL, FACTOR, pooled=False)
    load.start_s = -load.begins_s
    for samples in load.samples.values():
        samples += [Sample(float(at), hit=at >= 100, latency_ms=1.0) for at in range(160)]
    with pytest.raises(NotValid, match="hits of feed before the first move is 0"):
        after_moves([Moved(100.0, 10.0, "w", "feed", "search")], load, 160.0)


def test_moves_are_told_by_how_much_later_than_the_tide_they_come(
    tmp_path: Path,
) -> None:
    day = day_of(rates_of(1.5, 4), 4, 30.0, FEED, tide=True)
    asked = turns(day, FACTOR, EVEN)
    assert [target for _, target in asked] == ["feed", "search", "search", "feed", "feed"]
    assert asked[0][0] < asked[1][0] < 150 < asked[3][0], "the feed's flood is in the first half of 300 s"
    fleet = TidalFleet("moving", Settings(), tmp_path, day, FACTOR, EVEN)
    assert followed(fleet) == [], "nothing is planned yet, as on a day without a planner"
    fleet.load.start_s = 1000.0 - fleet.factor * day.warm_s
    to_search = Move(source="feed", target="search")
    fleet.planned = [(1000.0 + asked[1][0] + 20, to_search), (1000.0 + asked[2][0] + 30, to_search)]
    fleet.verified = [1000.0 + asked[1][0] + 28]
    told = followed(fleet)
    assert [each.proposed - (each.turned or 0) for each in told] == pytest.approx([20.0, 30.0])
    assert [each.verified and each.verified - each.proposed for each in told] == [pytest.approx(8.0), None]


def test_a_planners_day_passes_faster_but_its_moves_do_not() -> None:
    quick = damping_at(10.0)
    assert (quick.floor_s, quick.settle_s, quick.arrive_s) == (DAY.floor_s / 10, DAY.settle_s / 10, DAY.arrive_s)


def test_seconds_without_rankings_have_no_point() -> None:
    samples = [Sample(at_s, hit=True, latency_ms=1.0) for at_s in (99.0, 100.0, 104.0, 111.0)]
    assert [(at_s, len(some)) for at_s, some in by_time(samples, 100.0, 5.0)] == [(2.5, 2), (12.5, 1)]


def test_a_day_becomes_a_png(tmp_path: Path) -> None:
    fleet = TidalFleet("moving", Settings(), tmp_path, TIDAL, FACTOR, {"feed": 1, "search": 1})
    fleet.counts = [
        (90.0, {"feed": 1, "search": 1}),
        (150.0, {"feed": 1, "search": 0}),
        (155.0, {"feed": 2, "search": 0}),
    ]
    fleet.planned = [
        (150.0, Move(source="search", target="feed", reason="feed needs 2 workers and has 1; search has 1"))
    ]
    for name in fleet.load.samples:
        fleet.load.samples[name] = [Sample(100.0 + number, hit=True, latency_ms=number * 10.0) for number in range(100)]
    figure = draw(fleet, 100.0)
    figure.savefig(tmp_path / "s.png", format="png")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    upper, lower = figure.axes
    assert np.asarray(upper.lines[0].get_xdata()).tolist() == [-10.0, 50.0, 55.0, 100.0]
    assert np.asarray(upper.lines[0].get_ydata()).tolist() == [1, 1, 2, 2]
    assert np.asarray(lower.lines[1].get_ydata())[-1] == 0.0, "search answers later than 200 ms"
    assert upper.texts[0].get_text() == "1"
    assert "1: feed needs 2 workers and has 1" in " ".join(figure.get_suptitle().split())
