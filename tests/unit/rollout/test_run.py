"""Whole rollouts on a broker, with groups that state themselves as workers do: steps, ends, returns, refusals."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.routes import read_routes
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics, verify_topics
from relaygr_stream.errors import ConfigError, RelayError
from relaygr_stream.ops.rollout import process, warming
from relaygr_stream.ops.rollout.process import RolloutRequest, run_rollout, take_back
from relaygr_stream.ops.rollout.routing import Bus
from relaygr_stream.ops.rollout.run import Plan
from relaygr_stream.ops.rollout.warming import Warming
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.erase import KIND as ERASE
from relaygr_stream.wire.erase import Erase, encode_erase
from relaygr_stream.wire.messages import PreInferSignal, RankingRequest, ScoreReply
from relaygr_stream.wire.records import (
    HEADER_CORRELATION,
    HEADER_KIND,
    HEADER_REPLY_PARTITION,
    KIND_DELEGATED,
    Record,
    kind_of,
)
from relaygr_stream.wire.routes import POSITIONS, Routes, group_settings
from relaygr_stream.wire.topic_files import lane_of, load_topics
from relaygr_stream.wire.worker_status import WITHIN_SLO, StatusReader
from tests.statuses import lane_statuses, worker_status
from tests.unit.client_peers import PREFIX, request, responder_on, scored, scores_for
from tests.waiting import until

LANES = 8


class Group:
    """One worker of a group, by its statuses: it answers a hundred rankings between two of them."""

    def __init__(self, settings: Settings, version: str) -> None:
        self.topic = load_topics(settings.kafka).worker_status.name
        self.version = version
        self.failing = 0.0
        self.interval = 2  # of the latencies
        self.answers = dict.fromkeys(("answers_ok", "answers_failed", "outcome_hbm", WITHIN_SLO), 0.0)

    async def run(self, producer: Producer) -> None:
        sent_ms = 1
        while True:
            ok = 100 * (1 - self.failing)
            for name, more in zip(self.answers, (ok, 100 - ok, ok, ok), strict=True):
                self.answers[name] += more
            sent_ms += 100
            status = worker_status(
                "w",
                lane_statuses(range(LANES)),
                model_version=self.version,
                counters=dict(self.answers),
                hbm_bytes=1 << 30,
                delegated_bytes=1 << 20,
                busy_share=0.0,
                latencies={"hbm": (*[0] * self.interval, int(self.answers["answers_ok"]))},
                sent_ms=sent_ms,
            )
            await producer.send_and_wait(self.topic, encode(status), key=b"w")
            await asyncio.sleep(0.05)


class World:
    """A relay whose users are all in the group "", and what the command says."""

    def __init__(self, kafka: Kafka, producer: Producer) -> None:
        self.settings = Settings(kafka=kafka)
        self.producer = producer
        self.lines: list[str] = []
        self.context = ProcessContext(self.settings, asyncio.Event(), CollectorRegistry())
        self.old = Group(self.settings, "m1")
        self.new_settings = group_settings(self.settings, "next", LANES)
        self.new = Group(self.new_settings, "m2")

    async def share(self, group: str = "next") -> int:
        routes = await read_routes(self.settings.kafka, load_topics(self.settings.kafka), StatusReader())
        return 0 if routes is None else routes.share_of(group)

    def say(self, line: str) -> None:
        self.lines.append(line)

    async def roll_out(self, hold_s: float = 0.2, **asked: object) -> None:
        plan = Plan.of([0.05, 0.5, 1.0], hold_s)
        plain: dict[str, Any] = {"unlike": True}  # no rankings to compare
        await run_rollout(self.context, RolloutRequest(plan, **{**plain, **asked}), self.say)

    @asynccontextmanager
    async def stating(self, *groups: Group) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(group.run(self.producer)) for group in groups]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


@pytest.fixture
async def world(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[World]:
    """The parameter: by how much the lanes of the group "" have grown."""
    monkeypatch.setattr(process, "FIRST_S", 0.0)
    monkeypatch.setattr(warming, "SEEN_S", 0.0)
    kafka = msgspec.structs.replace(embedded_settings, partitions=LANES)
    await apply_topics(msgspec.structs.replace(kafka, partitions=LANES * getattr(request, "param", 1)))
    await apply_topics(group_settings(Settings(kafka=kafka), "next", LANES).kafka)
    async with Producer(kafka, client_id="groups") as producer:
        yield World(kafka, producer)


@pytest.mark.stack
async def test_all_users_move_by_steps_and_the_next_rollout_comes_back(world: World) -> None:
    async with world.stating(world.old, world.new):
        await world.roll_out()
        assert [line.split(":")[1].split("%")[0].strip() for line in world.lines if line.startswith("step")] == [
            "5",
            "50",
            "100",
        ]
        assert world.lines[-1] == "done: all users are in group next"
        assert await world.share() == POSITIONS
        sample = world.context.registry.get_sample_value
        assert sample("relaygr_rollout_share", {"group": "next", "version": "m2"}) == 1.0
        assert sample("relaygr_rollout_step") == 3
        world.lines.clear()
        world.context = ProcessContext(world.settings, asyncio.Event(), CollectorRegistry())
        await world.roll_out()
        assert world.lines[-1] == "done: all users are in group default"
        assert await world.share("") == POSITIONS


def in_turn(request: RankingRequest) -> ScoreReply:
    """As a model whose item ids are another's."""
    return msgspec.structs.replace(scored(request), scores=(-scores_for(request)).tobytes())


