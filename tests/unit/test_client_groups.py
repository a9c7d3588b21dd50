"""RelayClient and groups of workers, on real topics: routes come while it runs, a request stays in its group, and a
group whose workers are gone costs nobody an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from relaygr_stream.bus import newest as bus_newest
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.routes import read_routes, write_routes
from relaygr_stream.bus.topics import topic_exists
from relaygr_stream.client import RelayClient
from relaygr_stream.client.groups import LOOK_S
from relaygr_stream.errors import ConfigError, UnknownScenario
from relaygr_stream.ops.erase import erase_from_fleet
from relaygr_stream.ops.lane_growth import LiveFleet
from relaygr_stream.ops.rollout.process import RolloutRequest, run_rollout
from relaygr_stream.ops.rollout.routing import Bus
from relaygr_stream.ops.rollout.run import Plan
from relaygr_stream.ops.status.overview import listening
from relaygr_stream.settings import Scenario
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.routes import POSITIONS, RolloutProgress, Routes, group_settings, routes_topic
from relaygr_stream.wire.topic_files import lane_of, load_topics
from relaygr_stream.wire.worker_status import StatusReader
from tests.statuses import lane_statuses, worker_status
from tests.unit.client_peers import PREFIX, Responder, client_on, event, request, responder_on
from tests.waiting import until

LANES = 8
READER = StatusReader()


class World:
    """Two groups with a peer each that answers, and the routes."""

    def __init__(self, kafka: Kafka, own: Responder, other: Responder) -> None:
        self.kafka = kafka
        self.topics = load_topics(kafka)
        self.peers = {"": own, "next": other}
        self.routes = Routes.of_one("", LANES)
        self._other = load_topics(group_settings(Settings(kafka=kafka), "next", LANES).kafka)

    async def move(self, share: int, rollout: str = "") -> None:
        self.routes = self.routes.moved("next", LANES, share)
        if rollout:
            progress = RolloutProgress(state=rollout, group="next", steps=(POSITIONS,))
            self.routes = msgspec.structs.replace(self.routes, rollout=progress)
        await self.write()

    async def write(self) -> None:
        await topic_exists(self.kafka, routes_topic(self.topics), create=True)
        await write_routes(self.peers[""].producer, self.topics, READER, self.routes)

    async def state(self, group: str, state: str = "serving") -> None:
        """A worker of the group that owns all its lanes says so."""
        topic = (self._other if group else self.topics).worker_status.name
        status = worker_status("w", lane_statuses(range(LANES)), state=state)
        await self.peers[""].producer.send_and_wait(topic, encode(status), key=b"w")

    def asked(self, group: str) -> list[str]:
        return [asked.request_id for _, asked in self.peers[group].requests]


@pytest.fixture
async def world(embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(bus_newest, "ASK_S", 0.1)
    kafka = msgspec.structs.replace(embedded_settings, partitions=LANES)
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(responder_on(kafka))
        other = group_settings(Settings(kafka=kafka), "next", LANES).kafka
        yield World(kafka, own, await stack.enter_async_context(responder_on(other)))


@asynccontextmanager
async def opened(world: World) -> AsyncIterator[RelayClient]:
    async with client_on(world.kafka, silence_ms=60_000.0, timeout_ms=30_000.0) as relay:
        yield relay


async def both_serve(world: World, relay: RelayClient) -> None:
    """Both groups have a worker, and the client knows it of both: one that it has not heard of does not serve."""
    for group in ("", "next"):
        await world.state(group)

    def known() -> bool:
        groups = relay._groups
        return "next" in groups._others and all(
            groups.connection(relay._opened(), each).serves for each in ("", "next")
        )

    await until(known, "the client knows both groups' workers")


def user_of(group: str, routes: Routes) -> str:
    return next(user for user in map(str, range(1000)) if routes.group_of(user) == group)


async def test_without_routes_nothing_goes_elsewhere(world: World) -> None:
    async with opened(world) as relay:
        for number in range(20):
            await relay.rank(request(number, user_id=f"u{number}"))
        assert not await topic_exists(world.kafka, routes_topic(world.topics))
        assert relay.group_of("u1") == ""
    assert len(world.asked("")) == 20
    assert world.asked("next") == []


async def test_a_client_has_the_lanes_of_the_cluster_or_those_announced(world: World) -> None:
    """In the middle of a growth fewer are announced than there are, as the others have no owner yet."""
    unstated = msgspec.structs.replace(world.kafka, partitions=0)
    users = [f"u{number}" for number in range(20)]

    def lanes(relay: RelayClient) -> list[int]:
        return [relay.lane(user) for user in users]

    async with client_on(unstated) as relay:
        assert lanes(relay) == [lane_of(user, LANES) for user in users]
    world.routes = Routes.of_one("", LANES // 2, epoch=1)
    await world.write()
    async with client_on(unstated) as relay:
        assert lanes(relay) == [lane_of(user, LANES // 2) for user in users]
        world.routes = world.routes.grown("", LANES)
        await world.write()
        await until(lambda: lanes(relay) == [lane_of(user, LANES) for user in users], "those announced")


async def test_routes_that_come_while_it_runs_move_their_users_and_no_others(world: World) -> None:
    async with opened(world) as relay:
        await world.move(POSITIONS // 2)
        await until(lambda: {relay.group_of(str(user)) for user in range(40)} == {"", "next"}, "the client moves users")
        for number in range(40):
            await relay.rank(request(number, user_id=str(number)))
        expected = {f"r-{number}" for number in range(40) if world.routes.group_of(str(number)) == "next"}
        assert set(world.asked("next")) == expected
        assert len(world.asked("")) == 40 - len(expected)


async def test_a_client_that_starts_knows_the_routes_before_its_first_request(world: World) -> None:
    await world.move(POSITIONS)
    async with opened(world) as relay:
        await relay.rank(request(1))
    assert world.asked("next") == ["r-1"]


async def test_a_request_stays_in_the_group_it_was_announced_to(world: World) -> None:
    """By `request`, and by the verbs alone; its cancel, too."""
    await world.move(0)
    async with opened(world) as relay:
        await both_serve(world, relay)
        assert relay.group_of("u") == ""
        history = PREFIX
        async with relay.request("u", history, candidates=3, request_id="whole") as whole:
            await relay.announce(event(1))
            cancelled = relay.request("u", history, candidates=3, request_id="cancelled")
            await cancelled.__aenter__()
            await world.move(POSITIONS)
            await until(lambda: relay.group_of("u") == "next", "the user moves")
            await whole.rank([1, 2])
            await relay.rank(request(1))
            await cancelled.__aexit__(None, None, None)
            await relay.rank(request(2))  # a new one
    own, other = world.peers[""], world.peers["next"]
    await until(lambda: own.cancels, "the cancel")
    assert world.asked("") == ["whole", "r-1"]
    assert world.asked("next") == ["r-2"]
    assert [cancel.request_id for cancel in own.cancels] == ["cancelled"]
    assert other.cancels == []


async def test_users_of_a_group_without_workers_are_answered_by_one_that_serves(world: World) -> None:
    """Also those in the middle of a request; and they come back with the workers."""
    await world.move(POSITIONS)
    async with opened(world) as relay:
        await both_serve(world, relay)
        assert relay.group_of("u") == "next"
        async with relay.request("u", PREFIX, candidates=3, request_id="whole") as whole:
            await world.state("next", "draining")
            await until(lambda: relay.group_of("u") == "", "the group is gone")
            await whole.rank([1, 2])
        await world.state("next")
        await until(lambda: relay.group_of("u") == "next", "the group is back")
    assert world.asked("") == ["whole"]


@pytest.mark.parametrize("state", ["moving", "back"])
async def test_nobody_falls_back_to_a_model_on_trial(world: World, state: str) -> None:
    """Before its first users, and after its last ones, also where the own workers are not heard of for a while."""
    await world.move(0, state)
    async with opened(world) as relay:
        await both_serve(world, relay)
        await world.state("", "draining")
        await until(lambda: not relay._opened().serves, "the own group is gone")
        assert relay.group_of("u") == ""
        await relay.rank(request(1))
        await world.move(0, "done")
        await until(lambda: relay.group_of("u") == "next", "its rollout was well")
    assert world.asked("") == ["r-1"]
    assert world.asked("next") == []


async def test_a_request_in_the_log_of_a_group_that_ends_is_answered_by_another(world: World) -> None:
    """With the time that is left; not while the group serves, however long it takes."""
    await world.move(POSITIONS)
    world.peers["next"].hold = True
    async with opened(world) as relay:
        await both_serve(world, relay)
        asked = asyncio.create_task(relay.rank(request(1)))
        await until(lambda: world.asked("next"), "the request")
        await asyncio.sleep(3 * LOOK_S)
        assert world.asked("") == []
        await world.state("next", "stopped")
        await asked
        assert relay.registry.get_sample_value("relaygr_client_hedges_total", {"reason": "group"}) == 1
    assert world.asked("") == ["r-1"]
    (before,), (after,) = ([asked for _, asked in world.peers[group].requests] for group in ("next", ""))
    assert after.timeout_ms < before.timeout_ms


async def test_a_record_that_nobody_can_read_changes_nothing(world: World) -> None:
    await world.move(POSITIONS)
    async with opened(world) as relay:
        name = routes_topic(world.topics).name
        await world.peers[""].producer.send_and_wait(name, b"\x00", key=b"default")
        world.routes = world.routes.moved("next", LANES, 0)
        await write_routes(world.peers[""].producer, world.topics, READER, world.routes)
        await until(lambda: relay.group_of("u") == "")
    assert (await read_routes(world.kafka, world.topics, READER)).get("") == world.routes


async def test_the_client_tells_the_shares_that_it_knows(world: World) -> None:
    await world.move(2500)
    async with opened(world) as relay:
        share = relay.registry.get_sample_value
        assert share("relaygr_client_route_share", {"group": "next"}) == 0.25
        assert share("relaygr_client_route_share", {"group": "default"}) == 0.75


async def test_both_numbers_of_lanes_may_differ(world: World) -> None:
    """A group has its own number of lanes, which the routes name."""
    few = group_settings(Settings(kafka=world.kafka), "few", 2)
    async with responder_on(few.kafka) as peer:
        world.routes = world.routes.moved("few", 2, POSITIONS)
        await topic_exists(world.kafka, routes_topic(world.topics), create=True)
        async with Producer(world.kafka, client_id="routes") as producer:
            await write_routes(producer, world.topics, READER, world.routes)
        async with opened(world) as relay:
            for number in range(10):
                await relay.rank(request(number, user_id=f"u{number}"))
            assert {relay.lane(f"u{number}", "few") for number in range(10)} == {0, 1}
        assert {record.lane for record, _ in peer.requests} == {0, 1}


async def test_a_group_that_routes_name_no_more_is_left(world: World) -> None:
    """Else a writer of the topic could fill a client's memory with names."""
    await world.move(POSITIONS)
    async with opened(world) as relay:
        await until(lambda: relay.group_of("u") == "next")
        world.routes = msgspec.structs.replace(Routes.of_one("", LANES), epoch=world.routes.epoch + 1)
        await write_routes(world.peers[""].producer, world.topics, READER, world.routes)
        await until(lambda: relay.group_of("u") == "" and not relay._groups._others, "the group is left")
        assert relay.registry.get_sample_value("relaygr_client_route_share", {"group": "next"}) is None
        await relay.rank(request(1))
    assert world.asked("") == ["r-1"]


