"""A delegated signal on its way: to the delegate's lane, then the owner is told and the event done; nothing is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from relaygr_stream.bus.producer import NO_LEADER
from relaygr_stream.errors import BrokerError, BrokerUnavailable, MessageTooLarge
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.trigger import outbox
from relaygr_stream.trigger.core import Delegate, Signal, TriggerCore
from relaygr_stream.trigger.decision import Decision
from relaygr_stream.trigger.delegation import Delegation, Place
from relaygr_stream.trigger.outbox import Outbox, SignalSending
from relaygr_stream.trigger.sent import SentBooks
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import PreInferSignal
from relaygr_stream.wire.records import HEADER_KIND, Record
from relaygr_stream.wire.refusals import Refusal
from relaygr_stream.wire.topic_files import load_topics
from tests.done import DoneRecords
from tests.unit.trigger.parts import POLICY, event
from tests.waiting import until

TOPICS = load_topics(Kafka(partitions=8))
PLACE = Place("w2", 1, 6, 250, 25.0)
LANE = 3
RECORD = Record(TOPICS.retrieval.name, LANE, 11, 0, b"u", b"", ())


class World:
    """One lane's signals before a producer that the test settles."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes, dict[str, Any]]] = []
        self.acknowledged: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.refused_at_once = False
        self.leader = 1
        self.leaders: dict[int, int] = {}  # of lanes with another one
        self.room = asyncio.Event()
        self.room.set()
        self.together: list[int] = []  # how many were sent together
        self.told: list[tuple[str, Refusal]] = []
        self.done = DoneRecords()
        self.failed = 0
        self.paused: list[int | None] = []  # lanes; None: all
        producer = SimpleNamespace(send=self.send, send_together=self.send_together, broker_of=self.broker_of)
        notices = SimpleNamespace(add=lambda owner, lane, refusal: self.told.append((owner, refusal)))
        metrics = SimpleNamespace(signals_failed=SimpleNamespace(inc=self.count_failed))
        owners = OwnerDirectory(3000.0)
        policy = replace(POLICY, delegate=True)
        delegation = Delegation(owners, SentBooks(), TOPICS.lanes)
        self.core = TriggerCore(policy, owners, delegation=delegation)
        self.core.take_lane(LANE)
        assert self.core.delegation is not None
        self.core.delegation.not_sent = self.count_paused  # type: ignore[method-assign]
        self.outbox = Outbox(self.core, TOPICS, producer, notices, metrics, self.done)  # type: ignore[arg-type]

    def broker_of(self, topic: str, lane: int) -> int:
        return self.leaders.get(lane, self.leader)

    def count_failed(self) -> None:
        self.failed += 1

    def count_paused(self, now_s: float, lane: int | None = None) -> None:
        self.paused.append(lane)

    async def send(self, topic: str, value: bytes, **more: Any) -> asyncio.Future[int]:
        if self.refused_at_once:
            raise BrokerError("no grant")
        self.sent.append((topic, value, more))
        await self.room.wait()
        return self.acknowledged

    async def send_together(self, topic: str, messages: list[Any], **more: Any) -> None:
        self.together.append(len(messages))

    async def delegate(self, number: int = 1, lanes: tuple[int, ...] = (PLACE.lane,), *before: SignalSending) -> None:
        sending = list(before)
        asked = event(25, "r", "u", tenant="shop", rank_in_ms=300.0)
        for lane in lanes * number:
            place = PLACE._replace(lane=lane)
            decision = Decision("delegated", 25, 40.0, 30.0, PLACE.nbytes, PLACE.cost_ms, 260.0, place)
            sending.append(SignalSending(Delegate(LANE, asked, decision, "w1"), RECORD))
        await self.outbox.send(LANE, sending)

    def own(self) -> SignalSending:
        """A signal of the lane's own."""
        return SignalSending(Signal(LANE, event(25, "own", "u"), Decision("admitted", 25, 40.0)), RECORD)


