"""Hedging: a request whose lane does not answer is answered by another worker, and an overload is not made worse."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from relaygr_stream.bus.producer import Producer
from relaygr_stream.client import RelayClient
from relaygr_stream.client.exchange import (
    LANES_LOOKED_AT,
    LAST_STATUS_MS,
    SLOW_BURST,
    SLOW_SHARE,
    Hedges,
    between_copies_s,
)
from relaygr_stream.errors import BrokerUnavailable, DeadlineExceeded, Overloaded
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import RankingRequest, ScoreReply, WorkerStatus
from relaygr_stream.wire.topic_files import lane_of, load_topics
from tests.statuses import lane_statuses, worker_status
from tests.unit.client_peers import PATIENCE_S, Responder, client_on, count, request, responder_on, scored
from tests.waiting import WITHIN_S, Clock, until

LANES = 8
LATE_S = 0.1
OURS = lane_of("u", LANES)
MINE, YOURS = [lane for lane in range(LANES) if lane % 2 == OURS % 2], [
    lane for lane in range(LANES) if lane % 2 != OURS % 2
]  # fmt: skip


def status(name: str, lanes: Sequence[int], *, queue_ms: float = 0.0, state: str = "serving") -> WorkerStatus:
    return worker_status(name, lane_statuses(lanes, budget_bytes=0), queue_ms=queue_ms, state=state)


class Waiting:
    """How long the brokers of lanes have acknowledged nothing."""

    def __init__(self, waiting_s: Callable[[int], float]) -> None:
        self._waiting_s = waiting_s
        self.asked = 0

    def waits_s(self, lanes: Iterable[int]) -> dict[int, float]:
        self.asked += 1
        return {lane: self._waiting_s(lane) for lane in lanes}

    def broker_of(self, lane: int) -> None:
        return None


class World:
    """A client, what the workers say, and who of them answers what."""

    def __init__(self, peer: Responder, relay: RelayClient, kafka: Kafka) -> None:
        self.peer = peer
        self.relay = relay
        self._topic = load_topics(kafka).worker_status.name

    async def say(self, *statuses: WorkerStatus) -> None:
        """Publish, and wait until the client has heard."""
        for each in statuses:
            await self.peer.producer.send_and_wait(self._topic, encode(each), key=each.name.encode())
        heard = self.relay._owners.workers
        await until(lambda: {s.name for s in statuses} <= heard().keys(), "the statuses heard")

    @property
    def sent(self) -> list[tuple[int, int]]:
        """(lane, hops) of what workers were asked."""
        return [(record.lane, request.hops) for record, request in self.peer.requests]


@asynccontextmanager
async def world(
    kafka: Kafka, answers: Callable[[RankingRequest], Sequence[ScoreReply]], **client: Any
) -> AsyncIterator[World]:
    """Half a second between copies, or a third of the timeout: where an acknowledgement takes longer, one worker may be
    asked twice."""
    settings: dict[str, Any] = {"hedge_ms": 500.0, "silence_ms": 60_000.0, **client}
    async with responder_on(kafka) as peer, client_on(kafka, **settings) as relay:
        await relay.rank(request(), timeout=PATIENCE_S)  # a client's first send connects, and reads metadata
        peer.requests.clear()
        peer.answers = answers
        yield World(peer, relay, kafka)


def only_elsewhere(request: RankingRequest) -> list[ScoreReply]:
    return [scored(request)] if request.hops else []


async def test_a_slow_lane_is_hedged_to_another_worker(embedded_settings: Kafka) -> None:
    async with world(embedded_settings, only_elsewhere) as w:
        await w.say(status("a", MINE), status("b", YOURS))
        ranking = await w.relay.rank(request(), timeout=20)
        assert ranking.scores.tolist()[0] == [7.0, -7.0]
        (first, second) = sorted(w.sent, key=lambda sent: sent[1])  # as they were sent; lanes are read in any order
        assert first == (OURS, 0)
        assert second[0] in YOURS
        assert second[1] == 1
        ids = {dict(record.headers)["relaygr-correlation-id"] for record, _ in w.peer.requests}
        assert len(ids) == 2, "answers to the copies can be told apart"
        assert count(w.relay, "hedges", reason="slow") == 1


async def test_a_call_that_waits_no_longer_than_hedge_ms_is_hedged_too(embedded_settings: Kafka) -> None:
    """README's timeout was hedge_ms, so that a slow worker's users got DeadlineExceeded and no copy was ever sent."""
    async with world(embedded_settings, only_elsewhere, hedge_ms=12_000.0) as w:
        await w.say(status("a", MINE), status("b", YOURS))
        assert (await w.relay.rank(request(), timeout=12.0)).outcome == "hbm"
        assert count(w.relay, "hedges", reason="slow") == 1


def test_all_copies_fit_into_a_calls_time() -> None:
    assert between_copies_s(hedge_ms=200.0, timeout_ms=1000.0) == 0.2, "the default timeout leaves hedge_ms as it is"
    assert between_copies_s(hedge_ms=200.0, timeout_ms=150.0) == pytest.approx(0.05)
    assert between_copies_s(hedge_ms=0.0, timeout_ms=150.0) == 0.0, "switched off"


async def test_a_quick_answer_is_not_hedged_and_a_late_second_one_is_dropped(embedded_settings: Kafka) -> None:
    async with world(embedded_settings, lambda request: [scored(request)], hedge_ms=5000.0) as w:
        await w.say(status("a", MINE), status("b", YOURS))
        await w.relay.rank(request(), timeout=20)
        assert w.sent == [(OURS, 0)]
    async with world(embedded_settings, lambda request: [scored(request)]) as w:
        await w.say(status("a", MINE), status("b", YOURS))
        w.peer.hold = True
        ranking = asyncio.create_task(w.relay.rank(request(), timeout=20))
        await until(lambda: len(w.sent) == 2, "hedged")
        w.peer.release()
        await ranking
        await until(lambda: count(w.relay, "answers_dropped", reason="duplicate") == 1, "the late answer dropped")


async def test_where_nobody_speaks_for_the_lane_it_is_asked_elsewhere_at_once(embedded_settings: Kafka) -> None:
    async with world(embedded_settings, only_elsewhere, hedge_ms=15_000.0, silence_ms=3000.0) as w:
        await w.say(status("a", MINE, state="stopped"), status("b", YOURS))
        async with asyncio.timeout(WITHIN_S):
            while not count(w.relay, "hedges", reason="silent"):  # until it has listened for long enough
                with suppress(DeadlineExceeded, BrokerUnavailable):
                    await w.relay.rank(request(), timeout=1.0)
        await w.relay.rank(request(1), timeout=20)
        ((lane, hops),) = [(record.lane, each.hops) for record, each in w.peer.requests if each.request_id == "r-1"]
        assert lane in YOURS
        assert hops == 1


@pytest.mark.parametrize("others", [[], [("b", 1e4)]])
async def test_nobody_is_asked_who_is_busy_or_not_there(
    embedded_settings: Kafka, others: list[tuple[str, float]]
) -> None:
    async with world(embedded_settings, only_elsewhere) as w:
        await w.say(status("a", MINE), *(status(name, YOURS, queue_ms=queue_ms) for name, queue_ms in others))
        with pytest.raises(DeadlineExceeded):
            await w.relay.rank(request(), timeout=1.2)  # two more copies would be due by then
        await until(lambda: w.sent, "the request read")
        assert w.sent == [(OURS, 0)]


@pytest.mark.parametrize("times", [1, 2], ids=["once", "again by the next owner of the lane"])
async def test_a_refusal_waits_for_the_other_copy(embedded_settings: Kafka, times: int) -> None:
    def answers(request: RankingRequest) -> list[ScoreReply]:
        if request.hops:
            return [scored(request)]
        return [ScoreReply(request_id=request.request_id, status="overloaded", detail="too much")] * times

    async with world(embedded_settings, answers) as w:
        await w.say(status("a", MINE), status("b", YOURS))
        w.peer.hold = True
        ranking = asyncio.create_task(w.relay.rank(request(), timeout=20))
        await until(lambda: len(w.peer.held) == 2, "hedged")
        w.peer.held.sort(key=lambda taken: taken[1].hops)
        w.peer.release()
        assert (await ranking).outcome == "hbm"


async def test_two_refusals_are_one_typed_answer(embedded_settings: Kafka) -> None:
    def refuse(request: RankingRequest) -> list[ScoreReply]:
        return [ScoreReply(request_id=request.request_id, status="overloaded")]

    async with world(embedded_settings, refuse) as w:
        await w.say(status("a", MINE), status("b", YOURS))
        w.peer.hold = True
        ranking = asyncio.create_task(w.relay.rank(request(), timeout=20))
        await until(lambda: len(w.peer.held) == 2, "hedged")
        w.peer.release()
        with pytest.raises(Overloaded):
            await ranking


@pytest.mark.stack
async def test_an_answer_that_came_counts_when_the_other_copy_is_never_answered(embedded_settings: Kafka) -> None:
    """It was thrown away at the deadline, and with it the cause."""

    def refused_at_home(request: RankingRequest) -> list[ScoreReply]:
        refused = ScoreReply(request_id=request.request_id, status="overloaded", detail="no room", model_version="m-1")
        return [] if request.hops else [refused]

    async with world(embedded_settings, refused_at_home) as w:
        await w.say(status("a", MINE), status("b", YOURS))
        w.peer.hold = True
        ranking = asyncio.create_task(w.relay.rank(request(), timeout=6.0))
        await until(lambda: len(w.sent) == 2, "hedged")
        w.peer.release()
        with pytest.raises(Overloaded, match="no room"):
            await ranking


async def test_hedging_can_be_switched_off(embedded_settings: Kafka) -> None:
    async with world(embedded_settings, only_elsewhere, hedge_ms=0.0) as w:
        async with Producer(embedded_settings, client_id="status") as producer:
            topic = load_topics(embedded_settings).worker_status.name
            await producer.send_and_wait(topic, encode(status("b", YOURS)), key=b"b")
        with pytest.raises(DeadlineExceeded):
            await w.relay.rank(request(), timeout=0.3)
        await until(lambda: w.sent, "the request read")
        assert w.sent == [(OURS, 0)]


def directory(*statuses: WorkerStatus) -> OwnerDirectory:
    owners = OwnerDirectory(1000.0, clock=lambda: 0.0)
    for each in statuses:
        owners.take(each)
    return owners


def test_the_budget_is_a_share_of_the_requests() -> None:
    hedges = Hedges(directory(), busy_ms=10)
    spent = 0
    while hedges.spend():
        spent += 1
    assert spent == SLOW_BURST
    for _ in range(200):
        hedges.request()
    assert [hedges.spend() for _ in range(12)].count(True) in (int(200 * SLOW_SHARE), int(200 * SLOW_SHARE) - 1)


def test_the_less_loaded_of_two_gets_it_and_never_one_that_was_tried() -> None:
    owners = directory(status("a", [0, 1]), status("b", [2, 3], queue_ms=5), status("c", [4, 5], queue_ms=1))
    hedges = Hedges(owners, busy_ms=10, seed=1)
    assert {hedges.other_lane(0, [0], [0], LATE_S) for _ in range(50)} == {4, 5}
    assert {hedges.other_lane(0, [0, 4], [0, 4], LATE_S) for _ in range(50)} == {2, 3}
    assert hedges.other_lane(0, [0, 2, 4], [0, 2, 4], LATE_S) is None
    assert hedges.why_unreachable(0) is None
    assert hedges.why_unreachable(7) == "silent"


def test_idle_workers_get_equal_parts() -> None:
    """Queues are often exactly 0: what else is compared then must not prefer anybody."""
    idle = directory(status("a", [0]), status("b", [1]), status("c", [2]))
    hedges = Hedges(idle, busy_ms=50.0, seed=7)
    asked = Counter(hedges.other_lane(7, [7], [7], LATE_S) for _ in range(300))
    assert min(asked[lane] for lane in (0, 1, 2)) >= 60


def test_a_lane_that_no_broker_takes_is_left_and_never_chosen() -> None:
    owners = directory(status("a", [0, 1]), status("b", [2, 3]), status("c", [4]))
    hedges = Hedges(owners, 50.0, waits=Waiting(lambda lane: 1.0 if lane in (0, 2, 4) else 0.0))
    assert hedges.why_unreachable(0) == "unsent"
    assert hedges.why_unreachable(1) is None
    assert {hedges.other_lane(1, [1], [1], LATE_S) for _ in range(50)} == {3}


def test_copies_go_to_lanes_whose_broker_acknowledges_while_there_are_some() -> None:
    """A killed broker counts as away after half a second: until then, copies on its other lanes are lost, too."""
    owners = directory(status("a", [0, 1, 2]), status("b", [3, 4, 5]), status("c", [6, 7]))
    hedges = Hedges(owners, 50.0, seed=1, waits=Waiting(lambda lane: 0.2 if lane % 3 == 0 else 0.0))
    assert {hedges.other_lane(2, [2], [2], LATE_S) for _ in range(100)} == {4, 5, 7}, "the broker of 3 and 6 does not"
    assert {hedges.other_lane(2, [2, 4], [2, 4], LATE_S) for _ in range(100)} == {7}
    late = Hedges(owners, 50.0, seed=1, waits=Waiting(lambda lane: 0.2))
    assert {late.other_lane(2, [2], [2], LATE_S) for _ in range(100)} == {3, 4, 5, 6, 7}, (
        "all are late: none is preferred"
    )


def test_brokers_are_looked_at_once_for_each_choice() -> None:
    """While a broker acknowledged nothing, a quarter of the client's time went into looking at it for every lane."""
    owners = directory(*(status(f"w{number}", range(16 * number, 16 * number + 16)) for number in range(8)))
    waits = Waiting(lambda lane: 1.0)
    assert Hedges(owners, 50.0, waits=waits).other_lane(0, [0], [], LATE_S) is None
    assert waits.asked == 1