async def test_lanes_that_are_announced_are_gone_by_in_each_group(world: World) -> None:
    async with opened(world) as relay:
        await world.move(POSITIONS // 2)
        await until(lambda: len(relay._groups._others) == 1, "the client reaches the other group")
        connection = relay._groups._others["next"]
        for group, lanes in (("", 2 * LANES), ("next", 4 * LANES)):
            world.routes = world.routes.grown(group, lanes)
            await write_routes(world.peers[""].producer, world.topics, READER, world.routes)
            users = [str(user) for user in range(20)]
            expected = [lane_of(user, lanes) for user in users]
            await until(lambda: [relay.lane(user, group) for user in users] == expected, f"{group} has {lanes} lanes")  # noqa: B023
        assert relay._groups._others["next"] is connection, "it goes on"


# ---- scenarios ----


@asynccontextmanager
async def feed_on(world: World) -> AsyncIterator[Responder]:
    """A peer that answers in the group of scenario feed, which has two lanes, and its routes."""
    settings = group_settings(Settings(kafka=world.kafka), "feed", 2)
    async with responder_on(settings.kafka) as peer:
        await topic_exists(world.kafka, routes_topic(world.topics), create=True)
        await write_routes(peer.producer, world.topics, READER, Routes.of_one("feed", 2, epoch=1), "feed")
        yield peer


async def test_a_scenarios_requests_go_to_its_group_and_all_others_where_they_went(world: World) -> None:
    async with feed_on(world) as feed, opened(world) as relay:
        await relay.rank(request(1))
        named = msgspec.structs.replace(request(2), scenario="feed")
        await relay.announce(msgspec.structs.replace(event(2), scenario="feed"))
        await relay.rank(named)
        async with relay.request("u", PREFIX, candidates=3, request_id="whole", scenario="feed") as whole:
            await whole.rank([1, 2])
        cancelled = relay.request("u", PREFIX, candidates=3, request_id="cancelled", scenario="feed")
        async with cancelled:
            pass
        await until(lambda: feed.cancels and len(feed.events) == 3, "the cancel and the events")
        assert relay.group_of("u") == ""
    assert world.asked("") == ["r-1"]
    assert [(asked.request_id, asked.scenario) for _, asked in feed.requests] == [("r-2", "feed"), ("whole", "feed")]
    assert world.peers[""].requests[0][1].scenario is msgspec.UNSET


async def test_a_tenants_scenario_is_that_of_its_section(world: World) -> None:
    async with feed_on(world) as feed, client_on(world.kafka, silence_ms=60_000.0, timeout_ms=30_000.0) as plain:
        sections = (Scenario(name="feed", tenants=("shop",)),)
        settings = msgspec.structs.replace(plain._settings, scenarios=sections)
        async with RelayClient(settings=settings) as relay:
            for number, tenant in enumerate(("shop", "other", "")):
                await relay.rank(msgspec.structs.replace(request(number), tenant=tenant))
            async with relay.request("u", PREFIX, candidates=3, request_id="whole", tenant="shop") as whole:
                await whole.rank([1, 2])
            assert [relay.scenario_of(tenant) for tenant in ("shop", "other", "")] == ["feed", "", ""]
    assert [asked.request_id for _, asked in feed.requests] == ["r-0", "whole"]
    assert world.asked("") == ["r-1", "r-2"]


async def test_a_scenario_that_nothing_serves_is_a_typed_error_and_never_anothers_request(world: World) -> None:
    """Its models differ: a ranking by another group would have wrong scores."""
    async with feed_on(world), opened(world) as relay:
        with pytest.raises(UnknownScenario, match="no group of workers serves scenario 'ads'"):
            await relay.rank(msgspec.structs.replace(request(1), scenario="ads"))
        with pytest.raises(UnknownScenario):
            await relay.announce(msgspec.structs.replace(event(1), scenario="ads"))
        with pytest.raises(UnknownScenario):
            await relay.cancel("u", "r-1", scenario="ads")
        with pytest.raises(UnknownScenario):
            async with relay.request("u", PREFIX, candidates=3, scenario="ads"):
                pass
        groups, own = relay._groups, relay._opened()
        assert groups.group_of(own, "u", stated="feed") == "", "a caller's id names no group of another scenario"
        assert groups.group_of(own, "u", stated="", scenario="feed") == "feed"
    assert world.asked("") == []


async def test_a_scenarios_group_without_workers_is_replaced_by_no_other_scenarios(world: World) -> None:
    async with feed_on(world), opened(world) as relay:
        await world.state("")
        await until(lambda: relay._owners.serves, "the client knows the worker of the group without a name")
        assert relay.group_of("u", "feed") == "feed"
        assert not await relay.worker_serves(0.0, "feed")
        status = worker_status("f", lane_statuses(range(2)))
        topic = load_topics(group_settings(Settings(kafka=world.kafka), "feed", 2).kafka).worker_status.name
        await world.peers[""].producer.send_and_wait(topic, encode(status), key=b"f")
        assert await relay.worker_serves(60.0, "feed")
        assert await relay.worker_serves(60.0)


async def test_a_rollout_takes_no_scenarios_group(world: World) -> None:
    """Its users would be ranked by another model, and the scenario's by none that it has chosen."""
    async with feed_on(world):
        bus = Bus(Settings(kafka=world.kafka))
        assert await bus.scenarios_of("feed") == ["feed"]
        assert await bus.scenarios_of("next") == []
        context = ProcessContext(bus.settings, asyncio.Event(), CollectorRegistry())
        asked = RolloutRequest(Plan.from_shares([1.0], 1.0), group="feed")
        with pytest.raises(ConfigError, match="--group feed serves scenario feed"):
            await run_rollout(context, asked, print)


async def test_lanes_of_a_scenarios_group_are_announced_to_its_clients(world: World) -> None:
    settings = Settings(kafka=world.kafka)
    group = group_settings(settings, "feed", 2)
    async with feed_on(world), opened(world) as relay, listening(group, load_topics(group.kafka)) as (view, _):
        bus = Bus(settings)
        fleet = LiveFleet(bus, "feed", group, view)
        assert await fleet.announced() == 2
        await fleet.announce(8)
        assert await fleet.announced() == 8
        await until(lambda: relay.lane("u5", "feed") == lane_of("u5", 8) != lane_of("u5", 2), "the client hears of it")
        assert (await bus.read()).groups == ("",), "no other routes change"
        with pytest.raises(ConfigError, match="group ads: no routes name it, only default, feed"):
            await bus.naming("ads")


@pytest.mark.stack
async def test_an_erasure_asks_the_groups_of_all_scenarios(world: World) -> None:
    async with feed_on(world):
        done = await erase_from_fleet(Settings(kafka=world.kafka), "u", "", wait_s=0.0)
    prefix = world.kafka.prefix
    assert [each.kafka.prefix for each in done.groups] == [prefix, f"{prefix}feed."]
