"""Announce, rank and cancel over HTTP: what goes in arrives on the topics, and what comes back is what workers say."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from pathlib import Path

import msgspec
import pytest

from relaygr_stream.gateway.messages import MSGPACK
from relaygr_stream.gateway.openapi import document
from relaygr_stream.history.store import WritableStore, open_store
from relaygr_stream.settings.schema import Client, History, Kafka
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.history import HistoryReference
from relaygr_stream.wire.messages import RankingRequest, RequestEvent, ScoreReply
from tests.unit.client_peers import responder_on
from tests.unit.gateway.doors import ANNOUNCE, HISTORY, OTHER, RANK, TOKEN, door_on
from tests.waiting import until

WIRE = Behaviours.from_arrays(HISTORY["items"], HISTORY["actions"], HISTORY["times"])
PACKED = {"items": WIRE.items, "actions": WIRE.actions, "times": WIRE.times}


async def test_a_request_announced_ranked_and_cancelled_in_json(kafka_settings: Kafka) -> None:
    async with responder_on(kafka_settings) as peer, door_on(kafka_settings) as door:
        announced = await door.ask("POST", "/v1/announce", {**ANNOUNCE, "rank_in_ms": 80}, x_request_id="trace-me")
        assert (announced.status, announced.headers["x-request-id"]) == (202, "trace-me")
        request_id = announced.value["request_id"]
        await until(lambda: len(peer.events) == 1, "announced")
        event = decode(RequestEvent, peer.events[0].value)
        assert (event.request_id, event.user_id, event.prefix, event.tenant) == (request_id, "u", WIRE, "shop")
        assert (event.candidates, event.rank_in_ms) == (3, 80.0)

        body = {**RANK, "request_id": request_id, "suffix": {"items": [8], "actions": [1], "times": [400]}}
        ranked = await door.ask("POST", "/v1/rank", body, relaygr_timeout_ms="20000")
        assert ranked.status == 200
        assert ranked.value["scores"] == [[11, -11], [30, -30], [20, -20]]
        assert (ranked.value["tasks"], ranked.value["request_id"]) == (["click", "like"], request_id)
        assert (ranked.value["outcome"], ranked.value["worker"]) == ("hbm", "peer")
        ((_, asked),) = peer.requests
        assert (asked.prefix, asked.suffix, asked.tenant, asked.client_id) == (
            WIRE, Behaviours.from_arrays([8], [1], [400]), "shop", "shop",
        )  # fmt: skip
        assert 0 < asked.timeout_ms <= 20_000

        assert (await door.ask("DELETE", f"/v1/requests/{request_id}", token_=OTHER)).status == 204
        assert (await door.ask("DELETE", "/v1/requests/my%2Fown?user_id=u")).status == 204
        await until(lambda: len(peer.cancels) == 2, "cancelled")
        assert {(cancel.request_id, cancel.tenant) for cancel in peer.cancels} == {
            (request_id, "library"),  # which is not the shop's request
            ("my/own", "shop"),
        }
        for own in ("my-own", "session-12"):  # the second only ends like a gateway's
            unknown = await door.ask("DELETE", f"/v1/requests/{own}")
            assert (unknown.status, unknown.value["error"]) == (400, "rejected")
            assert "user_id" in unknown.value["detail"]
        assert door.count("requests_total", path="/v1/rank", status="200") == 1


async def test_a_tenant_traces_its_own_requests_alone(embedded_settings: Kafka) -> None:
    async with responder_on(embedded_settings), door_on(embedded_settings) as door:
        request_id = (await door.ask("POST", "/v1/announce", ANNOUNCE)).value["request_id"]
        path = f"/trace?id={request_id}"

        async def is_found() -> bool:  # an announcement is acknowledged before the broker has it
            return b"announced" in (await door.ask("GET", path)).body.partition(b"<main")[0]

        await until(is_found, "traced")
        other = (await door.ask("GET", path, token_=OTHER)).body.partition(b"<main")[0]
        assert b"Nothing was found" in other
        assert b"announced" not in other


async def test_what_curl_sends_by_default_is_refused_with_what_it_should_send(embedded_settings: Kafka) -> None:
    """A page of any host may send a form to a gateway of this machine without asking it first."""
    async with responder_on(embedded_settings), door_on(embedded_settings) as door:
        form = await door.ask("POST", "/v1/rank", RANK, content_type="application/x-www-form-urlencoded")
        assert form.status == 415
        assert "-H 'content-type: application/json'" in form.value["detail"]


async def test_messagepack_is_packed_both_ways(embedded_settings: Kafka, subtests: pytest.Subtests) -> None:
    async with responder_on(embedded_settings) as peer, door_on(embedded_settings) as door:
        body = msgspec.msgpack.encode({**RANK, "history": PACKED, "candidates": struct.pack("<2I", 7, 9)})
        for media in ("application/msgpack", "application/vnd.msgpack", "application/x-msgpack"):
            with subtests.test(media):
                ranked = await door.ask("POST", "/v1/rank", body, content_type=media)
                assert ranked.headers["content-type"] == MSGPACK.media
                assert struct.unpack("<4f", ranked.value["scores"]) == (7, -7, 9, -9)
                assert peer.requests[-1][1].prefix == WIRE
                as_json = await door.ask("POST", "/v1/rank", body, content_type=media, accept="application/json")
                assert as_json.value["scores"] == [[7, -7], [9, -9]]


async def test_arrays_may_be_packed_in_json_and_lists_in_messagepack_and_features_pass(
    embedded_settings: Kafka,
) -> None:
    async with responder_on(embedded_settings) as peer, door_on(embedded_settings) as door:
        mixed = {
            "items": base64.b64encode(WIRE.items).decode(),
            "actions": HISTORY["actions"],
            "times": base64.b64encode(WIRE.times).decode(),
            "columns": {"dwell:float32": base64.b64encode(struct.pack("<3f", 1, 2, 3)).decode()},
        }
        columns = {"user": {"age:int32": base64.b64encode(struct.pack("<i", 31)).decode()}}
        assert (await door.ask("POST", "/v1/rank", {**RANK, "history": mixed, "columns": columns})).status == 200
        lists = msgspec.msgpack.encode(RANK)
        assert (await door.ask("POST", "/v1/rank", lists, content_type="application/msgpack")).status == 200
        (_, first), (_, second) = peer.requests
        assert first.prefix == msgspec.structs.replace(WIRE, columns={"dwell:float32": struct.pack("<3f", 1, 2, 3)})
        assert first.columns
        assert first.columns.user == {"age:int32": struct.pack("<i", 31)}
        assert second.prefix == WIRE


async def test_a_history_by_reference_is_the_clients_or_the_stores(embedded_settings: Kafka, tmp_path: Path) -> None:
    settings = History(store=f"sqlite:{tmp_path / 'histories'}", timeout_ms=5000)
    store = open_store(settings)
    assert isinstance(store, WritableStore)
    known = await store.append("u", "shop", WIRE)
    await store.close()
    mine = {"length": 7, "digest": base64.b64encode(bytes(range(16))).decode(), "version": 3}
    async with responder_on(embedded_settings) as peer, door_on(embedded_settings, history=settings) as door:
        announced = await door.ask("POST", "/v1/announce", {"user_id": "u", "candidates": 3})
        assert announced.status == 202
        for body in (
            {"user_id": "u", "candidates": [1]},
            {"user_id": "u", "candidates": [1], "reference": mine},
            {"user_id": "stranger", "candidates": [1]},
        ):
            assert (await door.ask("POST", "/v1/rank", body)).status == 200
        stored, stated, none = (request for _, request in peer.requests)
        await until(lambda: len(peer.events) == 1, "announced")
        assert decode(RequestEvent, peer.events[0].value).history == known == stored.history
        assert stated.history == HistoryReference(length=7, digest=bytes(range(16)), version=3)
        assert not none.history
        assert len(none.prefix) == 0
        both = await door.ask("POST", "/v1/rank", {**RANK, "reference": mine})
        assert (both.status, "not both" in both.value["detail"]) == (400, True)
    async with responder_on(embedded_settings), door_on(embedded_settings) as door:
        neither = await door.ask("POST", "/v1/rank", {"user_id": "u", "candidates": [1]})
        assert (neither.status, "history.store" in neither.value["detail"]) == (400, True)


OUTCOMES = {"overloaded": 429, "deadline_exceeded": 504, "rejected": 400, "failed": 502}


def as_its_user_says(request: RankingRequest) -> list[ScoreReply | bytes]:
    return [ScoreReply(request_id=request.request_id, status=request.user_id, detail="because")]  # type: ignore[arg-type]


async def test_each_outcome_has_its_status(embedded_settings: Kafka, subtests: pytest.Subtests) -> None:
    async with responder_on(embedded_settings, as_its_user_says), door_on(embedded_settings) as door:
        for outcome, code in OUTCOMES.items():
            with subtests.test(outcome):
                found = await door.ask("POST", "/v1/rank", {**RANK, "user_id": outcome})
                assert (found.status, found.value) == (code, {"error": outcome, "detail": "because"})
                assert found.headers.get("retry-after") == ("1" if code == 429 else None)


async def test_no_answer_in_time_is_504_and_a_full_gateway_429(embedded_settings: Kafka) -> None:
    async with (
        responder_on(embedded_settings) as peer,
        door_on(embedded_settings, Client(max_in_flight=1, timeout_ms=20_000)) as door,
    ):
        peer.hold = True
        late = await door.ask("POST", "/v1/rank", RANK, relaygr_timeout_ms="30")
        assert (late.status, late.value["error"]) == (504, "deadline_exceeded")
        for bad in ("0", "-1", "nan", "soon", "1e9"):
            assert (await door.ask("POST", "/v1/rank", RANK, relaygr_timeout_ms=bad)).status == 400
        waiting = asyncio.create_task(door.ask("POST", "/v1/rank", {**RANK, "request_id": "waits"}))
        await until(lambda: any(request.request_id == "waits" for _, request in peer.held), "one waits")
        full = await door.ask("POST", "/v1/rank", RANK)
        assert (full.status, full.headers["retry-after"]) == (429, "1")
        peer.release()
        assert (await waiting).status == 200


async def test_what_the_relay_says_of_its_own_parts_stays_in_its_log(embedded_settings: Kafka) -> None:
    said = f"cannot write /var/lib/relay/kv: broker kafka-1:9092 of {embedded_settings.prefix}ranking at 10.0.0.7"
    reply = ScoreReply(request_id="", status="failed", detail=said)

    def answers(request: RankingRequest) -> list[ScoreReply]:
        return [msgspec.structs.replace(reply, request_id=request.request_id)]

    async with responder_on(embedded_settings, answers), door_on(embedded_settings, max_body_bytes=4 << 20) as door:
        failed = await door.ask("POST", "/v1/rank", RANK)
        assert (failed.status, failed.value["detail"]) == (
            502, "cannot write (internal): broker (internal) of (internal) at (internal)",
        )  # fmt: skip
        wide = {"user": {f"{number}:int32": base64.b64encode(bytes(1800)).decode() for number in range(1000)}}
        large = await door.ask("POST", "/v1/rank", {**RANK, "columns": wide})
        assert (large.status, "bytes with headers, (internal) takes" in large.value["detail"]) == (400, True)


WRONG: list[tuple[dict[str, object], str]] = [
    ({"user_id": ""}, "$.user_id"),
    ({"history": {**HISTORY, "items": [1]}}, "history: items, actions and times"),
    ({"history": {**HISTORY, "items": [1, 2, -3]}}, "history: items must be within"),
    ({"history": {**HISTORY, "times": [3, 2, 1]}}, "times must not go back"),
    ({"history": {**HISTORY, "colums": {}}}, "colums"),
    ({"candidates": [2**63]}, "candidates: item ids must be within"),
    ({"candidates": []}, "candidates must be m ≥ 1"),
    ({"candidates": "AAA="}, "candidates must be m ≥ 1"),
    ({"mode": "fast"}, "$.mode"),
    ({"request_id": 7}, "$.request_id"),
    ({"tenant": "library"}, "tenant"),
]


async def test_what_is_wrong_is_named(embedded_settings: Kafka, subtests: pytest.Subtests) -> None:
    async with responder_on(embedded_settings), door_on(embedded_settings) as door:
        for change, named in WRONG:
            with subtests.test(str(change)):
                found = await door.ask("POST", "/v1/rank", {**RANK, **change})
                assert found.status == 400
                assert named in found.value["detail"]


async def test_pages_tell_of_the_fleet_and_the_process(embedded_settings: Kafka) -> None:
    async with responder_on(embedded_settings), door_on(embedded_settings) as door:
        page = await door.ask("GET", "/")
        assert "0 trigger(s), 0 worker(s)" in page.body.decode()
        assert "no worker is ready" in page.body.decode()
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert (await door.ask("GET", "/", accept="application/json")).value["workers"] == []
        basic = base64.b64encode(f"anyone:{TOKEN}".encode()).decode()
        assert (await door.ask("GET", "/", token_="", authorization=f"Basic {basic}")).status == 200
        assert b"relaygr_gateway_connections" in (await door.ask("GET", "/metrics")).body
        assert (await door.ask("GET", "/readyz", token_="")).value == {"status": "ok"}
        assert (await door.ask("GET", "/healthz", token_="")).status == 200
        assert (await door.ask("GET", "/openapi.json", token_="")).value == json.loads(json.dumps(document()))
        assert b"openapi.json" in (await door.ask("GET", "/docs", token_="")).body
        for path in ("/", "/live", "/trace?id=r", "/metrics"):
            closed = await door.ask("GET", path, token_="")
            assert (closed.status, closed.headers["www-authenticate"][:5]) == (401, "Basic")
        for path in ("/", "/live", "/trace", "/metrics", "/readyz", "/healthz", "/openapi.json", "/docs"):
            for token in (TOKEN, ""):  # an answer to one caller, or of one moment, is no other's
                assert (await door.ask("GET", path, token_=token)).headers["cache-control"] == "no-store"
        for path in ("/docs/", "/v1/rank/", "/v1/announce/", "/metrics/", "//"):
            elsewhere = await door.ask("GET", path, host="elsewhere.example")
            assert (elsewhere.status, "location" in elsewhere.headers) == (404, False)
        assert (await door.ask("GET", "/v1/rank")).status == 405
        assert (await door.ask("GET", "/v2")).status == 404