@pytest.mark.parametrize("others", [[], [status("b", YOURS, queue_ms=60.0)]])
def test_where_no_other_worker_has_time_no_lanes_broker_is_looked_at(others: list[WorkerStatus]) -> None:
    """Every slow call asks, again and again: beyond its worker's rate that was a sixth of a client's time."""
    waits = Waiting(lambda lane: 0.0)
    hedges = Hedges(directory(status("a", MINE), *others), 50.0, waits=waits)
    assert hedges.other_lane(OURS, [OURS], [OURS], LATE_S) is None
    assert waits.asked == 0


def test_few_of_a_workers_lanes_are_looked_at_however_many_it_has() -> None:
    """While brokers were slow, looking at 16 lanes for each slow call took up to two fifths of a client's time."""
    looked_at: list[int] = []

    def look(lane: int) -> float:
        looked_at.append(lane)
        return 0.0

    waits = Waiting(look)
    assert Hedges(directory(status("a", range(64))), 50.0, waits=waits).other_lane(0, [0], [], LATE_S) is not None
    assert 0 < len(looked_at) <= LANES_LOOKED_AT


def test_an_owner_that_a_dead_broker_kept_the_request_from_is_asked_on_another_lane() -> None:
    """It has the prefix KV; another worker runs full inference."""
    owners = directory(status("a", [0, 1, 2]), status("b", [3, 4, 5]), status("c", [6, 7]))
    hedges = Hedges(owners, 50.0, seed=1, waits=Waiting(lambda lane: 0.2 if lane % 3 == 0 else 0.0))
    assert {hedges.other_lane(0, [0], [], LATE_S) for _ in range(100)} == {1, 2}
    assert {hedges.other_lane(0, [], [], LATE_S) for _ in range(100)} == {1, 2}, "its lane is known to be stuck"
    assert {hedges.other_lane(0, [0, 1], [1], LATE_S) for _ in range(100)} == {4, 5, 7}, "it has been asked"
    owners.take(status("a", [0, 1, 2], queue_ms=60.0))
    assert {hedges.other_lane(0, [0], [], LATE_S) for _ in range(100)} == {1, 2}, (
        "it is busy, and the request is its own"
    )
    late = Hedges(owners, 50.0, seed=1, waits=Waiting(lambda lane: 0.2))
    assert {late.other_lane(0, [0], [], LATE_S) for _ in range(100)} == {3, 4, 5, 6, 7}, (
        "nobody knows what is the matter"
    )