async def ask(world: World) -> None:
    """Rankings in the old group, as clients send them."""
    topic = load_topics(world.settings.kafka).ranking.name
    for number in itertools.count():
        asked = request(number, candidates=(number, number + 7, number + 3), user_id=f"u{number}")
        headers = [(HEADER_CORRELATION, b"%d" % number), (HEADER_REPLY_PARTITION, b"3")]
        lane = lane_of(asked.user_id, LANES)
        await world.producer.send_and_wait(topic, encode(asked), partition=lane, headers=headers)


@pytest.mark.stack
@pytest.mark.parametrize("answers", [scored, in_turn], ids=["alike", "unlike"])
async def test_nobody_moves_to_a_model_that_ranks_the_same_in_another_order(
    world: World, answers: Callable[[RankingRequest], ScoreReply]
) -> None:
    async with (
        world.stating(world.old, world.new),
        responder_on(world.settings.kafka) as here,
        responder_on(world.new_settings.kafka, lambda asked: [answers(asked)]) as there,
    ):
        asking = asyncio.create_task(ask(world))
        if answers is scored:
            await world.roll_out(unlike=False, warm=False)
        else:
            with pytest.raises(RelayError, match=r"nobody moved: .* in another order: rank correlation -1"):
                await world.roll_out(unlike=False, warm=False)
        asking.cancel()
        await asyncio.wait({asking})
    assert await world.share() == (POSITIONS if answers is scored else 0)
    assert {asked.mode for _, asked in there.requests} == {"full"}
    assert {asked.mode for _, asked in here.requests} == {"auto"}
    if answers is in_turn:
        assert not any(line.startswith("step") for line in world.lines)
        routes = await read_routes(world.settings.kafka, load_topics(world.settings.kafka), StatusReader())
        assert routes is not None
        assert routes.rollout
        assert (routes.rollout.state, "another order" in routes.rollout.reason) == ("back", True)


