"""A request's scenario at the gateway: that of the token's tenant, never of what a caller says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from relaygr_stream.bus.routes import write_routes
from relaygr_stream.bus.topics import topic_exists
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import RequestEvent
from relaygr_stream.wire.routes import Routes, group_settings, routes_topic
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader
from tests.unit.client_peers import Responder, responder_on
from tests.unit.gateway.doors import ANNOUNCE, OTHER, RANK, OpenDoor, door_on
from tests.waiting import until

SECTIONS = (Scenario(name="feed", tenants=("shop",)), Scenario(name="ads", tenants=("library",)))


@asynccontextmanager
async def served(kafka: Kafka) -> AsyncIterator[tuple[Responder, Responder, OpenDoor]]:
    """The group without a name, that of feed with its routes, and a gateway. Nothing serves ads."""
    topics, lanes = load_topics(kafka), load_topics(kafka).lanes
    feed_settings = group_settings(Settings(kafka=kafka, scenarios=SECTIONS), "feed", lanes)
    async with responder_on(kafka) as own, responder_on(feed_settings.kafka) as feed:
        await topic_exists(kafka, routes_topic(topics), create=True)
        await write_routes(own.producer, topics, StatusReader(), Routes.of_one("feed", lanes, epoch=1), "feed")
        async with door_on(kafka, scenarios=SECTIONS) as door:
            yield own, feed, door


async def test_the_tokens_tenant_says_the_scenario_and_the_caller_cannot(embedded_settings: Kafka) -> None:
    async with served(embedded_settings) as (own, feed, door):
        announced = await door.ask("POST", "/v1/announce", ANNOUNCE)
        request_id = announced.value["request_id"]
        assert (announced.status, request_id.rpartition("-")[2]) == (202, "feed")
        ranked = await door.ask("POST", "/v1/rank", {**RANK, "request_id": request_id}, relaygr_timeout_ms="20000")
        assert ranked.status == 200
        assert (await door.ask("DELETE", f"/v1/requests/{request_id}")).status == 204
        await until(lambda: feed.events and feed.cancels, "announced and cancelled")
        assert decode(RequestEvent, feed.events[0].value).scenario == "feed"
        assert [asked.scenario for _, asked in feed.requests] == ["feed"]

        refused = await door.ask("POST", "/v1/rank", {**RANK, "scenario": "default"})
        assert (refused.status, refused.value["error"]) == (400, "malformed")
        for stated in ("0123456789abcdef-0", "0123456789abcdef-0-ads"):  # as ids of other groups
            moved = await door.ask("POST", "/v1/rank", {**RANK, "request_id": stated}, relaygr_timeout_ms="20000")
            assert moved.status == 200
        assert len(feed.requests) == 3
        assert own.requests == []


async def test_a_scenario_that_nothing_serves_is_a_typed_error(embedded_settings: Kafka) -> None:
    async with served(embedded_settings) as (own, feed, door):
        for path, body in (("/v1/announce", ANNOUNCE), ("/v1/rank", RANK)):
            refused = await door.ask("POST", path, body, token_=OTHER)
            assert (refused.status, refused.value["error"]) == (503, "unknown_scenario")
            assert "'ads'" in refused.value["detail"]
        assert own.requests == feed.requests == []