def test_an_owner_that_was_not_heard_yet_is_not_silent() -> None:
    """A new client has heard those who happened to speak first: it asked them what others' pinned KV were for."""
    clock = Clock(100.0)
    owners = OwnerDirectory(1000.0, clock=clock)
    hedges = Hedges(owners, 50.0, silence_ms=1000.0, clock=clock)
    owners.take(status("b", YOURS))
    assert hedges.why_unreachable(OURS) is None, "a may speak any moment"
    clock.now += 0.5
    owners.take(status("a", MINE))
    assert hedges.why_unreachable(OURS) is None
    clock.now += 0.9
    owners.take(status("b", YOURS))
    assert hedges.why_unreachable(OURS) is None
    clock.now += 0.2
    assert hedges.why_unreachable(OURS) == "silent", "it spoke, and does not any more"


def test_when_all_fall_silent_at_once_what_they_stated_last_counts() -> None:
    """It is their topic that stands still: a broker died. One that is silent alone is gone."""
    clock = Clock(100.0)
    owners = OwnerDirectory(1000.0, clock=clock)
    hedges = Hedges(owners, 50.0, seed=1)
    for each in (status("a", MINE), status("b", YOURS)):
        owners.take(each)
    clock.now += 0.9
    owners.take(status("b", YOURS))
    clock.now += 0.9
    assert hedges.why_unreachable(OURS) == "silent", "b speaks, a does not"
    clock.now += 0.9
    assert hedges.why_unreachable(OURS) is None, "nobody speaks: a is as good as b"
    assert hedges.other_lane(OURS, [OURS], [OURS], LATE_S) in YOURS
    clock.now += LAST_STATUS_MS / 1e3
    assert hedges.other_lane(OURS, [OURS], [OURS], LATE_S) is None