@pytest.mark.parametrize(("world", "grown"), [(1, 1), (2, 2)], indirect=["world"], ids=["as stated", "grown"])
async def test_users_are_prefilled_in_the_new_group_before_they_move(world: World, grown: int) -> None:
    """Each once, by delegated signals on its lane there; nobody who stays, and nobody of whom nothing is to be used."""
    old, new = (load_topics(settings.kafka) for settings in (world.settings, world.new_settings))
    signals: list[tuple[int, PreInferSignal]] = []

    def on_records(records: list[Record]) -> None:
        for record in records:
            assert kind_of(record.headers) == KIND_DELEGATED
            signals.append((record.lane, decode(PreInferSignal, record.value)))

    first = Routes.of_one("", LANES).moved("next", LANES, 500)
    users = [f"u{number}" for number in range(100)]
    canary = {user for user in users if first.group_of(user) == "next"}
    tail = TopicTail(world.settings.kafka, new.ranking.name, range(LANES), "earliest", on_records)
    async with world.stating(world.old, world.new), tail:
        rolling = asyncio.create_task(world.roll_out(hold_s=3600))
        await until(lambda: any(line.startswith("step 1") for line in world.lines))
        for number, user in enumerate(users):
            asked = msgspec.structs.replace(request(number, user_id=user), mode="full" if number % 5 == 0 else "auto")
            lane = lane_of(user, grown * LANES)
            await world.producer.send_and_wait(old.ranking.name, encode(asked), key=user.encode(), partition=lane)
        half = first.moved("next", LANES, POSITIONS // 2)
        expected = {user for user in users[1:] if half.group_of(user) == "next"} - canary - set(users[::5])
        await until(lambda: len(signals) >= len(expected) > 20, "the signals")
        world.context.stop.set()
        await rolling
    assert sorted(signal.user_id for _, signal in signals) == sorted(expected)
    assert all(lane == lane_of(signal.user_id, LANES) for lane, signal in signals)
    assert {signal.prefix for _, signal in signals} == {PREFIX}


@pytest.mark.parametrize("world", [2], indirect=True)
async def test_a_new_group_has_as_many_lanes_as_the_one_before_has_grown_to(world: World) -> None:
    bus = Bus(world.settings)
    await bus.make_topic()
    await bus.write(world.producer, Routes.of_one("", LANES).grown("", 2 * LANES))
    rolling = asyncio.create_task(world.roll_out(group="third"))
    await until(lambda: any(line.startswith("made ") for line in world.lines), "the group's topics")
    rolling.cancel()
    await asyncio.wait({rolling})
    rows = await verify_topics(group_settings(world.settings, "third", 2 * LANES).kafka)
    assert {row.found.partitions for row in rows if row.found and row.topic.lanes} == {2 * LANES}


async def test_a_user_who_is_erased_is_not_prefilled(world: World) -> None:
    """Nor by a ranking of before, that is read later; the routes name the group before anyone is prefilled in it."""
    topics, reader = load_topics(world.new_settings.kafka), StatusReader()
    found = Warming(world.new_settings, "next", LANES, world.producer, reader)

    def asked(user: str, at_ms: int) -> Record:
        return Record("ranking", 0, 0, at_ms, user.encode(), encode(request(user_id=user)), ())

    async def known(*users: str) -> None:
        running = asyncio.create_task(found.run())
        await until(lambda: set(found._known.keys) == set(users), f"only {users} are known")
        running.cancel()
        await asyncio.wait({running})

    erase = Erase.request("e" * 16, "ann", now_ms(), reader)
    headers = ((HEADER_KIND, ERASE.encode()),)
    found.on_rankings([asked("ann", 1), asked("bob", 1)])
    found.on_statuses([Record(topics.worker_status.name, 0, 0, 5, b"erase/e", encode_erase(erase), headers)])
    found.on_rankings([asked("ann", 4)])
    await known("bob")
    found.on_rankings([asked("ann", 6)])
    await known("ann", "bob")
    async with world.stating(world.old):
        rolling = asyncio.create_task(world.roll_out())
        await until(lambda: len(world.lines) > 1)
        while True:
            routes = await read_routes(world.settings.kafka, load_topics(world.settings.kafka), reader)
            if routes is not None and "next" in routes.groups:
                break
        rolling.cancel()
        await asyncio.wait({rolling})
    assert routes.share_of("next") == 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"failing": 0.5}, "failed or were rejected"), ({"interval": 12}, "P99 of `relay` is .* the limit is 2×")],
    ids=["fails", "slow"],
)
async def test_users_come_back_and_the_reason_stays(world: World, changes: dict[str, Any], why: str) -> None:
    vars(world.new).update(changes)
    async with world.stating(world.old, world.new):
        with pytest.raises(RelayError, match=why):
            await world.roll_out(hold_s=3600)
    assert await world.share() == 0
    routes = await read_routes(world.settings.kafka, load_topics(world.settings.kafka), StatusReader())
    assert routes is not None
    assert routes.rollout
    assert routes.rollout.state == "back"
    assert re.search(why, routes.rollout.reason)


@pytest.mark.stack
async def test_a_later_step_goes_back_all_the_way(world: World) -> None:
    async with world.stating(world.old, world.new):
        rolling = asyncio.create_task(world.roll_out(hold_s=1.0))
        await until(lambda: any(line.startswith("step 2") for line in world.lines))
        world.new.failing = 0.5
        with pytest.raises(RelayError, match="failed or were rejected"):
            await rolling
    assert await world.share() == 0


