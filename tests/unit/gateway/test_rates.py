"""Requests a second: of each tenant, of each address without a token; a refused body counts by its bytes."""

from __future__ import annotations

import asyncio
import json

import pytest

from relaygr_stream.gateway.bodies import longest_body
from relaygr_stream.gateway.rates import MAX_CALLERS, Rates
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.settings.schema import Kafka, Relay
from tests.unit.client_peers import responder_on
from tests.unit.gateway.doors import OTHER, RANK, OpenDoor, Reply, door_on


def test_a_caller_has_its_rate_and_as_many_at_once() -> None:
    rates = Rates(5.0)
    assert [rates.wait_s("a", 1.0) for _ in range(7)] == [0, 0, 0, 0, 0, 1, 1]
    assert rates.wait_s("b", 1.0) == 0
    assert [rates.wait_s("a", 1.5) for _ in range(3)] == [0, 0, 1]
    assert [rates.wait_s("a", 3601.5) for _ in range(6)] == [0, 0, 0, 0, 0, 1]


def test_a_caller_may_have_a_rate_of_its_own() -> None:
    rates = Rates(5.0, {"a": 2.0})
    assert [rates.wait_s("a", 1.0) for _ in range(3)] == [0, 0, 1]
    assert [rates.wait_s("b", 1.0) for _ in range(6)] == [0, 0, 0, 0, 0, 1]
    assert [rates.wait_s("a", 2.0) for _ in range(3)] == [0, 0, 1]


async def test_a_tenant_has_the_rate_of_its_scenario(embedded_settings: Kafka) -> None:
    sections = (Scenario(name="feed", tenants=("shop",), max_rate=0.05), Scenario(name="ads", tenants=("library",)))
    async with responder_on(embedded_settings), door_on(embedded_settings, scenarios=sections) as door:
        first, second = await door.ask("GET", "/metrics"), await door.ask("GET", "/metrics")
        assert (first.status, second.status) == (200, 429)
        assert "0.05 times a second" in second.value["detail"]
        assert {reply.status for reply in await asked(door, 3, "GET", "/metrics", token_=OTHER)} == {200}


def test_a_refused_body_is_paid_for_by_the_next_requests() -> None:
    rates = Rates(100.0)
    rates.refused("a", 1 << 20, 1.0)
    assert rates.wait_s("a", 1.0) == 10
    assert rates.wait_s("b", 1.0) == 0
    assert rates.wait_s("a", 10.5) == 0


def test_a_slow_rate_still_has_a_request() -> None:
    rates = Rates(0.1)
    assert (rates.wait_s("a", 1.0), rates.wait_s("a", 1.0)) == (0, 10)


def test_callers_remembered_are_bounded() -> None:
    rates = Rates(1.0)
    for number in range(MAX_CALLERS + 10):
        rates.wait_s(str(number), 1.0)
    assert len(rates._left) == MAX_CALLERS
    assert rates.wait_s(str(MAX_CALLERS), 1.0) == 1


async def asked(door: OpenDoor, times: int, *args: object, **headers: str) -> list[Reply]:
    return list(await asyncio.gather(*(door.ask(*args, **headers) for _ in range(times))))  # type: ignore[arg-type]


async def test_a_tenant_beyond_its_rate_is_told_when_to_ask_again_and_others_are_served(
    embedded_settings: Kafka, subtests: pytest.Subtests
) -> None:
    async with responder_on(embedded_settings), door_on(embedded_settings, max_rate=0.05) as door:
        for method, path in (("POST", "/v1/announce"), ("DELETE", "/v1/requests/r?user_id=u"), ("GET", "/metrics")):
            assert (await door.ask("POST", "/v1/rank", RANK)).status in (200, 429)
            with subtests.test(path):
                refused = await door.ask(method, path, RANK if method == "POST" else None)
                assert (refused.status, refused.value["error"]) == (429, "overloaded")
                assert 1 <= int(refused.headers["retry-after"]) <= 20
                assert "gateway.max_rate" in refused.value["detail"]
        assert (await door.ask("POST", "/v1/rank", RANK, token_=OTHER)).status == 200


async def test_strangers_have_a_rate_of_their_own(embedded_settings: Kafka) -> None:
    async with responder_on(embedded_settings), door_on(embedded_settings, max_rate=1.0) as door:
        for path in ("/healthz", "/readyz", "/openapi.json", "/docs", "/v2", "/metrics"):
            found = await asked(door, 3, "GET", path, token_="")
            assert 429 in {reply.status for reply in found}
        (refused,) = await asked(door, 1, "GET", "/healthz", token_="wrong-but-long-enough")
        assert (refused.status, refused.headers["connection"]) == (429, "close")
        assert 1 <= int(refused.headers["retry-after"]) <= 10
        assert (await door.ask("POST", "/v1/rank", RANK)).status == 200
        assert door.count("requests_total", path="strangers", status="429") >= 13


async def test_refused_bodies_take_a_tenants_rate_and_no_others(embedded_settings: Kafka) -> None:
    body = json.dumps({**RANK, "candidates": [0] * 100_000}).encode()
    async with responder_on(embedded_settings), door_on(embedded_settings, max_rate=20.0) as door:
        assert (await door.ask("POST", "/v1/rank", body)).status == 400
        later = await door.ask("POST", "/v1/rank", RANK)
        assert later.status == 429
        assert int(later.headers["retry-after"]) >= len(body) / 1024 / 20 / 2
        assert (await door.ask("POST", "/v1/rank", RANK, token_=OTHER)).status == 200


@pytest.mark.parametrize(("status", "media"), [(413, "application/json"), (415, "text/plain")])
async def test_a_body_that_is_refused_unread_is_paid_for_as_well(
    embedded_settings: Kafka, status: int, media: str
) -> None:
    """The connection drops a part of it, and the next one costs the loop as much as a body that was decoded."""
    limited = door_on(embedded_settings, max_rate=5.0, max_body_bytes=100_000)
    async with responder_on(embedded_settings), limited as door:
        size = 100_000 + (status == 413)
        assert (await door.ask("POST", "/v1/rank", b"x" * size, content_type=media)).status == status
        assert (await door.ask("POST", "/v1/rank", RANK)).status == 429
        assert (await door.ask("POST", "/v1/rank", RANK, token_=OTHER)).status == 200


async def test_the_longest_body_follows_from_the_relays_limits(embedded_settings: Kafka) -> None:
    relay = Relay()
    n = relay.max_prefix_tokens
    most = {
        "user_id": "u" * 256,
        "history": {"items": [2**32 - 1] * n, "actions": [255] * n, "times": [2**62 - 1] * n},
        "suffix": {"items": [2**32 - 1] * 256, "actions": [255] * 256, "times": [2**62 - 1] * 256},
        "candidates": [2**32 - 1] * relay.max_candidates,
    }
    async with responder_on(embedded_settings), door_on(embedded_settings) as door:
        assert (await door.ask("POST", "/v1/rank", most)).status == 200
        beyond = await door.ask("POST", "/v1/rank", b" " * (longest_body(relay) + 1))
        assert (beyond.status, str(longest_body(relay)) in beyond.value["detail"]) == (413, True)
    assert longest_body(Relay(max_prefix_tokens=100_000)) > 4 << 20