async def test_it_goes_to_the_delegates_lane_and_the_owner_learns_of_it_once_it_is_there() -> None:
    world = World()
    await world.delegate()
    ((topic, value, more),) = world.sent
    assert (topic, more["partition"], more["key"]) == (TOPICS.ranking.name, 6, b"u")
    assert more["headers"] == [(HEADER_KIND, b"delegated")]
    signal = decode(PreInferSignal, value)
    assert (signal.request_id, signal.tenant, signal.delegate, len(signal.prefix)) == ("r", "shop", "w1", 25)
    assert (signal.rank_in_ms, signal.life_ms) == (260.0, POLICY.life_ms), "the event was 40 ms old"
    assert (world.told, world.done) == ([], []), "a trigger that ends now leaves the event to the next"
    world.acknowledged.set_result(5)
    await asyncio.sleep(0)
    assert world.told == [("w1", Refusal("r", "delegated", "shop", "w2"))]
    assert world.done == [RECORD]


@pytest.mark.parametrize("at_once", [True, False])
async def test_one_that_no_broker_takes_leaves_the_request_to_its_owner(at_once: bool) -> None:
    world = World()
    world.refused_at_once = at_once
    await world.delegate()
    if not at_once:
        world.acknowledged.set_exception(BrokerError("no grant"))
        await asyncio.sleep(0)
    assert world.told == [("w1", Refusal("r", "delegated", "shop"))], "no delegate: nothing is passed on"
    assert world.done == [RECORD]
    assert (world.failed, world.paused) == (1, [None])


async def test_where_one_broker_is_away_its_lanes_alone_get_nothing_for_a_while() -> None:
    world = World()
    await world.delegate()
    world.acknowledged.set_exception(BrokerUnavailable("no acknowledgement"))
    await asyncio.sleep(0)
    assert world.paused == [PLACE.lane]


async def test_a_delegates_lane_without_a_leader_is_not_waited_for() -> None:
    world = World()
    world.leader = NO_LEADER
    await world.delegate()
    assert (world.sent, world.told) == ([], [("w1", Refusal("r", "delegated", "shop"))])
    assert (world.done, world.paused) == ([RECORD], [PLACE.lane])


async def test_a_delegates_lane_that_takes_nothing_holds_up_neither_own_signals_nor_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "SENDING_S", 0.02)
    world = World()
    world.room.clear()
    sending = asyncio.create_task(world.delegate(3, (PLACE.lane,), world.own()))
    await until(lambda: len(world.sent) == 1)
    assert world.together == [1], "own signals wait for no delegate"
    await sending
    assert len(world.sent) == 1, "one wait tells of the lane"
    assert world.told == [("w1", Refusal("r", "delegated", "shop"))] * 3
    assert world.done == [RECORD] * 3


async def test_a_hung_broker_is_waited_for_once_whichever_lanes_it_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "SENDING_S", 0.02)
    world = World()
    world.room.clear()
    world.leaders = {5: 2}
    await world.delegate(lanes=(6, 7, 5, 4))
    assert [more["partition"] for _, _, more in world.sent] == [6, 5]
    assert (len(world.told), world.paused) == (4, [6, 5]), "only what was tried rests"


async def test_a_message_that_is_too_large_says_nothing_of_others() -> None:
    """One event a client made large enough switched delegation off for all, for ten seconds."""
    world = World()
    await world.delegate()
    world.acknowledged.set_exception(MessageTooLarge("too large"))
    await asyncio.sleep(0)
    assert (world.failed, world.paused, world.done) == (1, [], [RECORD])


async def test_own_signals_of_a_lane_without_a_leader_are_not_waited_for() -> None:
    """Each turn of the lane waited for the request timeout, and what piled up stopped every lane."""
    world = World()
    world.leaders[LANE] = NO_LEADER
    await world.outbox.send(LANE, [world.own()])
    assert (world.together, world.failed, world.done) == ([], 1, [RECORD])


async def test_a_trigger_that_stops_meanwhile_leaves_the_event_to_the_next() -> None:
    world = World()
    await world.delegate()
    world.acknowledged.cancel()
    await asyncio.sleep(0)
    assert (world.told, world.done) == ([], [])