@pytest.mark.stack
async def test_what_is_stopped_stays_and_goes_on(world: World) -> None:
    async with world.stating(world.old, world.new):
        rolling = asyncio.create_task(world.roll_out(hold_s=3600))
        await until(lambda: any(line.startswith("step 1") for line in world.lines))
        world.context.stop.set()
        await rolling
        assert await world.share() == 500
        assert "stay where they are" in world.lines[-1]
        world.context = ProcessContext(world.settings, asyncio.Event(), CollectorRegistry())
        world.lines.clear()
        await world.roll_out()
        assert [line[:6] for line in world.lines if line.startswith("step")] == ["step 2", "step 3"]


@pytest.mark.stack
async def test_nobody_moves_before_every_lane_has_an_owner(world: World) -> None:
    async with world.stating(world.old):
        rolling = asyncio.create_task(world.roll_out())
        await until(lambda: len(world.lines) > 1)
        await asyncio.sleep(3 * process.HEARD_S)
        assert not any(line.startswith("step") for line in world.lines)
        async with world.stating(world.new):
            await rolling
    assert await world.share() == POSITIONS


@pytest.mark.stack
async def test_back_by_hand_needs_workers_there(world: World) -> None:
    with pytest.raises(RelayError, match="has no users"):
        await take_back(world.settings, None, world.say)
    async with world.stating(world.new), world.stating(world.old):
        await world.roll_out()
    async with world.stating(world.old):
        await take_back(world.settings, None, world.say)
    assert await world.share() == 0


async def test_a_rollout_ends_where_another_command_has_moved_its_users(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next step, and the figures that it states, would take them along again."""
    write = Bus.write

    async def after_the_other(own: Bus, producer: Producer, routes: Routes) -> None:
        if any(line.startswith("step 1") for line in world.lines):
            monkeypatch.setattr(Bus, "write", write)
            await take_back(world.settings, None, world.say)
        await write(own, producer, routes)

    monkeypatch.setattr(Bus, "write", after_the_other)
    async with world.stating(world.old, world.new):
        with pytest.raises(RelayError, match=r"another command .* users are in next 0%, default 100%"):
            await world.roll_out()
    assert not any(line.startswith("step 2") for line in world.lines)
    assert await world.share() == 0


async def test_back_by_hand_overtakes_a_rollout_that_takes_a_step_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = Bus(world.settings)
    await bus.make_topic()
    first = Routes.of_one("", LANES).moved("next", LANES, 500)
    await bus.write(world.producer, first)
    write = Bus.write

    async def behind(own: Bus, producer: Producer, routes: Routes) -> None:
        monkeypatch.setattr(Bus, "write", write)
        await bus.write(producer, first.moved("next", LANES, 5000))
        await own.write(producer, routes)

    monkeypatch.setattr(Bus, "write", behind)
    async with world.stating(world.old):
        await take_back(world.settings, "next", world.say)
    assert await world.share() == 0


@pytest.mark.stack
async def test_back_to_a_group_without_workers_is_refused(world: World) -> None:
    async with world.stating(world.old, world.new):
        await world.roll_out()
    world.settings = msgspec.structs.replace(
        world.settings, trigger=msgspec.structs.replace(world.settings.trigger, max_status_age_ms=1.0)
    )
    with pytest.raises(RelayError, match="start its workers first"):
        await take_back(world.settings, None, world.say)
    assert await world.share() == POSITIONS


async def test_workers_that_are_there_already_are_not_joined(world: World) -> None:
    async with world.stating(world.old, world.new):
        with pytest.raises(ConfigError, match="has workers already"):
            await world.roll_out(up=())


async def test_who_is_stopped_while_no_broker_takes_the_routes_goes_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With processes of its own: the write may have come through, and its workers end with it."""
    writing = asyncio.Event()
    write = Bus.write

    async def slow(bus: Bus, producer: Producer, routes: Routes) -> None:
        await write(bus, producer, routes)
        if routes.share_of("next"):
            writing.set()
            await asyncio.Event().wait()

    class Up:
        exit_code = None

    @asynccontextmanager
    async def started(*_: object) -> AsyncIterator[Up]:
        async with world.stating(world.new):
            yield Up()

    monkeypatch.setattr(Bus, "write", slow)
    monkeypatch.setattr(process, "_started", started)
    monkeypatch.setattr(process, "LISTEN_S", 0.0)
    async with world.stating(world.old):
        rolling = asyncio.create_task(world.roll_out(up=()))
        await writing.wait()
        assert await world.share() == 500
        world.context.stop.set()
        with pytest.raises(RelayError, match="it was stopped"):
            await rolling
    assert await world.share() == 0
